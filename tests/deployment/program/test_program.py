"""Saved programs: equal outputs without the model's code, and no other code from a file."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import pdecay
from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.deployment.layers.modules import SparseConv2d, SparseLayer, SparseLinear
from pdecay.deployment.program import SavedModel
from tests.deployment.networks import NETWORKS, mostly_zero

needs_compiler = pytest.mark.skipif(bool(layers_kernel.available()), reason="no compiler")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


CASES = NETWORKS | {
    "reflecting": lambda: (
        nn.Conv2d(4, 8, 3, padding=2, stride=2, groups=2, padding_mode="reflect", bias=False),
        torch.randn(2, 4, 9, 9),
    ),
}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_deployed_model_is_saved_and_loaded(clock, tmp_path, name):
    model, x = CASES[name]()
    deployed = pdecay.deploy(mostly_zero(model), x)
    assert deployed.report.chosen == "sparse"
    path = tmp_path / "model.safetensors"
    pdecay.save(deployed, path)
    loaded = pdecay.load(path, trusted=True)
    assert isinstance(loaded, SavedModel)
    assert loaded.free_batch
    assert not loaded.training
    with torch.inference_mode():
        for given in (x, x[:1], torch.cat([x, x, x])):
            torch.testing.assert_close(loaded(given), deployed(given), rtol=1e-5, atol=1e-6)
    sparse, expected = (
        sum(isinstance(module, SparseLayer) for module in one.modules())
        for one in (loaded, deployed)
    )
    assert sparse == expected > 0


@needs_compiler
def test_sparse_layers_keep_their_names_and_relus(clock, tmp_path):
    model = mostly_zero(
        nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    )
    x = torch.randn(2, 2, 8, 8)
    model(x)
    mostly_zero(model[3])
    pdecay.save(pdecay.deploy(model, x), tmp_path / "model.safetensors")
    loaded = pdecay.load(tmp_path / "model.safetensors", trusted=True)
    layers = dict(loaded.program.model.named_modules())
    assert isinstance(layers["0"], SparseConv2d)
    assert layers["0"].relu
    assert isinstance(layers["3"], SparseLinear)


@pytest.mark.parametrize("name", ["graph", "meta", "code", "recompile", "input_0"])
@pytest.mark.parametrize("kind", ["module", "buffer"])
def test_names_of_attributes_of_a_graph_module(tmp_path, name, kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            if kind == "module":
                self.add_module(name, nn.Linear(4, 4))
            else:
                self.register_buffer(name, torch.randn(4))

        def forward(self, x):
            part = getattr(self, name)
            return part(x) if kind == "module" else part * x

    model, x = Model().eval(), torch.randn(3, 4)
    pdecay.save(model, tmp_path / "model.safetensors", example_inputs=x)
    loaded = pdecay.load(tmp_path / "model.safetensors", trusted=True)
    torch.testing.assert_close(loaded(x[:2]), model(x[:2]))


def test_loaded_model_can_be_saved_and_exported_again(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(3, 4)
    pdecay.save(model, tmp_path / "model.safetensors", example_inputs=x)
    loaded = pdecay.load(tmp_path / "model.safetensors", trusted=True)
    pdecay.save(loaded, tmp_path / "again.safetensors", example_inputs=x)
    again = pdecay.load(tmp_path / "again.safetensors", trusted=True)
    torch.testing.assert_close(again(x[:2]), model(x[:2]))
    exported = torch.export.export(loaded, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))


def test_loaded_model_is_not_saved_without_its_program(tmp_path):
    path, again = tmp_path / "model.safetensors", tmp_path / "again.safetensors"
    pdecay.save(nn.Linear(4, 2), path, example_inputs=torch.randn(3, 4))
    loaded = pdecay.load(path, trusted=True)
    with pytest.raises(ValueError, match="give example_inputs, or copy the file"):
        pdecay.save(loaded, again)
    assert not again.exists()
    pdecay.save(loaded.state_dict(), again)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        x = self.project(x)
        rest = torch.div(torch.arange(x.shape[1]), 2, rounding_mode="floor")
        return nn.functional.scaled_dot_product_attention(x, x, x) * rest[:, None]


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0][:, -1]


@pytest.mark.parametrize("make", [Attention, Last])
@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_loaded_model_can_be_pickled_and_copied(make, copied, tmp_path):
    model, x = make().eval(), torch.randn(3, 4, 8)
    pdecay.save(model, tmp_path / "model.safetensors", example_inputs=x)
    loaded = pdecay.load(tmp_path / "model.safetensors", trusted=True)
    twin = copied(loaded)
    assert torch.equal(twin(x[:2]), loaded(x[:2]))
    assert not any(module.training for module in twin.modules())
    for key, tensor in twin.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[key])
        assert tensor.data_ptr() != loaded.state_dict()[key].data_ptr()
    with pytest.raises(ValueError, match="size"):
        twin(torch.randn(3, 4, 7))


class ReadsSizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3, stride=2), nn.Linear(8, 4)

    def forward(self, x):
        x = nn.functional.pad(x, 4 * [self.conv.kernel_size[0] // 2])
        y = self.conv(x).mean((2, 3)).view(-1, self.linear.in_features)
        return self.linear(y) * self.conv.stride[0]


@needs_compiler
def test_model_that_reads_sizes_of_its_layers(tmp_path):
    model, x = mostly_zero(ReadsSizes()).eval(), torch.randn(2, 3, 9, 9)
    deployed = pdecay.deploy(model, x, choose="sparse", seconds=0)
    pdecay.save(deployed, tmp_path / "model.safetensors")
    loaded = pdecay.load(tmp_path / "model.safetensors", trusted=True)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)


class Nested(nn.Module):
    """A model with a dict, a tuple, a keyword and a constant as inputs, and nested outputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, batch, pair, *, mode="sum", shift=None):
        y = self.layer(batch["x"]) * self.scale + torch.tensor([1.0, 2.0, 3.0, 4.0])
        y = y + pair[0] if mode == "sum" else y - pair[0]
        y = y if shift is None else y + shift
        return {"y": y, "all": (y.sum(), [pair[1], None]), "mode": mode}


