"""Damaged and malicious programs are refused."""

from __future__ import annotations

import json
import zlib

import pytest
import safetensors.torch
import torch
from torch import nn

import pdecay
from pdecay.deployment.files.programs import PROGRAM
from pdecay.deployment.layers.modules import SparseConv2d
from pdecay.deployment.model.errors import ExportError
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.program import capture, restore


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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
