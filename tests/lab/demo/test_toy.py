"""The toy example of section 4.2: the shape of its curves, and PSGD as a check."""

from __future__ import annotations

from itertools import pairwise

from pdecay.lab.demo import toy


def test_psgd_matches_curves_of_paper():
    found = toy.run()
    assert set(found.difference) == {"s every step", "s every 20 steps"}
    assert max(found.difference.values()) < 1e-12


def test_gradient_oscillates_and_decay_does_not():
    curves = toy.run().curves
    signs = [(a < 0) != (b < 0) for a, b in pairwise(curves["gradient"])]
    assert sum(signs) > 10
    for name in ("s every step", "s every 20 steps"):
        assert all(a >= b >= 0 for a, b in pairwise(curves[name]))
    assert curves["s every step"][-1] < 1e-13
    assert curves["s every 20 steps"][-1] < 0.1
