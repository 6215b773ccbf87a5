"""The flax example trains to a sparse network."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "flax_digits.py"


@pytest.mark.slow
def test_flax_example_trains_a_sparse_network(capsys):
    accuracy, zeros = runpy.run_path(str(EXAMPLE))["main"]()
    assert accuracy > 0.93
    assert zeros == pytest.approx(0.9, abs=1e-4)
    assert "90.0% of the weights zero" in capsys.readouterr().out
