"""The whole way: pdecay deploy on the command line, then examples/serve.py as a process."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

import pdecay
from pdecay.cli import main
from tests.deployment.networks import mostly_zero

SERVE = Path(__file__).parents[2] / "examples" / "serve.py"
BUILD = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    for layer in (model[0], model[2]):
        layer.weight.data.mul_(torch.rand(layer.weight.shape) >= 0.5)
    return model, torch.randn(1, 8)
"""


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A project with a model, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_build.py").write_text(BUILD)
    sys.modules.pop("my_build", None)
    import my_build  # type: ignore[import-not-found]

    return my_build.build()


def _post(port: str, content: object) -> dict[str, object]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}", json.dumps(content).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_deployed_model_is_served(built, tmp_path, capsys):
    model, x = built
    assert main(["deploy", "my_build:build", "--out", "fast.safetensors", "--seconds", "0.2"]) == 0
    assert "times as fast with batch size 1" in capsys.readouterr().out
    (tmp_path / "my_build.py").unlink()  # the server does not need it
    server = subprocess.Popen(
        [sys.executable, str(SERVE), "fast.safetensors", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().rpartition(":")[2].strip()
        answer = _post(port, {"inputs": x.tolist()})
        torch.testing.assert_close(torch.tensor(answer["outputs"]), model(x), rtol=1e-4, atol=1e-5)
        with pytest.raises(urllib.error.HTTPError) as error:
            _post(port, {"inputs": [[1.0, 2.0]]})
        assert error.value.code == 400
        error.value.close()
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


def test_command_repeats_a_plan(built, capsys):
    options = ["--seconds", "0", "--choose", "sparse", "--save-plan", "plan.json"]
    assert main(["deploy", "my_build:build", *options]) == 0
    plan = json.loads(Path("plan.json").read_text())
    capsys.readouterr()
    assert main(["deploy", "my_build:build", "--seconds", "0", "--plan", "plan.json"]) == 0
    shown = capsys.readouterr().out
    assert f"deployed ({plan['chosen']})" in shown
    assert "as planned" in shown
    Path("plan.json").write_text("[]")
    assert main(["deploy", "my_build:build", "--plan", "plan.json"]) == 2
    assert "was not written by --save-plan" in capsys.readouterr().err
    assert main(["deploy", "my_build:build", "--out", "fast.bin"]) == 2
    assert "--out: the name must end with .safetensors" in capsys.readouterr().err


def test_files_of_other_programs_and_missing_folders(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(pdecay.FileFormatError, match=r"torch.load\(path, weights_only=True\)"):
        pdecay.load(tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError) as error:
        pdecay.save({"a": torch.zeros(2)}, tmp_path / "missing" / "a.safetensors")
    assert error.value.filename == str(tmp_path / "missing")


def test_size_of_a_dense_file_is_a_share(tmp_path):
    shown = str(pdecay.save({"a": torch.ones(2)}, tmp_path / "a.safetensors"))
    assert "times smaller" not in shown
    assert "% of the 8 in memory" in shown


class TakesDict(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, batch, scale=1.0):
        if batch["x"].shape[1] != 8:
            raise ZeroDivisionError("raised by the model")
        return self.layer(batch["x"]) * scale


def test_example_with_dict_and_keywords(clock):
    model, x = mostly_zero(TakesDict(), 0.6), torch.randn(2, 8)
    for example in (({"x": x},), (({"x": x},), {"scale": 2.0})):
        deployed = pdecay.deploy(model, example)
        torch.testing.assert_close(deployed({"x": x}), model({"x": x}), rtol=1e-4, atol=1e-5)
    with pytest.raises(pdecay.CompactError, match=r"give a tuple with it, \(batch,\)"):
        pdecay.deploy(model, {"x": x})
    with pytest.raises(pdecay.CompactError, match="raised by the model") as error:
        pdecay.deploy(model, ({"x": x[:, :3]},))
    cause = error.value.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert "forward" in [frame.name for frame in error.traceback] or cause.__traceback__
