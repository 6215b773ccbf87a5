"""ONNX export: equal outputs in ONNX Runtime, or no file."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch
from torch import nn

from pdecay.deployment.compact import compact
from pdecay.deployment.export import export_onnx, onnx
from pdecay.deployment.model.errors import ExportError

from ..compact.models import build, kill

runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.parametrize("name", ["cnn", "attention", "encoder", "bag of words", "lstm"])
def test_compacted_model_runs_in_onnx_runtime(tmp_path, name):
    model, example = build(name)
    kill(model, 0)
    model.eval()
    smaller = compact(model, example)
    written = export_onnx(smaller, tmp_path / "model.onnx", example)
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


def test_keyword_arguments_and_nested_outputs_restore_modes(tmp_path):
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
    assert export_onnx(model, tmp_path / "model.onnx", example).free_batch
    assert [module.training for module in model.modules()] == modes
    assert logging.getLogger("torch.onnx").level == level


def test_half_precision_allows_its_rounding_errors(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).half()
    x = torch.randn(4, 64).half()
    written = export_onnx(model, tmp_path / "model.onnx", x)
    assert 1e-4 < written.difference < 8e-3
    monkeypatch.setattr(onnx, "difference", lambda expected, got: 0.01)
    with pytest.raises(ExportError, match=r"differ by 1.0e-02 .* more than 0.0078125"):
        export_onnx(model, tmp_path / "model.onnx", x)


def test_file_contains_no_source_paths(tmp_path):
    export_onnx(nn.Linear(3, 2), tmp_path / "model.onnx", torch.randn(1, 3))
    content = (tmp_path / "model.onnx").read_bytes()
    assert b"site-packages" not in content
    assert b"File" not in content


def test_independent_inputs_have_separate_batch_axes(tmp_path):
    class Apart(nn.Module):
        def forward(self, x, y):
            return x + 1, y * 2

    example = (torch.randn(2, 3), torch.randn(2, 4))
    assert export_onnx(Apart(), tmp_path / "model.onnx", example).free_batch
    given = runtime.InferenceSession(tmp_path / "model.onnx").get_inputs()
    assert len({one.shape[0] for one in given}) == 2


def test_model_with_fixed_batch_size(tmp_path):
    class Fixed(nn.Linear):
        def forward(self, x):
            return super().forward(x.view(2, 3))

    written = export_onnx(Fixed(3, 4), tmp_path / "model.onnx", torch.randn(2, 3))
    assert not written.free_batch
    assert "the example's batch size only" in str(written)


@pytest.mark.parametrize(
    "doubles", [lambda n: n > 5, lambda n: n != 7, lambda n: n % 2 == 0, lambda n: n != 1]
)
def test_branch_on_the_batch_size_fixes_it(tmp_path, doubles):
    class Branching(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x) if doubles(len(x)) else super().forward(x)

    written = export_onnx(Branching(4, 4), tmp_path / "model.onnx", torch.randn(6, 4))
    assert not written.free_batch
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    assert session.get_inputs()[0].shape == [6, 4]


def test_batch_axis_in_a_frozen_shape(tmp_path):
    class Remainders(nn.Module):
        def forward(self, x):
            return torch.remainder(x, 0.7) + torch.fmod(x, 0.3)

    assert export_onnx(Remainders(), tmp_path / "model.onnx", torch.randn(3, 5)).free_batch


def test_models_that_the_exporter_or_the_runtime_rejects(tmp_path):
    class Sorted(nn.Module):
        def forward(self, x):
            return x.sort(stable=True)[0]

    with pytest.raises(ExportError, match=r"torch.onnx.export failed: No ONNX function"):
        export_onnx(Sorted(), tmp_path / "model.onnx", torch.randn(3, 5))
    linear = nn.Linear(5, 5).bfloat16()
    with pytest.raises(ExportError, match="ONNX Runtime cannot load the model"):
        export_onnx(linear, tmp_path / "model.onnx", torch.randn(3, 5).bfloat16())
    assert not list(tmp_path.iterdir())


def test_replaced_file_keeps_its_permissions_and_links(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "model.onnx").symlink_to("real")
    export_onnx(nn.Linear(3, 2), tmp_path / "model.onnx", torch.randn(1, 3))
    assert (tmp_path / "model.onnx").is_symlink()
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600
    runtime.InferenceSession(tmp_path / "real")


def test_different_outputs_keep_old_file(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "difference", lambda expected, got: 0.1)
    (tmp_path / "model.onnx").write_bytes(b"old")
    with pytest.raises(ExportError, match=r"ONNX Runtime and torch differ by 1.0e-01"):
        export_onnx(nn.Linear(3, 2), tmp_path / "model.onnx", torch.randn(1, 3))
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_bytes() == b"old"


def test_data_dependent_branch_is_rejected(tmp_path):
    class Deciding(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(ExportError, match=r"torch.export failed on Deciding"):
        export_onnx(Deciding(3, 2), tmp_path / "model.onnx", torch.ones(1, 3))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_package(tmp_path, monkeypatch, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else found(name)
    )
    with pytest.raises(
        ModuleNotFoundError, match=rf"{package} is not .* 'pdecay\[onnx\]'"
    ) as caught:
        export_onnx(nn.Linear(3, 2), tmp_path / "model.onnx", torch.randn(1, 3))
    assert caught.value.name == package


def test_invalid_arguments(tmp_path):
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module, got str"):
        export_onnx("model", tmp_path / "model.onnx", torch.randn(1))
    with pytest.raises(TypeError, match="must be a tensor, a tuple"):
        export_onnx(nn.Linear(3, 2), tmp_path / "model.onnx", 3)
    with pytest.raises(ValueError, match=r"the name must end with .onnx, got"):
        export_onnx(nn.Linear(3, 2), tmp_path / "model.pt", torch.randn(1, 3))
    with pytest.raises(FileNotFoundError, match=r"No such folder, create it first: .*missing'$"):
        export_onnx(nn.Linear(3, 2), tmp_path / "missing" / "model.onnx", torch.randn(1, 3))
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        export_onnx(nn.Linear(3, 2), tmp_path / "model.onnx", torch.randn(1, 3))