def test_sparse_layer_with_two_names(tmp_path):
    layer = SparseLinear(mostly_zero(nn.Linear(32, 32)))
    model = nn.Sequential(layer, nn.Tanh(), layer).eval()
    x = torch.randn(3, 32)
    path = tmp_path / "model.safetensors"
    pdecay.save(model, path, example_inputs=x)
    loaded = pdecay.load(path, trusted=True)
    calls = [node.op for node in loaded.program.graph.nodes if node.op.startswith("call_")]
    assert calls == ["call_module", "call_function", "call_module"]
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-6)


def test_nested_inputs_and_outputs(tmp_path):
    model, path = Nested(), tmp_path / "model.safetensors"
    x, shift = torch.randn(3, 4), torch.randn(3, 4)
    args, kwargs = ({"x": x}, (x, x + 1)), {"mode": "difference", "shift": shift}
    pdecay.save(model, path, example_inputs=(args, kwargs))
    loaded = pdecay.load(path, trusted=True)
    got, wanted = loaded(*args, **kwargs), model(*args, **kwargs)
    assert got["mode"] == "difference"
    assert got["all"][1][1] is None
    torch.testing.assert_close(got["y"], wanted["y"])
    torch.testing.assert_close(got["all"][0], wanted["all"][0])
    with pytest.raises(TypeError, match=r"\['mode'\] must be 'difference', .* got 'sum'"):
        loaded(*args, mode="sum", shift=shift)
    with pytest.raises(TypeError, match=r"must be a sequence of length 2, .* got length 1"):
        loaded({"x": x}, **kwargs)
    with pytest.raises(TypeError, match=r"arguments\[0\] must be a dict with the keys 'x'"):
        loaded(x, (x, x), **kwargs)


def test_compacted_model_is_saved(tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).train()
    model[2].weight.data[:, :9] = 0
    x = torch.randn(2, 8)
    smaller = pdecay.compact(model, x)
    pdecay.save(smaller, tmp_path / "m.safetensors", example_inputs=x)
    assert smaller.training
    loaded = pdecay.load(tmp_path / "m.safetensors", trusted=True)
    torch.testing.assert_close(loaded(x), model(x))
    assert {tuple(one.shape) for one in loaded.buffers()} == {(7, 8), (7,), (2, 7), (2,)}


