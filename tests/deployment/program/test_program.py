"""Saved programs: equal outputs without the model's code, and no other code from a file."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import prune

import pdecay
from pdecay.deployment.files.programs import PROGRAM
from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.deployment.layers.modules import SparseConv2d, SparseLayer, SparseLinear
from pdecay.deployment.model.errors import ExportError
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.program import SavedModel, capture, restore
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


def _changed(program, **changes):
    content = json.loads(zlib.decompress(program))
    return zlib.compress(json.dumps({**content, **changes}).encode())


# Operators that access foreign memory if their sizes or indices are wrong.
UNCHECKED = ["segment_reduce.default", "native_batch_norm.default", "ctc_loss.IntList"]
UNCHECKED += ["batch_norm_update_stats.default", "_embedding_bag.default", "lstm.data", "gru.data"]
UNCHECKED += ["linalg_lu_solve.default", "linalg_ldl_solve.default", "lu_unpack.default"]
UNCHECKED += ["_transformer_encoder_layer_fwd.default", "_native_multi_head_attention.default"]


def test_malicious_programs_are_rejected():
    captured = capture(nn.Linear(4, 2), Inputs.of(torch.randn(2, 4)))
    content = json.loads(zlib.decompress(captured.program))
    (call,) = content["calls"]
    weight, _ = content["names"][:2]
    attacks = [
        ["os.system", ["true"], {}],
        ["operator.methodcaller", ["x"], {}],
        ["aten.from_file.default", ["/etc/passwd"], {}],
        ["aten.__class__.mro", [], {}],
        ["torch.load", ["x"], {}],
        ["aten.max_pool2d_with_indices_backward.default", [], {}],
        ["aten._sparse_coo_tensor_unsafe.default", [], {}],
        *([f"aten.{name}", [], {}] for name in UNCHECKED),
        ["aten._convert_indices_from_coo_to_csr.default", [], {}],
        ["aten.set_.source_Tensor", [], {}],
        ["aten.add.out", [], {}],
        [call[0], [{"n": 99}], {}],
        [call[0], [{"dtype": "load"}], {}],
        [call[0], call[1], {"a=print(1)": 1}],
    ]
    for bad in attacks:
        with pytest.raises(ValueError, match=r"a program|an argument"):
            restore(_changed(captured.program, calls=[bad]), captured.tensors, 10**6)
    for name in ("weight\nprint(1)", 'a"]; print(1); x["', "a b", ""):
        tensors = {**captured.tensors, name: captured.tensors[weight]}
        names = [name if one == weight else one for one in content["names"]]
        loaded = restore(_changed(captured.program, names=names), tensors, 10**6)
        assert "print(1)" not in loaded.program.code
        assert loaded(torch.randn(2, 4)).shape == (2, 2)
    with pytest.raises(ValueError, match="upgrade pdecay"):
        restore(_changed(captured.program, version=2), captured.tensors, 10**6)
    with pytest.raises(ValueError, match="has more than 10 bytes"):
        restore(captured.program, captured.tensors, 10)
    with pytest.raises(ValueError, match="damaged"):
        restore(b"nonsense", captured.tensors, 10**6)
    deep: list[object] = []
    for _ in range(900):
        deep = [deep]
    damaged = [3, [[*call[:2], {"class": 1}]], [[call[0], [{"device": "x"}], {}]]]
    for calls in (*damaged, [[call[0], deep, {}]]):
        with pytest.raises(ValueError, match="damaged"):
            restore(_changed(captured.program, calls=calls), captured.tensors, 10**6)


@pytest.mark.parametrize("value", [4, 10**6, {"n": 0}, {"dtype": "float32"}])
def test_memory_formats_must_be_constants(value):
    """Torch takes any integer as a memory format, and crashes if there is none of this number."""
    captured = capture(nn.Linear(4, 2), Inputs.of(torch.randn(2, 4)))
    call = ["aten.clone.default", [{"n": 2}], {"memory_format": value}]
    with pytest.raises(ValueError, match="the program is damaged: memory_format of"):
        restore(_changed(captured.program, calls=[call]), captured.tensors, 10**6)
    call[1].append(call[2].pop("memory_format"))  # as a positional argument
    with pytest.raises(ValueError, match=r"the program is damaged|at most 1 positional"):
        restore(_changed(captured.program, calls=[call]), captured.tensors, 10**6)


@pytest.mark.parametrize("layout", ["_mkldnn", "sparse_coo", "sparse_csr"])
def test_layouts_are_strided(layout):
    """Some operators read an opaque tensor as if it were strided."""
    captured = capture(nn.Linear(4, 2), Inputs.of(torch.randn(2, 4)))
    call = ["aten.empty.memory_format", [[4]], {"layout": {"layout": layout}}]
    with pytest.raises(ValueError, match="the program is damaged: layout of"):
        restore(_changed(captured.program, calls=[call]), captured.tensors, 10**6)
    call[2]["layout"]["layout"] = "strided"
    restore(_changed(captured.program, calls=[call]), captured.tensors, 10**6)


@pytest.mark.parametrize(
    "call",
    [
        ["aten.copy.default", [None, {"n": 2}], {}],
        ["aten.copy.default", [], {"self": None, "src": {"n": 2}}],
        ["aten.cat.default", [[{"n": 2}, None]], {}],
        ["operator.getitem", [[None], 0], {}],  # None while the program runs
        ["torch.sym_ite", [True, None, None], {}],
        ["aten.select.t", [[None], 0], {}],
    ],
)
def test_missing_tensors_are_rejected(call):
    """Torch takes None as a tensor without memory, and some operators crash on it."""
    captured = capture(nn.Linear(4, 2), Inputs.of(torch.randn(2, 4)))
    with pytest.raises(ValueError, match=r"the program is damaged|must not call"):
        restore(_changed(captured.program, calls=[call]), captured.tensors, 10**6)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": [-1, 1]},
        {"stride": [0, 1]},
        {"dilation": [1, -3]},
        {"padding": [-1, 0]},
        {"dilation": [2**62, 1]},
        {"stride": [1.5, 1]},
        {"groups": float("inf")},
    ],
)
def test_sparse_layers_with_wrong_options_are_rejected(options):
    """The kernel would read outside of the image."""
    layer = nn.Conv2d(2, 4, 3)
    captured = capture(nn.Sequential(SparseConv2d(layer)), Inputs.of(torch.randn(2, 2, 5, 5)))
    (call,) = json.loads(zlib.decompress(captured.program))["calls"]
    call[1][-1] = json.dumps({**json.loads(call[1][-1]), **options})
    with pytest.raises(ValueError, match=r"must be integers|the program is damaged"):
        restore(_changed(captured.program, calls=[call]), captured.tensors, 10**6)


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


@pytest.mark.parametrize(
    "sizes",
    [
        3,
        {},
        {"shapes": [["n0"]], "ranges": {}},
        {"shapes": [3], "ranges": {"n0": [0]}},
        {"shapes": [["n0", 4]], "ranges": {"n0": [0, None]}, "conditions": [["**", "n0", 9]]},
        {"shapes": [["n0", 4]], "ranges": {"n0": [0, None]}, "conditions": [["<", "n1", 9]]},
        {"shapes": [["n0", 4]], "ranges": {"n0": [0, None]}, "conditions": 3},
    ],
)
def test_damaged_sizes_are_rejected(sizes):
    captured = capture(nn.Linear(4, 2), Inputs.of(torch.randn(2, 4)))
    with pytest.raises(ValueError, match="the program is damaged"):
        restore(_changed(captured.program, sizes=sizes), captured.tensors, 10**6)


@pytest.mark.parametrize(
    "structure",
    [
        3,
        {"tensor": 1},
        {"tensor": "0"},
        {"dict": [3]},
        {"list": {"a": 3}},
        {"other": 3},
        {"value": []},
        {"list": [{"tensor": 0}]},
        {"list": [{"list": []}, {"dict": {}}]},
    ],
)
def test_damaged_structures_are_rejected(structure):
    captured = capture(nn.Linear(4, 2), Inputs.of(torch.randn(2, 4)))
    with pytest.raises(ValueError, match="the program is damaged"):
        restore(_changed(captured.program, inputs=structure), captured.tensors, 10**6)
    if "list" not in str(structure) or "a" in str(structure):
        with pytest.raises(ValueError, match="the program is damaged"):
            restore(_changed(captured.program, outputs=structure), captured.tensors, 10**6)


def test_programs_need_trust(tmp_path):
    path = tmp_path / "m.safetensors"
    model, x = nn.Linear(4, 2), torch.randn(2, 4)
    pdecay.save(model, path, example_inputs=x)
    for limit in (None, 10**9):
        with pytest.raises(pdecay.FileFormatError, match=r"has a program.* trusted=True"):
            pdecay.load(path, max_bytes=limit)
    torch.testing.assert_close(pdecay.load(path, trusted=True)(x), model(x))


def test_large_programs_are_rejected(tmp_path):
    text = b'{"version":1,"calls":[' + b"[]," * (1 << 21) + b"[]]}"
    state = {PROGRAM: torch.frombuffer(bytearray(zlib.compress(text, 9)), dtype=torch.uint8)}
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").stat().st_size < 10_000
    with pytest.raises(pdecay.FileFormatError, match="program has more than 4,194,304 bytes"):
        pdecay.load(tmp_path / "m.safetensors", trusted=True)


def test_models_with_large_programs_are_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("pdecay.deployment.files.programs._MAX_PROGRAM", 300)
    with pytest.raises(ExportError, match=r"the program has .* bytes, more than 300"):
        pdecay.save(nn.Linear(4, 2), tmp_path / "m", example_inputs=torch.randn(2, 4))
    assert not list(tmp_path.iterdir())


def test_damaged_program_in_a_file(tmp_path):
    state = {PROGRAM: torch.zeros(8, dtype=torch.uint8)}
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(pdecay.FileFormatError, match=r"m.safetensors: the program is damaged"):
        pdecay.load(tmp_path / "m.safetensors", trusted=True)
