import math

import pytest

from pdecay._core.pull import pull_scale


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([[0.5, 2.0]], 0.1 / (0.01 * 2 / 0.5)),  # at tau: |w|^(p-1) = 1 / 0.5
        ([[1.0, 2.0]], 0.3 * 0.1 / (0.01 * 2)),
        ([[2.0, 2.0]], 0.3 * 0.1 / (0.01 * 2 * 3)),  # at the typical weight, 3
        ([[0.5, 2.0], [2.0, 1.0]], 0.1 / (0.01 * (2 / 0.5 + 3))),
        ([[0.5, 0.0], [1.0, 2.0]], 0.3 * 0.1 / (0.01 * 2)),  # a term with lam = 0 does not count
    ],
)
def test_known_values(pairs, expected):
    scale = pull_scale(pairs, tau=0.25, typical=3.0, update=0.1, pull=1.0, rate=0.01)
    assert scale == pytest.approx(expected, rel=1e-15)


def test_scale_is_proportional_to_the_pull():
    one, half = (
        pull_scale([[0.8, 1.0]], tau=0.25, typical=3.0, update=0.1, pull=pull, rate=0.01)
        for pull in (1.0, 0.5)
    )
    assert half == one / 2


@pytest.mark.parametrize("given", [{"tau": 0.0}, {"tau": math.inf}, {"rate": 0.0}])
def test_nothing_can_be_pulled(given):
    numbers = {"tau": 0.25, "typical": 3.0, "update": 0.1, "pull": 1.0, "rate": 0.01} | given
    assert pull_scale([[0.8, 1.0]], **numbers) == 0
