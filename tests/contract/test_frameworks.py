"""The same numbers in every framework: 100 steps beside a numpy reference in double precision.

Differences are relative to the largest weight of the tensor. 99 % of the weights are within 1e-5.
The others pass close to zero without staying there: s = |w|^(p-2) is huge at that moment and
multiplies the rounding errors of the steps before. They are within 1e-2. With p >= 2, s is never
large, and all weights are within 1e-5.
"""

from __future__ import annotations

import numpy as np
import pytest

from .frameworks import (
    FRAMEWORKS,
    PENALTIES,
    RATES,
    STEPS,
    ZERO,
    Case,
    Reference,
    check_equals_reference,
    first_weights,
    gradient,
)


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_weights_equal_the_reference(framework, optimizer, penalty):
    check_equals_reference(framework, Case(optimizer, penalty))


def test_cases_cover_zeros_and_learning_rates_of_zero():
    assert len(RATES) == STEPS
    assert (RATES == 0).sum() >= 3
    run = Reference(Case("adam", PENALTIES["p=0.8"]), first_weights())
    for t in range(STEPS):
        run.step(gradient(run.weights(), t))
    assert 0.5 < np.mean(np.abs(run.weights()["kernel"]) < ZERO) < 0.9
