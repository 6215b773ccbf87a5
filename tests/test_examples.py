"""The examples of other fields find what their documentation page says."""

import runpy
from pathlib import Path

import pytest

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
