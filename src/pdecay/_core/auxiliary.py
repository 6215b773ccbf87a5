"""How the auxiliary variable s follows the weights: at once, every n steps, or slowly.

The paper's step sets ``s = |w|^(p-2)`` anew each time, so a weight at zero has an infinite s and
stays there. A slower s lets weights leave zero, and penalises large ones until it has caught up
(section 6).

The state holds the *anchor*, the magnitude that s corresponds to: ``s = anchor^(p-2)``. The
decay step is then the factor of the penalty at the anchor instead of at the weight, for every term
of a sum and every p of a schedule at once. The anchor moves on the squares,

    anchor^2  <-  (1 - rate) * anchor^2 + rate * w^2 ,

which is descent on the extended penalty, ``dR/ds = (lam/2) * (w^2 - anchor^2)``. A plain step on s
itself is stiff (s spans forty orders of magnitude) and can turn s negative; a step on log s jumps
to infinity at w = 0 whatever the rate. On the squares it stays positive and stable for any rate in
(0, 1], is the paper's at rate 1, and lets s at a zero weight grow exponentially, not at once.

This module imports without torch. The step on torch tensors is in ``anchors.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdecay._core.validation import check_count, check_number


@dataclass(frozen=True)
class Instant:
    """s is set to ``|w|^(p-2)`` at every step: the paper's default."""

    def plain(self) -> list[float]:
        return []


@dataclass(frozen=True)
class Every:
    """s starts at `start` and is set to ``|w|^(p-2)`` after every n-th step."""

    n: int
    start: float = 1.0

    def __post_init__(self) -> None:
        check_count("n", self.n)
        _check_start(self.start)

    def plain(self) -> list[float]:
        return [self.n, 1.0, float(self.start)]


@dataclass(frozen=True)
class Slow:
    """s starts at `start` and follows the weights at a rate in (0, 1]; at rate 1 it is at once."""

    rate: float
    start: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < check_number("rate", self.rate) <= 1:
            raise ValueError(f"rate must be in (0, 1], got {self.rate!r}")
        _check_start(self.start)

    def plain(self) -> list[float]:
        return [1, float(self.rate), float(self.start)]


Auxiliary = Instant | Every | Slow


def as_plain(auxiliary: object) -> list[float]:
    """Convert an auxiliary to ``[n, rate, start]`` for a parameter group; [] is Instant."""
    if auxiliary is None:
        return []
    if isinstance(auxiliary, Instant | Every | Slow):
        return auxiliary.plain()
    if isinstance(auxiliary, Sequence) and not isinstance(auxiliary, str):
        if len(auxiliary) == 0:
            return []
        if len(auxiliary) == 3:
            n, rate, start = auxiliary
            return [Every(n, start).n, *Slow(rate, start).plain()[1:]]
    raise TypeError(f"auxiliary must be Instant(), Every(n), Slow(rate) or None, got {auxiliary!r}")


def first_anchor(start: float, pairs: Sequence[Sequence[float]], precision: Any) -> float:
    """Return the magnitude at which s is `start`, for the term with the smallest p.

    Near p = 2, where s hardly depends on the magnitude, the result may overflow or underflow. It
    is kept in the range of `precision`, the ``finfo`` of the weights.
    """
    p = min(p for p, _ in pairs)
    log = math.log(start) / (p - 2) if p != 2 else 0.0
    least, most = math.log(precision.smallest_normal), math.log(precision.max) - 1
    return math.exp(min(max(log, least), most))


def _check_start(start: object) -> None:
    if check_number("start", start) == 0:
        raise ValueError("start must be above 0, got 0: s = 0 would mean no decay for good")
