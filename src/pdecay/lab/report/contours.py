"""Accuracy over (lr, lam), both logarithmic, with lines of equal sparsity: the paper's contours.

There is one surface for each method and p (and whatever other option differs). matplotlib computes
its bands and lines; they are kept as plain polygons, so that the page and the static figures draw
the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator
from matplotlib.tri import LinearTriInterpolator, Triangulation

from pdecay.lab.report import best
from pdecay.lab.report.study import Point, Study, canonical, number, text
from pdecay.lab.train.records import Record

SPARSITIES = (0.01, 0.2, 0.4, 0.8)  # the paper's lines
_BANDS = 9
_MARGIN = 0.06  # of the axes, around the outermost cells
_GRID = 0.5  # the share of a full grid from which on cells are a grid with holes, else scattered
_MOST_TICKS, _LONGEST = 8, 6
_CHARACTER = (0.028, 0.016)  # shares of a panel's width; and of its height, where lines are stacked

Polygons = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Scale:
    """The colours of accuracy, the same for all surfaces of a study.

    ``colours[0]`` is for what is below ``levels[0]``, ``colours[k]`` for what is above
    ``levels[k - 1]``.
    """

    levels: tuple[float, ...]
    colours: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """A place of the surface: a setting that ran, one that diverged, or a hole in the grid."""

    lr: float
    lam: float
    x: float
    y: float
    point: Point | None = None
    diverged: bool = False


@dataclass(frozen=True)
class Line:
    """Where the sparsity is equal, and the place of its label; None where there is no line."""

    sparsity: float
    pieces: Polygons
    label: tuple[float, float] | None


@dataclass(frozen=True)
class Surface:
    """One panel. All coordinates are shares of the axes, from 0 to 1.

    Args:
        title: the method, p, and what else tells it from other panels.
        of: one of its settings.
        cells: all settings of the panel.
        bands: polygons for each colour of the scale; holes by the even-odd rule.
        lines: for each of `SPARSITIES`.
        x_ticks, y_ticks: places and labels.
        note: what a reader should know, such as why there are no contours.
    """

    title: str
    of: Point
    cells: tuple[Cell, ...] = ()
    bands: tuple[Polygons, ...] = ()
    lines: tuple[Line, ...] = ()
    x_ticks: tuple[tuple[float, str], ...] = ()
    y_ticks: tuple[tuple[float, str], ...] = ()
    note: str = ""

    @property
    def drawn(self) -> bool:
        return bool(self.bands)


def surfaces(study: Study, scale: Scale) -> list[Surface]:
    """A surface for each group of runs that differ in lr, lam and seed alone."""
    found: dict[tuple[str, str], tuple[list[Point], list[Record]]] = {}
    for point in study.means:
        if number(point.options, "lam") is not None:
            found.setdefault(_family(point.runs[0]), ([], []))[0].append(point)
    for record in study.failed:
        if _family(record) in found:
            found[_family(record)][1].append(record)
    return [_surface(study, scale, *members) for members in found.values()]


def scale(points: Sequence[Point]) -> Scale:
    """Round levels of accuracy. What has collapsed, and the worst of the rest, share one colour."""
    lost = best.collapsed(points)
    values = [point.accuracy for point in points if point not in lost] or [0.0]
    low, high = float(np.quantile(values, 0.1)), max(values)
    ticks = MaxNLocator(_BANDS, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    inside = [float(tick) for tick in ticks if low < tick < high] or [high]
    places = np.linspace(0.0, 0.97, len(inside) + 1)
    colours = (to_hex(matplotlib.colormaps["viridis"](place)) for place in places)
    return Scale(tuple(inside), tuple(colours))


def _family(record: Record) -> tuple[str, str]:
    settings = record["settings"]
    return settings["method"], canonical(settings["options"], without="lam")


def _surface(
    study: Study, scale: Scale, points: Sequence[Point], failed: Sequence[Record]
) -> Surface:
    options = study.telling(points[0].runs[0], without=["lam"])
    parts = [points[0].method, *(f"{name} = {text(value)}" for name, value in options.items())]
    title = ", ".join(parts)
    ran = {(point.lr, float(point.options["lam"])): point for point in points}
    settings = [record["settings"] for record in failed]
    diverged = {(s["lr"], float(s["options"]["lam"])) for s in settings} - set(ran)
    zero = {place for place in {*ran, *diverged} if min(place) <= 0}  # no logarithm
    ran = {place: point for place, point in ran.items() if place not in zero}
    diverged -= zero
    notes = [f"{len(zero)} with lr or lam = 0 left out"] if zero else []
    rates, lams = (len({place[k] for place in ran}) for k in (0, 1))
    if rates < 2 or lams < 2:
        need = f"2 learning rates and 2 lam or more are needed, there are {rates} and {lams}"
        return Surface(title, points[0], note="; ".join([f"No contours: {need}", *notes]))
    x, y = (_Axis(place[k] for place in {*ran, *diverged}) for k in (0, 1))
    is_grid = len(ran) >= _GRID * len(x.values) * len(y.values)
    holes = {(lr, lam) for lr in x.values for lam in y.values if is_grid} - {*ran, *diverged}
    cells = tuple(
        Cell(lr, lam, x.place(lr), y.place(lam), ran.get((lr, lam)), (lr, lam) in diverged)
        for lr, lam in (*ran, *sorted(diverged), *sorted(holes))
    )
    mesh = _Mesh(cells, is_grid)
    if mesh.is_flat:
        need = "the settings that came to an end lie on one line"
        return Surface(title, points[0], note="; ".join([f"No contours: {need}", *notes]))
    if not is_grid:
        notes.append("scattered settings, interpolated")
    notes += [f"{len(diverged)} diverged"] * bool(diverged)
    notes += [f"{len(holes)} not run, interpolated"] * bool(holes)
    return Surface(
        title,
        points[0],
        cells,
        bands=mesh.bands(scale),
        lines=tuple(mesh.line(place) for place in range(len(SPARSITIES))),
        x_ticks=x.ticks(_CHARACTER[0]),
        y_ticks=y.ticks(_CHARACTER[1]),
        note="; ".join(notes),
    )


class _Axis:
    """A logarithmic axis around some values."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values = sorted(set(values))

    def place(self, value: float) -> float:
        low, high = math.log(self.values[0]), math.log(self.values[-1])
        return _MARGIN + (1 - 2 * _MARGIN) * (math.log(value) - low) / (high - low)

    def ticks(self, width: float) -> tuple[tuple[float, str], ...]:
        """The values themselves if they are few and short, else round ones between them.

        Args:
            width: of a character, in shares of the axis; labels that would touch are left out.
        """
        values = self.values
        if len(values) > _MOST_TICKS or any(len(f"{value:g}") > _LONGEST for value in values):
            low, high = values[0], values[-1]
            decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            values = [m * 10.0**k for k in decades for m in (1, 2, 5) if low <= m * 10.0**k <= high]
        kept: list[tuple[float, str]] = []
        end = -math.inf
        for value in values:
            place, label = self.place(value), f"{value:g}"
            half = width * (len(label) + 1) / 2
            if place - half >= end:
                kept.append((place, label))
                end = place + half
        return tuple(kept)


