"""Tests of pdecay.load: files that do not fit the model, special models, memory limits."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from safetensors import safe_open
from torch import nn

from pdecay.deployment.files import FileFormatError, load, save
from pdecay.deployment.layers.modules import SparseLinear
from tests.deployment.files.sparse_nets import sparse_net

from .contents import check_same

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


class TestMismatches:
    def check(self, path, model, message, **options):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=message) as caught:
            load(path, model, **options)
        assert str(path) in str(caught.value)
        assert all(torch.equal(before[n], value) for n, value in model.state_dict().items())

    def test_names(self, path):
        save(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), path)
        model = nn.Sequential(OrderedDict(a=nn.Linear(3, 4)))
        self.check(
            path, model, r"in the file: 'a\.weight', 'a\.bias'; missing in the model: '0\.weight'"
        )
        assert load(path, model, strict=False) is model
        save(nn.Linear(3, 4), path)
        weight = nn.Linear(3, 4, bias=False)
        self.check(path, weight, "missing in the model: 'bias'")
        load(path, weight, strict=False)
        assert torch.equal(weight.weight, load(path)["weight"])

    def test_many_names(self, path):
        save({f"n{i}": torch.zeros(1) for i in range(50)}, path)
        self.check(path, nn.Linear(3, 4), r"missing in the model: 'n0', .*'n7', and 42 more")

    @pytest.mark.parametrize("strict", [True, False])
    def test_shapes(self, path, strict):
        save(nn.Linear(3, 4), path)
        message = (
            r"'weight' has shape \[4, 3\] in the file and \[3, 3\] in the model; 'bias' has shape"
        )
        self.check(path, nn.Linear(3, 3), message, strict=strict)

    def test_dtypes(self, path):
        save({"weight": torch.randn(4, 3), "bias": torch.randn(4)}, path)
        model = nn.Linear(3, 4).to(torch.bfloat16)
        load(path, model)
        assert torch.equal(model.weight, load(path)["weight"].to(torch.bfloat16))
        save({"weight": torch.randn(4, 3, dtype=torch.complex64), "bias": torch.randn(4)}, path)
        self.check(path, nn.Linear(3, 4), "which cannot be cast to torch.float32")

    def test_uninitialised_models(self, path):
        save(nn.Linear(3, 4), path)
        with pytest.raises(ValueError, match=r"'weight' is on the meta device .*to_empty"):
            load(path, nn.Linear(3, 4, device="meta"))
        with pytest.raises(ValueError, match="'weight' is not initialised in the model"):
            load(path, nn.LazyLinear(4))

    def test_expanded_buffer(self, path):
        model = nn.Module()
        model.register_buffer("b", torch.zeros(1).expand(5))
        save(model, path)
        self.check(path, model, "'b' is expanded in the model")

    def test_damaged_file_leaves_model_unchanged(self, path):
        save(sparse_net(), path)
        data = bytearray(path.read_bytes())
        with safe_open(path, "np") as file:
            positions = file.get_tensor("positions").tobytes()
        start = data.index(positions)
        data[start : start + 3] = b"\xff" * 3
        path.write_bytes(data)
        model = sparse_net(1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(FileFormatError):
            load(path, model)
        check_same(before, model.state_dict())

    def test_arguments(self, path):
        save(nn.Linear(3, 4), path)
        with pytest.raises(TypeError, match=r"needs a torch.nn.Module, got dict"):
            load(path, {})
        with pytest.raises(ValueError, match="max_bytes needs a load without a model"):
            load(path, nn.Linear(3, 4), max_bytes=10)
        with pytest.raises(ValueError, match="trusted needs a load without a model"):
            load(path, nn.Linear(3, 4), trusted=True)
        with pytest.raises(FileNotFoundError):
            load(path.with_name("missing"))

    def test_swapped_arguments_raise(self, path):
        with pytest.raises(TypeError, match=r"path is a Linear: .* save\(model, path\)"):
            save(path, nn.Linear(3, 4))
        with pytest.raises(TypeError, match=r"path is a Linear: .* load\(path, model\)"):
            load(nn.Linear(3, 4), path)


def test_model_with_extra_state_loads_by_load_state_dict(path):
    """The tensors of such a state dict are copies, so they cannot be filled in place."""

    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.steps = torch.zeros(2)

        def get_extra_state(self):
            return self.steps.clone()

        def set_extra_state(self, state):
            self.steps = state

    model, other = Doubled(), Doubled()
    model.steps = torch.tensor([3.0, 4.0])
    save(model, path)
    load(path, other)
    assert torch.equal(other.steps, model.steps)
    check_same(model.state_dict(), other.state_dict())


class Cached(nn.Linear):
    """A layer that derives a number from its weight, and converts the states of old versions."""

    _version = 2

    def __init__(self, way):
        super().__init__(3, 2)
        self.total = 0.0
        if way == "hook":
            self.register_load_state_dict_post_hook(lambda *_: self.update())
        self.way = way

    def update(self):
        self.total = float(self.weight.sum())

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        if metadata.get("version") != self._version:
            state[f"{prefix}weight"] = -state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *args)
        if self.way == "override":
            self.update()


@pytest.mark.parametrize("way", ["hook", "override"])
def test_modules_that_do_more_in_load_state_dict(tmp_path, way):
    model = nn.Sequential(nn.BatchNorm1d(3), Cached(way))
    save(model, tmp_path / "file")
    other = load(tmp_path / "file", nn.Sequential(nn.BatchNorm1d(3), Cached(way)))
    assert torch.equal(other[1].weight, model[1].weight)
    assert other[1].total == float(model[1].weight.detach().sum())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("target", ["coo", "csr", "float4"])
def test_targets_that_cannot_be_filled(tmp_path, target):
    model = nn.Module()
    model.register_buffer("first", torch.zeros(2))
    tensors = {
        "coo": torch.zeros(2, 2).to_sparse(),
        "csr": torch.zeros(2, 2).to_sparse_csr(),
        "float4": torch.zeros(2, 2, dtype=torch.uint8).view(
            getattr(torch, "float4_e2m1fn_x2", torch.int8)
        ),
    }
    model.register_buffer("x", tensors[target])
    save({"first": torch.ones(2), "x": torch.ones(2, 2)}, tmp_path / "file")
    with pytest.raises(ValueError, match=r"unchanged: 'x' is (a .* tensor in|torch.float32 in)"):
        load(tmp_path / "file", model)
    assert not model.first.any()


def test_quantized_models_are_refused(path):
    """Quantized tensors have no memory of their own, so that they looked as if they were tied."""
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    save(model, path)
    model[0].bias.data.zero_()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match=r"unchanged: '0.weight' is a \w+ in the model: load"):
        load(path, model)
    assert not model[0].bias.any()


def test_load_is_seen_by_autograd(path):
    """Autograd must detect that a weight saved for backward has changed."""
    model = nn.Linear(3, 3)
    save(model, path)
    out = model(model(torch.randn(2, 3, requires_grad=True))).sum()
    load(path, model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    assert model.weight.requires_grad


def test_parametrized_and_pruned_models(path):
    from torch.nn.utils import parametrizations, prune

    def build():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parametrizations.weight_norm(model[0])
        prune.random_unstructured(model[1], "weight", 0.5)
        return model

    model, other = build(), build()
    save(model, path)
    load(path, other)
    check_same(model.state_dict(), other.state_dict())


class TestMemoryLimit:
    def test_error_names_required_max_bytes(self, path):
        state = {"w": torch.zeros(300, 300)}
        state["w"][5, 7] = 1
        save(state, path)
        with pytest.raises(FileFormatError, match=r"takes [\d,]+ in memory") as caught:
            load(path)
        needed = int(str(caught.value).split("max_bytes=")[1].split(")")[0])
        assert 360_000 < needed < 370_000
        check_same(state, load(path, max_bytes=needed))
        check_same(state, load(path, trusted=True))
        with pytest.raises(FileFormatError, match="takes"):
            load(path, max_bytes=needed - 1)

    def test_model_shapes_replace_memory_limit(self, path):
        model = nn.Linear(300, 300)
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
        save(model, path)
        other = load(path, nn.Linear(300, 300))
        assert not other.weight.any()
        assert not other.bias.any()

    def test_default_limit_allows_98_percent_sparsity(self, path):
        w = torch.randn(1000, 300) * (torch.rand(1000, 300) >= 0.978)
        save({"w": w}, path)
        assert torch.equal(load(path)["w"], w)

    @pytest.mark.parametrize("count", [1, 10, 1000])
    @pytest.mark.parametrize("value", [torch.tensor(0.0), torch.tensor(True), torch.empty(0)])
    def test_default_limit_allows_many_tiny_tensors(self, path, count, value):
        state = {str(i): value.clone() for i in range(count)}
        save(state, path)
        check_same(state, load(path))

    def test_default_limit_allows_many_ties(self, path):
        state = dict.fromkeys(map(str, range(1000)), torch.ones(3))
        save(state, path)
        check_same(state, load(path))

    def test_default_limit_allows_long_names(self, path):
        state = {"x" * 100_000: torch.ones(3), "ü" * 50_000: torch.ones(2)}
        save(state, path)
        check_same(state, load(path))


def test_sparse_layer_made_in_inference_mode_uses_the_loaded_weights(path):
    """Tensors that are made in inference mode have no version, which counts their changes."""
    dense, x = nn.Linear(8, 20), torch.randn(1, 8)
    with torch.inference_mode():
        dense.weight.masked_fill_(torch.rand(20, 8) < 0.8, 0)
        layer = SparseLinear(dense)
        layer(x)
        dense.weight.mul_(2)
        dense.bias.add_(1)
        other = SparseLinear(dense)
        save(other, path)
        torch.testing.assert_close(load(path, layer)(x), dense(x))
        other.columns.fill_(2**30)  # the kernel must not read there
        save(other, path)
        with pytest.raises(ValueError, match="are not the non-zeros of a 20 x 8 weight"):
            load(path, layer)(x)


@pytest.mark.parametrize("use", ["forward", "weight"])
def test_rows_of_a_sparse_layer_whose_sizes_overflow_are_refused(path, use):
    """Both the kernel and torch.repeat_interleave would use memory outside the buffers."""
    layer = SparseLinear(nn.Linear(8, 3))
    first = 2**62 + 5
    # Each row ends after the one before, modulo 2**64.
    row = torch.tensor([0, first, first - 2**63 - 1, len(layer.values)])
    assert (row.diff() >= 0).all()
    save({**layer.state_dict(), "row": row}, path)
    load(path, layer)
    with pytest.raises(ValueError, match="are not the non-zeros of a 3 x 8 weight"):
        layer(torch.randn(1, 8)) if use == "forward" else layer.weight


def test_default_device_is_ignored(path):
    model, other = sparse_net(), sparse_net()
    save(model, path)
    with torch.device("meta"):
        state = load(path)
        load(path, other)
    check_same(state, model.state_dict())
    check_same(other.state_dict(), model.state_dict())
