"""Counts of log10 |w|, and their drawing in letters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

# Bins of a tenth of a decade. What lies outside is counted in the first and the last one; 1e-50 is
# below every float32.
FIRST, LAST, PER_DECADE = -50, 40, 10
_BINS = (LAST - FIRST) * PER_DECADE
_WIDTHS = (1, 2, 5, 10, 20, 50, 100)  # of a bar of the drawing, in bins
_MOST_BARS, _LONGEST_BAR = 24, 46


def empty() -> Counts:
    return np.zeros(_BINS, np.int64)


def count(magnitudes: NDArray[Any]) -> Counts:
    """Of finite numbers, of which a processor that flushes denormals may see some as zeros."""
    with np.errstate(divide="ignore"):
        decades = np.clip(np.log10(magnitudes), FIRST, LAST)
    bins = np.floor((decades - FIRST) * PER_DECADE).astype(np.int64)
    return np.bincount(np.minimum(bins, _BINS - 1), minlength=_BINS)


def bars(counts: Counts) -> list[tuple[float, float, int]]:
    """The part of a histogram that is not empty, in as many bars as a screen has lines.

    Returns:
        For each bar: from and to which log10 |w|, and how many.
    """
    used = np.flatnonzero(counts)
    if not len(used):
        return []
    low, high = int(used[0]), int(used[-1])
    width = next(
        (w for w in _WIDTHS if high // w - low // w < _MOST_BARS),
        _WIDTHS[-1],
    )
    return [
        (
            FIRST + start / PER_DECADE,
            FIRST + (start + width) / PER_DECADE,
            int(counts[start : start + width].sum()),
        )
        for start in range(low // width * width, high + 1, width)
    ]


def drawn(counts: Counts, zeros: int) -> list[str]:
    """The histogram in lines of ASCII, the largest weights first, the zeros last."""
    found = bars(counts)
    total = int(counts.sum()) + zeros
    if not total:
        return []
    largest = max((n for *_, n in found), default=1)
    lines = ["log10|w|      weights"]
    for low, high, n in reversed(found):
        bar = "#" * math.ceil(_LONGEST_BAR * n / largest)
        lines.append(f"{low:5.1f} ..{high:5.1f} {n / total:7.2%} {bar}".rstrip())
    lines.append(f"       zero {zeros / total:8.2%}")
    return lines
