"""Update rules of the auxiliary variable s: at every step, every n steps, or as a slow average.

The paper's step sets ``s = |w|^(p-2)`` at every step. A zero weight then has an infinite s and
never changes. With a slower s, weights can leave zero; large weights are penalised more until s
has adapted (section 6 of the paper).

The optimizer state holds the *anchor*, the magnitude that s corresponds to: ``s = anchor^(p-2)``.
The decay factor is the penalty's factor at the anchor instead of at the weight. One anchor serves
all terms of a sum, and stays valid while a schedule changes p. It is an average of squares:

    anchor^2  <-  (1 - rate) * anchor^2 + rate * w^2

This is a descent step on the extended penalty, ``dR/ds = (lam/2) * (w^2 - anchor^2)``. A step on s
itself would be stiff (s spans forty orders of magnitude) and could make s negative. A step on
log s would be infinite at w = 0. The step on the squares is stable for every rate in (0, 1], equals
the paper's at rate 1, and lets s grow exponentially at a zero weight instead of at once.

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
    """The paper's default: s is set to ``|w|^(p-2)`` at every step."""

    def plain(self) -> list[float]:
        return []


@dataclass(frozen=True)
class Every:
    """Delayed updates: s starts at `start` and is set to ``|w|^(p-2)`` after every n-th step."""

    n: int
    start: float = 1.0

    def __post_init__(self) -> None:
        check_count("n", self.n)
        _check_start(self.start)

    def plain(self) -> list[float]:
        return [int(self.n), 1.0, float(self.start)]


@dataclass(frozen=True)
class Slow:
    """Slow updates: s starts at `start` and follows ``|w|^(p-2)`` at a rate in (0, 1]."""

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
            return [Every(n, start).plain()[0], *Slow(rate, start).plain()[1:]]
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
        raise ValueError("start must be above 0, got 0: with s = 0 weights would never decay")
