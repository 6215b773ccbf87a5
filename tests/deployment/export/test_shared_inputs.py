"""Examples in which one tensor is given as two arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pdecay
from pdecay.deployment.export import export_onnx, export_torch
from pdecay.deployment.model.errors import ExportError
from tests.deployment.compact.checks import Model


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def exported(model, kind, path, example):
    """Write a file of a kind and return a function that runs it."""
    if kind == "program":
        pdecay.save(model, path / "model.safetensors", example_inputs=example)
        return pdecay.load(path / "model.safetensors", trusted=True)
    if kind == "pt2":
        export_torch(model, path / "model.pt2", example)
        return torch.export.load(path / "model.pt2").module()
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export_onnx(model, path / "model.onnx", example)
    session = runtime.InferenceSession(path / "model.onnx")
    names = [given.name for given in session.get_inputs()]

    def run(*tensors):
        given = {name: one.numpy() for name, one in zip(names, tensors, strict=True)}
        return torch.from_numpy(session.run(None, given)[0])

    return run


@pytest.mark.parametrize("kind", ["program", "pt2", "onnx"])
@pytest.mark.parametrize("shape", [(4, 3), (3,)], ids=["batch", "vector"])
@pytest.mark.parametrize("fixed", [False, True])
def test_arguments_stay_separate(tmp_path, kind, shape, fixed):
    def forward(self, one, other):
        product = self.one(one) * self.other(other)
        return product / float(len(one)) if fixed else product

    model = Model(forward, one=nn.Linear(3, 5), other=nn.Linear(3, 5)).eval()
    x = torch.randn(shape)
    loaded = exported(model, kind, tmp_path, (x, x))
    given = torch.randn(shape), torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(loaded(*given), model(*given))


def attention(self, query, key):
    keys = self.own if key is query else self.cross
    return self.head(self.query(query).relu() + keys(key).relu())


def test_branch_on_the_same_tensor():
    layers = {name: nn.Linear(3, 8) for name in ("query", "own", "cross")}
    model = Model(attention, head=nn.Linear(8, 2), **layers).eval()
    model.head.weight.data[:, 2] = 0
    x = torch.randn(4, 3)
    smaller = pdecay.compact(model, (x, x))
    assert smaller.own.out_features == 7
    assert smaller.compact_report.unused == ("cross",)
    torch.testing.assert_close(smaller(x, x), model(x, x))


def test_program_cannot_branch_on_the_same_tensor(tmp_path):
    layers = {name: nn.Linear(3, 8) for name in ("query", "own", "cross")}
    model = Model(attention, head=nn.Linear(8, 2), **layers).eval()
    x = torch.randn(4, 3)
    with pytest.raises(ExportError, match="differ"):
        pdecay.save(model, tmp_path / "model.safetensors", example_inputs=(x, x))
