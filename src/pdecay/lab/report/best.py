"""Selection rules: the Pareto front, the accuracy at a sparsity level, the best settings.

The page applies the same rules to the points that its filters show (``assets/best.js``). A browser
test compares the two implementations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdecay.lab.report.experiments import Point

LEVELS = (0.0, 0.7, 0.8, 0.9, 0.95, 0.99)  # the levels of the paper's tables, and 99 %
# A run with target 90 % may miss it by one weight, so 89.95 % counts as 90 %.
ROUNDING = 0.0005
CROP = 8.0  # crop points that lie this many times further below the best than the median
ACCURACY_LOSS = 2.0  # percentage points; the paper names the sparsest network that loses less


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the settings that no other beats in sparsity and accuracy, from dense to sparse."""
    front: list[Point] = []
    highest = -math.inf
    for point in sorted(points, key=lambda point: (-point.sparsity, -point.accuracy)):
        if point.recommended and point.accuracy > highest:
            front.append(point)
            highest = point.accuracy
    return front[::-1]


def at_sparsity(points: Sequence[Point], level: float) -> Point | None:
    """Return the most accurate setting with at least this sparsity, or None.

    Settings are compared on the validation split. The result can be a collapsed network where
    there is no other; tables mark it.
    """
    sparse = [point for point in points if point.reliable and point.sparsity >= level - ROUNDING]
    return max(sparse, key=lambda point: (point.accuracy, point.sparsity), default=None)


def dense_reference(points: Sequence[Point]) -> Point | None:
    """Return the most accurate AdamW setting, the dashed line of the plots."""
    return at_sparsity([point for point in points if point.method == "adamw"], 0.0)


def best_tradeoff(points: Sequence[Point]) -> Point | None:
    """Return the setting with the highest trade-off."""
    recommended = [point for point in points if point.recommended]
    return max(recommended, key=lambda point: (point.tradeoff, point.sparsity), default=None)


def sparsest(points: Sequence[Point], floor: float) -> Point | None:
    """Return the sparsest setting with an accuracy above `floor`.

    Sparsities are compared to a tenth of a percent; among equal ones the most accurate wins.
    """
    accurate = [point for point in points if point.recommended and point.accuracy > floor]
    return max(accurate, key=lambda point: (round(point.sparsity, 3), point.accuracy), default=None)


def cropped(points: Sequence[Point]) -> list[Point]:
    """Return the settings so far below the others that a plot with them would be unreadable."""
    accuracies = sorted(point.accuracy for point in points)
    if not accuracies:
        return []
    highest, median = accuracies[-1], accuracies[(len(accuracies) - 1) // 2]
    floor = highest - max(CROP * (highest - median), 1.0)
    return [point for point in points if point.accuracy < floor]
