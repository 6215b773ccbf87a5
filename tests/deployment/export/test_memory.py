"""Models that remember something between calls, in programs and files."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pdecay
from pdecay.deployment.export.torch_file import export_torch
from pdecay.deployment.model.errors import ExportError


class Streaming(nn.Module):
    """A convolution over chunks of a signal, which keeps the end of the previous chunk."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv1d(2, 4, 3)
        self.register_buffer("calls", torch.zeros(()))
        if kind == "attribute":
            self.past = torch.zeros(1, 2, 2)
        else:
            self.register_buffer("past", torch.zeros(1, 2, 2))

    def forward(self, x):
        x = torch.cat([self.past, x], 2)
        self.calls += 1
        if self.kind == "in place":
            self.past.copy_(x[:, :, -2:])
        elif self.kind != "nothing":
            self.past = x[:, :, -2:].detach()
        return self.conv(x).relu()


def chunks():
    return [torch.randn(1, 2, 6) for _ in range(3)]


def saved(model, path):
    pdecay.save(model, path.with_suffix(".safetensors"), example_inputs=chunks()[0])
    return pdecay.load(path.with_suffix(".safetensors"), trusted=True)


def exported(model, path):
    export_torch(model, path.with_suffix(".pt2"), chunks()[0])
    return torch.export.load(path.with_suffix(".pt2")).module()


@pytest.mark.parametrize("write", [saved, exported])
def test_program_begins_with_the_memory_of_the_model(write, tmp_path):
    model = Streaming("in place").eval()
    model.past.fill_(3)
    original = copy.deepcopy(model)
    loaded = write(model, tmp_path / "model")
    assert torch.equal(model.past, original.past)
    assert model.calls == 0
    with torch.no_grad():
        for x in chunks():
            torch.testing.assert_close(loaded(x), original(x))


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_program_that_would_forget_is_refused(kind, tmp_path):
    model = Streaming(kind).eval()
    with pytest.raises(ExportError, match="in two calls"):
        saved(model, tmp_path / "model")
    assert model.calls == 0
    assert not list(tmp_path.iterdir())


def test_onnx_file_that_would_forget_is_refused(tmp_path):
    pytest.importorskip("onnxruntime")
    model = Streaming("in place").eval()
    with pytest.raises(ExportError):
        pdecay.export_onnx(model, tmp_path / "model.onnx", chunks()[0])
    assert not model.past.any()


def test_onnx_export_keeps_buffers(tmp_path):
    pytest.importorskip("onnxruntime")
    model = Streaming("nothing").eval()
    pdecay.export_onnx(model, tmp_path / "model.onnx", chunks()[0])
    assert model.calls == 0
