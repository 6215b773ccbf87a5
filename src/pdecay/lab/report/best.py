"""What is best: the Pareto front, the accuracy above a given sparsity, the settings to name.

The page applies the same rules to what its filters leave (``assets/best.js``); a test holds the two
together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdecay.lab.report.study import Point

LEVELS = (0.0, 0.7, 0.8, 0.9, 0.95, 0.99)  # both tables of the paper, and beyond
# A run that was asked for 90 % may miss it by a weight: what rounds to 90.0 % counts.
ROUNDING = 0.0005
REACH = 8.0  # of the distance from the best accuracy to the median: what lies lower has collapsed
DROP = 2.0  # points of accuracy: the paper names the sparsest network that loses less


def front(points: Sequence[Point]) -> list[Point]:
    """The settings that no other beats in both sparsity and accuracy, from dense to sparse."""
    kept: list[Point] = []
    highest = -math.inf
    for point in sorted(points, key=lambda point: (-point.sparsity, -point.accuracy)):
        if point.reliable and point.accuracy > highest:
            kept.append(point)
            highest = point.accuracy
    return kept[::-1]


def above(points: Sequence[Point], level: float) -> Point | None:
    """The most accurate setting that is at least so sparse; None if there is none."""
    sparse = [point for point in points if point.reliable and point.sparsity >= level - ROUNDING]
    return max(sparse, key=lambda point: (point.accuracy, point.sparsity), default=None)


def adamw(points: Sequence[Point]) -> Point | None:
    """The most accurate AdamW, which the dashed line stands for."""
    return above([point for point in points if point.method == "adamw"], 0.0)


def balanced(points: Sequence[Point]) -> Point | None:
    """The setting with the best trade-off."""
    reliable = [point for point in points if point.reliable]
    return max(reliable, key=lambda point: (point.tradeoff, point.sparsity), default=None)


def sparsest(points: Sequence[Point], floor: float) -> Point | None:
    """The sparsest setting whose accuracy is above `floor`; of equally sparse ones, the best."""
    accurate = [point for point in points if point.reliable and point.accuracy > floor]
    # To a tenth of a percent: a weight more or less makes no setting sparser.
    return max(accurate, key=lambda point: (round(point.sparsity, 3), point.accuracy), default=None)


def collapsed(points: Sequence[Point]) -> list[Point]:
    """The settings that are so bad that a plot which shows them would show nothing else."""
    accuracies = sorted(point.accuracy for point in points)
    if not accuracies:
        return []
    highest, median = accuracies[-1], accuracies[(len(accuracies) - 1) // 2]
    floor = highest - max(REACH * (highest - median), 1.0)
    return [point for point in points if point.accuracy < floor]
