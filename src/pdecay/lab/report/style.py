"""Colours and markers, identical in the static figures and on the page.

Each method has a marker. Methods with a p are coloured by p along the plasma colour map; other
methods have fixed colours that colour-blind readers can distinguish. A colour is a pair: for a
light and for a dark background.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import matplotlib
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.markers import MarkerStyle
from matplotlib.path import Path

from pdecay.lab.report.experiments import Experiment, Point

Colour = tuple[str, str]

_MARKERS = {"adamw": "P", "padam": "o", "elastic": "s", "target": "D", "dwf": "^", "mp": "X",
            "gmp": "v", "oto": "*", "l1": "h"}  # fmt: skip
_SPARE_MARKERS = ("<", ">", "p", "d", "8")
_COLOURS: dict[str, Colour] = {
    "adamw": ("#222222", "#e6e6e6"),
    "mp": ("#009E73", "#3CCB9F"),
    "gmp": ("#3B9BD0", "#62BDF0"),
    "oto": ("#C98500", "#F2C230"),
    "l1": ("#6B8E23", "#A9CC55"),
    "dwf": ("#7A5C2E", "#CDB183"),
}
_SPARE_COLOURS: tuple[Colour, ...] = (
    ("#44AA99", "#7FD6C8"),
    ("#999933", "#D2D26B"),
    ("#666666", "#AAAAAA"),
)
_PLASMA = (0.0, 0.74)  # the part of the colour map that is visible on white
_LIGHTEN = (0.5, 0.1)  # how far its two ends move towards white on a dark background
_MAX_P_RANGES = 12
_DIGITS = 12  # of p after the point: 0.1 + 0.2 and 0.3 are equal
# Factors that make markers of different shapes look equally large.
_SIZES = {"*": 1.45, "D": 0.8, "s": 0.88, "d": 0.95, "P": 1.15, "X": 1.1}
_SVG_COMMANDS = {
    int(Path.MOVETO): "M",
    int(Path.LINETO): "L",
    int(Path.CURVE3): "Q",
    int(Path.CURVE4): "C",
    int(Path.CLOSEPOLY): "Z",
}


@dataclass(frozen=True)
class PRange:
    """A value of p, or an interval where there are many values, and its colour."""

    low: float
    high: float
    colour: Colour

    @property
    def label(self) -> str:
        low, high = f"{self.low:.3g}", f"{self.high:.3g}"
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Style:
    """Colours and markers of an experiment."""

    experiment: Experiment

    @cached_property
    def p_ranges(self) -> tuple[PRange, ...]:
        """The values of p; intervals where there are too many, or where they have many digits."""
        values = sorted({round(p, _DIGITS) for p in self.experiment.p_values})
        is_short = all(p == float(f"{p:.3g}") for p in values)
        few = is_short and len(values) <= _MAX_P_RANGES
        ends = [(p, p) for p in values] if few else _intervals(values)
        return tuple(
            PRange(*pair, colour) for pair, colour in zip(ends, _plasma(len(ends)), strict=True)
        )

    def p_index(self, point: Point) -> int | None:
        """Return the index in `p_ranges` of a point's p."""
        if point.p is None:
            return None
        p = round(point.p, _DIGITS)
        return next(k for k, one in enumerate(self.p_ranges) if p <= one.high)

    @cached_property
    def methods_with_p(self) -> frozenset[str]:
        return frozenset(point.method for point in self.experiment.means if point.p is not None)

    @cached_property
    def markers(self) -> dict[str, str]:
        """Each method's marker, by its matplotlib name."""
        spare = itertools.cycle(_SPARE_MARKERS)
        return {m: _MARKERS.get(m) or next(spare) for m in self.experiment.methods}

    @cached_property
    def colours(self) -> dict[str, Colour]:
        """Each method's colour, for methods without p."""
        spare = itertools.cycle(_SPARE_COLOURS)
        return {m: _COLOURS.get(m) or next(spare) for m in self.experiment.methods}

    def colour(self, point: Point) -> Colour:
        index = self.p_index(point)
        return self.colours[point.method] if index is None else self.p_ranges[index].colour


def marker_path(marker: str) -> str:
    """Return a marker as SVG path data with a radius of about 1."""
    style = MarkerStyle(marker)
    path = style.get_path().transformed(style.get_transform())
    # SVG's y axis points down; adding 0 turns -0 into 0.
    flip = 2 * marker_size(marker) * np.array([1, -1])
    return "".join(
        _SVG_COMMANDS[int(code)]
        + " ".join(f"{x:g}" for x in (flip * vertices.reshape(-1, 2)).round(3).ravel() + 0.0)
        * int(code != Path.CLOSEPOLY)
        for vertices, code in path.iter_segments(curves=True, simplify=False)
    )


def marker_size(marker: str) -> float:
    """Return the factor by which a marker is enlarged to look as large as the others."""
    return _SIZES.get(marker, 1.0)


def _plasma(count: int) -> list[Colour]:
    shares = np.array([0.3]) if count == 1 else np.linspace(0, 1, count)
    light = matplotlib.colormaps["plasma"](np.interp(shares, (0, 1), _PLASMA))[:, :3]
    dark = light + (1 - light) * np.interp(shares, (0, 1), _LIGHTEN)[:, None]
    return [(to_hex(one), to_hex(other)) for one, other in zip(light, dark, strict=True)]


def _intervals(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return at most `_MAX_P_RANGES` round intervals that contain all values."""
    span = values[-1] - values[0]
    steps = (factor * 10.0**decade for decade in range(-2, 308) for factor in (1, 2, 5))
    width = next(step for step in steps if span / step <= _MAX_P_RANGES - 2)
    first = math.floor(values[0] / width)
    last = max(first + 1, math.ceil(values[-1] / width))
    ends = [round(k * width, _DIGITS) for k in range(first, last + 1)]
    return [
        (low, high)
        for low, high in itertools.pairwise(ends)
        if any(low < p <= high or p == low == ends[0] for p in values)
    ]
