"""Colours and markers, the same in the static figures and on the page.

A method has its marker. Methods with a p are coloured by it, from small to large along plasma;
the others have colours of Okabe and Ito or Tol. Each colour is a pair: for light paper and for a
dark screen.
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

from pdecay.lab.report.study import Point, Study

Pair = tuple[str, str]

INK: Pair = ("#222222", "#e6e6e6")
_MARKERS = {
    "adamw": "P",
    "padam": "o",
    "elastic": "s",
    "target": "D",
    "dwf": "^",
    "mp": "X",
    "gmp": "v",
    "oto": "*",
    "l1": "h",
}
_COLOURS: dict[str, Pair] = {
    "adamw": INK,
    "mp": ("#009E73", "#3CCB9F"),
    "gmp": ("#3B9BD0", "#62BDF0"),
    "oto": ("#C98500", "#F2C230"),
    "l1": ("#6B8E23", "#A9CC55"),
    "dwf": ("#7A5C2E", "#CDB183"),
}
_SIZES = {"*": 1.45, "D": 0.8, "s": 0.88, "d": 0.95, "P": 1.15, "X": 1.1}
_COMMANDS = {
    int(Path.MOVETO): "M",
    int(Path.LINETO): "L",
    int(Path.CURVE3): "Q",
    int(Path.CURVE4): "C",
    int(Path.CLOSEPOLY): "Z",
}
_SPARE_MARKERS = ("<", ">", "p", "d", "8")
_SPARE_COLOURS: tuple[Pair, ...] = (
    ("#44AA99", "#7FD6C8"),
    ("#999933", "#D2D26B"),
    ("#666666", "#AAAAAA"),
)
_PLASMA = (0.0, 0.74)  # what of it can be seen on white
_LIGHTER = (0.5, 0.1)  # how far its dark and its light end move to white on a dark screen
_MOST_NORMS = 12


@dataclass(frozen=True)
class Norm:
    """A value of p, or, where there are very many, an interval of them, and its colour."""

    low: float
    high: float
    colour: Pair

    @property
    def label(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Style:
    """How the points of a study look."""

    study: Study

    @cached_property
    def norms(self) -> tuple[Norm, ...]:
        """The values of p; intervals where a search has drawn more than a reader can tell apart."""
        values = self.study.norms
        ends = [(p, p) for p in values] if len(values) <= _MOST_NORMS else _intervals(values)
        return tuple(
            Norm(*pair, colour) for pair, colour in zip(ends, _plasma(len(ends)), strict=True)
        )

    def norm(self, point: Point) -> int | None:
        """The place of a point's p in `norms`."""
        if point.p is None:
            return None
        return next(k for k, norm in enumerate(self.norms) if point.p <= norm.high)

    @cached_property
    def markers(self) -> dict[str, str]:
        """Each method's marker, by matplotlib's name for it."""
        own = [method for method in self.study.methods if method not in _MARKERS]
        spare = {m: _SPARE_MARKERS[k % len(_SPARE_MARKERS)] for k, m in enumerate(own)}
        return {method: _MARKERS.get(method) or spare[method] for method in self.study.methods}

    @cached_property
    def colours(self) -> dict[str, Pair]:
        """Each method's colour, where p does not decide it."""
        own = [method for method in self.study.methods if method not in _COLOURS]
        spare = {m: _SPARE_COLOURS[k % len(_SPARE_COLOURS)] for k, m in enumerate(own)}
        return {method: _COLOURS.get(method) or spare[method] for method in self.study.methods}

    def colour(self, point: Point) -> Pair:
        norm = self.norm(point)
        return self.colours[point.method] if norm is None else self.norms[norm].colour


def marker_path(marker: str) -> str:
    """A marker as the data of an SVG path, about 1 from its middle to its rim."""
    style = MarkerStyle(marker)
    path = style.get_path().transformed(style.get_transform())
    return "".join(
        _COMMANDS[int(code)] + ("" if code == Path.CLOSEPOLY else _numbers(vertices, size(marker)))
        for vertices, code in path.iter_segments(curves=True, simplify=False)
    )


def size(marker: str) -> float:
    """How much larger than matplotlib's a marker is drawn, so that all weigh the same."""
    return _SIZES.get(marker, 1.0)


def _numbers(vertices: np.ndarray, scale: float) -> str:
    flipped = 2 * scale * vertices.reshape(-1, 2) * (1, -1)  # SVG's y points down
    return " ".join(f"{value:g}" for value in flipped.round(3).ravel() + 0.0)  # no -0


def _plasma(count: int) -> list[Pair]:
    shares = np.array([0.3]) if count == 1 else np.linspace(0, 1, count)
    light = matplotlib.colormaps["plasma"](np.interp(shares, (0, 1), _PLASMA))[:, :3]
    dark = light + (1 - light) * np.interp(shares, (0, 1), _LIGHTER)[:, None]
    return [(to_hex(one), to_hex(other)) for one, other in zip(light, dark, strict=True)]


def _intervals(values: Sequence[float]) -> list[tuple[float, float]]:
    """Round intervals that hold all values, and at most twelve of them."""
    span = values[-1] - values[0]
    width = next(
        step
        for decade in range(-3, 9)
        for step in (10.0**decade, 2 * 10.0**decade, 5 * 10.0**decade)
        if span / step <= _MOST_NORMS - 2
    )
    first, last = math.floor(values[0] / width), math.ceil(values[-1] / width)
    ends = [round(k * width, 12) for k in range(first, last + 1)]
    return [
        (low, high)
        for low, high in itertools.pairwise(ends)
        if any(low < p <= high or p == low == ends[0] for p in values)
    ]