@pytest.mark.slow
def test_saved_model_runs_without_the_code_of_its_class(tmp_path):
    (tmp_path / "my_training.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(4, 2)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x).relu()\n"
    )
    make = (
        "import sys, torch, pdecay; sys.path.insert(0, '.'); import my_training\n"
        "torch.manual_seed(0); net = my_training.Net(); x = torch.ones(2, 4)\n"
        "pdecay.save(net, 'net.safetensors', example_inputs=x); print(net(x).tolist())\n"
    )
    read = (
        "import torch, pdecay\n"
        "loaded = pdecay.load('net.safetensors', trusted=True)\n"
        "print(loaded(torch.ones(2, 4)).tolist())\n"
    )
    printed = []
    for code in (make, read):
        printed.append(
            subprocess.run(
                [sys.executable, "-c", code],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        Path(tmp_path / "my_training.py").unlink(missing_ok=True)
    expected, got = (torch.tensor(json.loads(text)) for text in printed)
    torch.testing.assert_close(got, expected)


def test_program_is_not_loaded_into_a_model(tmp_path):
    model, x = nn.Linear(4, 2), torch.randn(2, 4)
    pdecay.save(model, tmp_path / "m.safetensors", example_inputs=x)
    with pytest.raises(ValueError, match=r"call load\(path, trusted=True\) without a model"):
        pdecay.load(tmp_path / "m.safetensors", model)
    with pytest.raises(TypeError, match=r"a program needs a torch.nn.Module"):
        pdecay.save(model.state_dict(), tmp_path / "m.safetensors", example_inputs=x)


class ReturnsAnObject(nn.Module):
    def forward(self, x):
        return {"x": x, "cache": object()}


def test_models_that_cannot_be_recorded(tmp_path):
    path = tmp_path / "m.safetensors"
    with pytest.raises(pdecay.ExportError, match=r"the output\['cache'\] is a object: a program"):
        pdecay.save(ReturnsAnObject(), path, example_inputs=torch.randn(2, 4))
    pruned = prune.random_unstructured(nn.Linear(4, 2), "weight", 0.5)
    with pytest.raises(pdecay.ExportError, match=r"cannot be copied .*prune\.remove"):
        pdecay.save(pruned, path, example_inputs=torch.randn(2, 4))
    assert not path.exists()


class Averaging(nn.Module):
    """A model whose numbers depend on the length of its input."""

    def __init__(self, of_length) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.of_length = of_length

    def forward(self, x, scale=None):
        y = self.layer(x).sum(1) / self.of_length(x.shape[1])
        return y if scale is None else y * scale


def test_program_follows_the_length_of_its_input(tmp_path):
    model, x = Averaging(lambda length: length), torch.randn(2, 6, 4)
    pdecay.save(model, tmp_path / "m.safetensors", example_inputs=x)
    loaded = pdecay.load(tmp_path / "m.safetensors", trusted=True)
    for shape in ((2, 6, 4), (1, 6, 4), (2, 9, 4), (5, 1, 4)):
        other = torch.randn(shape)
        torch.testing.assert_close(loaded(other), model(other))
    with pytest.raises(ValueError, match=r"\[n0, n1, 4\], n0 at least 0, n1 at least 0, got"):
        loaded(torch.randn(2, 6, 5))


def test_program_refuses_sizes_that_it_was_not_recorded_for(tmp_path):
    model, x = Averaging(lambda length: 2 if length > 5 else 1), torch.randn(2, 6, 4)
    pdecay.save(model, tmp_path / "m.safetensors", example_inputs=x)
    loaded = pdecay.load(tmp_path / "m.safetensors", trusted=True)
    for rows in (1, 2, 7):
        other = torch.randn(rows, 6, 4)
        torch.testing.assert_close(loaded(other), model(other))
    with pytest.raises(ValueError, match=r"got \[2, 3, 4\] as tensor 0: save the model with"):
        loaded(torch.randn(2, 3, 4))


@pytest.mark.parametrize(
    ("of_length", "refused", "condition"),
    [
        (lambda length: 2 if length % 5 else 1, (5, 10), r"\(n1 % 5\) != 0, got n0 = 2, n1 = 5"),
        (lambda length: 1 if length == 7 else 2, (7,), r"n1 != 7, got n0 = 2, n1 = 7"),
        (lambda length: 2 if length**2 % 9 == 0 else 1, (1, 2, 5, 7, 10), r"% 9\) == 0, got"),
        (lambda length: 1 if 8 // length == 4 else 2, (2,), r"4, got n0 = 2, n1 = 2"),
    ],
)
def test_program_refuses_lengths_of_another_branch(tmp_path, of_length, refused, condition):
    model, x = Averaging(of_length), torch.randn(2, 6, 4)
    pdecay.save(model, tmp_path / "m.safetensors", example_inputs=x)
    loaded = pdecay.load(tmp_path / "m.safetensors", trusted=True)
    with pytest.raises(ValueError, match=condition):
        loaded(torch.randn(2, refused[0], 4))
    taken = []
    for length in range(1, 13):
        other = torch.randn(2, length, 4)
        try:
            found = loaded(other)
        except ValueError:
            continue
        torch.testing.assert_close(found, model(other))
        taken.append(length)
    assert not set(refused) & set(taken)
    assert {6, 12} <= set(taken)


def test_program_for_one_batch_size_refuses_others(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), Doubled())
    pdecay.save(model, tmp_path / "m.safetensors", example_inputs=torch.randn(8, 4))
    loaded = pdecay.load(tmp_path / "m.safetensors", trusted=True)
    assert not loaded.free_batch
    x = torch.randn(8, 4)
    torch.testing.assert_close(loaded(x), model(x))
    with pytest.raises(ValueError, match=r"shape \[8, 4\], got \[3, 4\] as tensor 0"):
        loaded(x[:3])


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x if len(x) > 5 else x


def test_tensors_with_a_common_size_must_agree(tmp_path):
    model, x = Averaging(lambda length: length), torch.randn(2, 6, 4)
    example = (x, torch.randn(2, 3))
    pdecay.save(model, tmp_path / "m.safetensors", example_inputs=example)
    loaded = pdecay.load(tmp_path / "m.safetensors", trusted=True)
    torch.testing.assert_close(loaded(*example), model(*example))
    with pytest.raises(ValueError, match="as tensor 1"):
        loaded(x, torch.randn(1, 3))  # torch would repeat the row
