"""Histograms of log10 |w| and their drawing as text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

# Bins of a tenth of a decade. The first and the last bin include everything outside; 1e-50 is
# below every float32.
FIRST, LAST, PER_DECADE = -50, 40, 10
_BINS = (LAST - FIRST) * PER_DECADE
_BAR_WIDTHS = (1, 2, 5, 10, 20, 50, 100)  # in bins
_MAX_BARS, _MAX_LENGTH = 24, 46


def empty() -> Counts:
    return np.zeros(_BINS, np.int64)


def count(magnitudes: NDArray[Any]) -> Counts:
    """Count finite magnitudes; denormals may be flushed to zero and count in the first bin."""
    with np.errstate(divide="ignore"):
        decades = np.clip(np.log10(magnitudes), FIRST, LAST)
    bins = np.floor((decades - FIRST) * PER_DECADE).astype(np.int64)
    return np.bincount(np.minimum(bins, _BINS - 1), minlength=_BINS)


def bars(counts: Counts) -> list[tuple[float, float, int]]:
    """Group the non-empty range into at most about 24 bars.

    Returns:
        For each bar: its lower and upper log10 |w|, and its count.
    """
    used = np.flatnonzero(counts)
    if not len(used):
        return []
    low, high = int(used[0]), int(used[-1])
    width = next((w for w in _BAR_WIDTHS if high // w - low // w < _MAX_BARS), _BAR_WIDTHS[-1])
    return [
        (
            FIRST + start / PER_DECADE,
            FIRST + (start + width) / PER_DECADE,
            int(counts[start : start + width].sum()),
        )
        for start in range(low // width * width, high + 1, width)
    ]


def draw_text(counts: Counts, zeros: int) -> list[str]:
    """Draw the histogram as lines of ASCII, from the largest weights down to the zeros."""
    total = int(counts.sum()) + zeros
    if not total:
        return []
    found = bars(counts)
    largest = max((n for *_, n in found), default=1)
    lines = ["log10|w|      weights"]
    for low, high, n in reversed(found):
        bar = "#" * math.ceil(_MAX_LENGTH * n / largest)
        lines.append(f"{low:5.1f} ..{high:5.1f} {n / total:7.2%} {bar}".rstrip())
    lines.append(f"       zero {zeros / total:8.2%}")
    return lines