class _Mesh:
    """The cells that came to an end, as a grid with holes or as triangles between them."""

    def __init__(self, cells: Sequence[Cell], is_grid: bool) -> None:
        self._is_grid = is_grid
        self._columns, self._rows = (
            np.unique([(cell.x, cell.y)[k] for cell in cells]) for k in (0, 1)
        )
        ends = [(cell.x, cell.y, cell.point) for cell in cells if cell.point]
        self._x, self._y = (np.array([end[k] for end in ends]) for k in (0, 1))
        self._points = [end[2] for end in ends]
        self._holes = [(c.x, c.y) for c in cells if c.point is None and not c.diverged]

    @property
    def is_flat(self) -> bool:
        """Whether all cells lie on one line, so that there is nothing between them."""
        away = [self._x - self._x[0], self._y - self._y[0]]
        return int(np.linalg.matrix_rank(away, tol=1e-6)) < 2

    def bands(self, scale: Scale) -> tuple[Polygons, ...]:
        values = [point.accuracy for point in self._points]
        low, high = min(*values, *scale.levels) - 1, max(*values, *scale.levels) + 1
        drawn = self._contours(values, [low, *scale.levels, high], filled=True)
        return tuple(_polygons(path, closed_only=True) for path in drawn.get_paths())

    def line(self, place: int) -> Line:
        sparsity = SPARSITIES[place]
        values = [point.sparsity for point in self._points]
        pieces: Polygons = ()
        if min(values) < sparsity < max(values):
            (path,) = self._contours(values, [sparsity], filled=False).get_paths()
            pieces = _polygons(path, closed_only=False)
        if not pieces:
            return Line(sparsity, (), None)
        # Lines of neighbouring sparsities run side by side: labels in a row would collide.
        share = (place + 1) / (len(SPARSITIES) + 1)
        return Line(sparsity, pieces, _along(max(pieces, key=_length), share))

    def _contours(
        self, values: Sequence[float], levels: Sequence[float], *, filled: bool
    ) -> ContourSet:
        axes = Figure().add_subplot()
        if not self._is_grid:
            mesh = Triangulation(self._x, self._y)
            return (axes.tricontourf if filled else axes.tricontour)(mesh, values, levels=levels)
        heights = np.ma.masked_all((len(self._rows), len(self._columns)))
        heights[self._places(self._x, self._y)] = values
        if self._holes:
            # What did not run lies between what did; what diverged does not, and stays empty.
            x, y = np.array(self._holes).T
            between = LinearTriInterpolator(Triangulation(self._x, self._y), values)
            heights[self._places(x, y)] = between(x, y)
        # corner_mask: where one of four corners is missing, the other three are a triangle
        grid = (self._columns, self._rows, heights)
        return (axes.contourf if filled else axes.contour)(*grid, levels=levels, corner_mask=True)

    def _places(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of some cells."""
        return np.searchsorted(self._rows, y), np.searchsorted(self._columns, x)


def _polygons(path: Path, *, closed_only: bool) -> Polygons:
    return tuple(np.asarray(piece) for piece in path.to_polygons(closed_only=closed_only))


def _along(piece: np.ndarray, share: float) -> tuple[float, float]:
    """The place on a line that is a share of its length from its start."""
    walked = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(piece, axis=0).T))])
    x, y = (float(np.interp(share * walked[-1], walked, piece[:, k])) for k in (0, 1))
    return x, y


def _length(piece: np.ndarray) -> float:
    return float(np.hypot(*np.diff(piece, axis=0).T).sum())
