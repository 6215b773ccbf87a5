"""ONNX files: the same outputs in ONNX Runtime, or no file."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch
from torch import nn

from pdecay.deployment.compact import compact
from pdecay.deployment.export import onnx
from pdecay.deployment.model.errors import ExportError

from ..compact.models import build, kill

runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.parametrize("name", ["cnn", "attention", "encoder", "bag of words", "lstm"])
def test_a_compacted_model_runs_in_onnx_runtime(tmp_path, name):
    model, example = build(name)
    kill(model, 0)
    model.eval()
    smaller = compact(model, example)
    written = onnx.export(smaller, example, tmp_path / "model.onnx")
    assert written.difference < 1e-5
    assert written.free_batch
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert written.nbytes == (tmp_path / "model.onnx").stat().st_size
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (given,) = session.get_inputs()
    assert given.shape == ["batch", *example.shape[1:]]
    many = torch.cat([example] * 3)  # a batch of another size
    (got,) = session.run(None, {given.name: many.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model(many).detach(), rtol=1e-4, atol=1e-5)


def test_keyword_arguments_several_outputs_and_all_as_it_was(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2))

        def forward(self, x, *, scale):
            y = self.body(x) * scale
            return {"y": y, "both": (y + 1, y.argmax(-1))}

    model = Two()
    model.body.train()
    model.body[0].eval()
    modes = [module.training for module in model.modules()]
    level = logging.getLogger("torch.onnx").level
    example = {"x": torch.randn(1, 3), "scale": torch.randn(1, 1)}
    assert onnx.export(model, example, tmp_path / "model.onnx").free_batch
    assert [module.training for module in model.modules()] == modes
    assert logging.getLogger("torch.onnx").level == level


def test_the_file_does_not_tell_where_the_code_lies(tmp_path):
    onnx.export(nn.Linear(3, 2), torch.randn(1, 3), tmp_path / "model.onnx")
    content = (tmp_path / "model.onnx").read_bytes()
    assert b"site-packages" not in content
    assert b"File" not in content


def test_inputs_whose_batches_do_not_meet(tmp_path):
    class Apart(nn.Module):
        def forward(self, x, y):
            return x + 1, y * 2

    example = (torch.randn(2, 3), torch.randn(2, 4))
    assert onnx.export(Apart(), example, tmp_path / "model.onnx").free_batch
    given = runtime.InferenceSession(tmp_path / "model.onnx").get_inputs()
    assert len({one.shape[0] for one in given}) == 2


def test_a_model_for_one_batch_size_only(tmp_path):
    class Fixed(nn.Linear):
        def forward(self, x):
            return super().forward(x.view(2, 3))

    written = onnx.export(Fixed(3, 4), torch.randn(2, 3), tmp_path / "model.onnx")
    assert not written.free_batch
    assert "the example's batch size only" in str(written)


def test_outputs_that_differ_are_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "difference", lambda expected, got: 0.1)
    (tmp_path / "model.onnx").write_bytes(b"as it was")
    with pytest.raises(ExportError, match=r"differ from torch's by 1.0e-01"):
        onnx.export(nn.Linear(3, 2), torch.randn(1, 3), tmp_path / "model.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_bytes() == b"as it was"


def test_a_model_that_cannot_be_exported(tmp_path):
    class Deciding(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(ExportError, match=r"torch.export failed on Deciding"):
        onnx.export(Deciding(3, 2), torch.ones(1, 3), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package(tmp_path, monkeypatch, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else found(name)
    )
    with pytest.raises(ModuleNotFoundError, match=rf"{package} is not .* 'pdecay\[onnx\]'") as told:
        onnx.export(nn.Linear(3, 2), torch.randn(1, 3), tmp_path / "model.onnx")
    assert told.value.name == package


def test_bad_input(tmp_path):
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module, got str"):
        onnx.export("model", torch.randn(1), tmp_path / "model.onnx")
    with pytest.raises(TypeError, match="must be a tensor, a tuple"):
        onnx.export(nn.Linear(3, 2), 3, tmp_path / "model.onnx")
    with pytest.raises(ValueError, match=r"the name must end with .onnx, got"):
        onnx.export(nn.Linear(3, 2), torch.randn(1, 3), tmp_path / "model.pt")
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        onnx.export(nn.Linear(3, 2), torch.randn(1, 3), tmp_path / "model.onnx")
