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
    wrong_terms = script["main"](str(tmp_path / "picture.png"), seeds=2)
    assert wrong_terms["p = 1/2"][0] == 0
    at_more_noise = {method: means[1] for method, means in wrong_terms.items()}
    assert at_more_noise["p = 1/2"] < min(at_more_noise["Lasso"], at_more_noise["STLSQ"])
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:jax.core:DeprecationWarning")  # PennyLane's own
def test_quantum_example_prunes_gates(tmp_path):
    pytest.importorskip("pennylane")
    script = runpy.run_path(str(EXAMPLES / "quantum_circuit.py"))
    results = script["main"](str(tmp_path / "picture.png"), seeds=1)
    for without_decay, *_ in results.values():
        assert without_decay == (72, pytest.approx(0, abs=1e-4))
    assert any(gates < 60 and error < 1e-3 for gates, error in results[0.5])
    assert not any(gates < 60 and error < 1e-3 for gates, error in results[1.0])
    assert (tmp_path / "picture.png").stat().st_size > 10_000
