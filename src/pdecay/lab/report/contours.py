"""Contours of accuracy over (lr, lam), both logarithmic, with lines of equal sparsity.

There is one surface for each method, p and combination of other options. matplotlib computes the
bands and lines. They are stored as polygons, so that the page and the static figures draw the same
shapes. All coordinates are shares of the axes, from 0 to 1.
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
from matplotlib.ticker import MaxNLocator
from matplotlib.tri import LinearTriInterpolator, Triangulation

from pdecay.lab.report import best
from pdecay.lab.report.experiments import Experiment, Point, canonical, joined, number
from pdecay.lab.train.records import Record

SPARSITIES = (0.01, 0.2, 0.4, 0.8)  # the lines of the paper's figures
_BANDS = 9
_MARGIN = 0.06  # margin around the outermost cells, as a share of the axes
_GRID = 0.5  # settings that fill this share of a grid are a grid with holes, else scattered
_MAX_TICKS, _MAX_LABEL = 8, 6
_CHARACTER = (0.028, 0.016)  # space of a label's character, as a share of the x and the y axis

Polygons = tuple[np.ndarray, ...]
Ticks = tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class ColourScale:
    """The colours of accuracy, common to all surfaces of an experiment.

    ``colours[0]`` is for accuracies below ``levels[0]``, ``colours[k]`` for those above
    ``levels[k - 1]``.
    """

    levels: tuple[float, ...]
    colours: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """A position on the surface: a finished setting, a diverged one, or a gap in the grid."""

    lr: float
    lam: float
    x: float
    y: float
    point: Point | None = None
    diverged: bool = False


@dataclass(frozen=True)
class Line:
    """A line of equal sparsity and the position of its label."""

    sparsity: float
    pieces: Polygons
    label: tuple[float, float]


@dataclass(frozen=True)
class Surface:
    """One panel.

    Args:
        title: the method, p and the other options that distinguish the panel.
        example: any of its settings.
        cells: all settings of the panel.
        bands: polygons for each colour of the scale, with holes by the even-odd rule; empty if
            there are too few settings to draw contours.
        lines: the lines of equal sparsity that cross the panel.
        x_ticks, y_ticks: positions and labels.
        note: remarks for the reader, such as the reason why there are no contours.
    """

    title: str
    example: Point
    cells: tuple[Cell, ...] = ()
    bands: tuple[Polygons, ...] = ()
    lines: tuple[Line, ...] = ()
    x_ticks: Ticks = ()
    y_ticks: Ticks = ()
    note: str = ""


def surfaces(experiment: Experiment, scale: ColourScale) -> list[Surface]:
    """Return a surface for each group of runs that differ only in lr, lam and seed."""
    groups: dict[tuple[str, str], tuple[list[Point], list[Record]]] = {}
    for point in experiment.means:
        if number(point.options, "lam") is not None:
            groups.setdefault(_group(point.runs[0]), ([], []))[0].append(point)
    for record in experiment.failed:
        if number(record["settings"]["options"], "lam") is not None and _group(record) in groups:
            groups[_group(record)][1].append(record)
    return [_surface(experiment, scale, *members) for members in groups.values()]


def colour_scale(points: Sequence[Point]) -> ColourScale:
    """Return round levels of accuracy; the worst tenth and the cropped points share a colour."""
    cropped = best.cropped(points)
    values = [point.accuracy for point in points if point not in cropped] or [0.0]
    low, high = float(np.quantile(values, 0.1)), max(values)
    ticks = MaxNLocator(_BANDS, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    levels = [float(tick) for tick in ticks if low < tick < high] or [high]
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.97, len(levels) + 1))
    return ColourScale(tuple(levels), tuple(map(to_hex, colours)))


def _group(record: Record) -> tuple[str, str]:
    settings = record["settings"]
    return settings["method"], canonical(settings["options"], without="lam")


def _surface(
    experiment: Experiment, scale: ColourScale, points: Sequence[Point], failed: Sequence[Record]
) -> Surface:
    example = points[0]
    title = joined(example.method, experiment.shown_options(example.runs[0], without="lam"))
    finished = {(point.lr, float(point.options["lam"])): point for point in points}
    settings = [record["settings"] for record in failed]
    diverged = {(s["lr"], float(s["options"]["lam"])) for s in settings} - set(finished)
    zero = {at for at in {*finished, *diverged} if min(at) <= 0}  # not on a logarithmic axis
    finished = {at: point for at, point in finished.items() if at not in zero}
    diverged -= zero
    notes = [f"{len(zero)} with lr or lam = 0 left out"] if zero else []

    def without_contours(reason: str) -> Surface:
        return Surface(title, example, note="; ".join([f"No contours: {reason}", *notes]))

    # The logarithms of two neighbouring floats can be equal.
    rates, lams = (len({round(math.log(at[k]), 9) for at in finished}) for k in (0, 1))
    if rates < 2 or lams < 2:
        return without_contours(
            f"2 learning rates and 2 lam or more are needed, there are {rates} and {lams}"
        )
    x, y = (_LogAxis(at[k] for at in {*finished, *diverged}) for k in (0, 1))
    is_grid = len(finished) >= _GRID * len(x.values) * len(y.values)
    gaps = {(lr, lam) for lr in x.values for lam in y.values if is_grid} - {*finished, *diverged}
    cells = tuple(
        Cell(lr, lam, x.place(lr), y.place(lam), finished.get((lr, lam)), (lr, lam) in diverged)
        for lr, lam in (*finished, *sorted(diverged), *sorted(gaps))
    )
    mesh = _Mesh(cells, is_grid)
    if mesh.is_flat:
        return without_contours("the finished settings lie on one line")
    if not is_grid:
        notes.append("scattered settings, interpolated")
    notes += [f"{len(diverged)} diverged"] * bool(diverged)
    notes += [f"{len(gaps)} not run, interpolated"] * bool(gaps)
    return Surface(
        title,
        example,
        cells,
        bands=mesh.bands(scale),
        lines=mesh.lines(),
        x_ticks=x.ticks(_CHARACTER[0]),
        y_ticks=y.ticks(_CHARACTER[1]),
        note="; ".join(notes),
    )


class _LogAxis:
    """A logarithmic axis around some values."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values = sorted(set(values))

    def place(self, value: float) -> float:
        low, high = math.log(self.values[0]), math.log(self.values[-1])
        return _MARGIN + (1 - 2 * _MARGIN) * (math.log(value) - low) / (high - low)

    def ticks(self, character: float) -> Ticks:
        """Return the values if they are few and short, else round numbers, without overlaps.

        Args:
            character: space of a label's character, as a share of the axis.
        """
        values = self.values
        if len(values) > _MAX_TICKS or any(len(f"{value:g}") > _MAX_LABEL for value in values):
            low, high = values[0], values[-1]
            decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
            values = [m * 10.0**k for k in decades for m in (1, 2, 5) if low <= m * 10.0**k <= high]
        ticks: list[tuple[float, str]] = []
        end = -math.inf
        for value in values:
            place, label = self.place(value), f"{value:g}"
            half = character * (len(label) + 1) / 2
            if place - half >= end:
                ticks.append((place, label))
                end = place + half
        return tuple(ticks)


class _Mesh:
    """The finished cells, as a grid with gaps or as triangles between scattered cells."""

    def __init__(self, cells: Sequence[Cell], is_grid: bool) -> None:
        self._is_grid = is_grid
        self._columns = np.unique([cell.x for cell in cells])
        self._rows = np.unique([cell.y for cell in cells])
        finished = [(cell.x, cell.y, cell.point) for cell in cells if cell.point]
        self._x, self._y = (np.array([cell[k] for cell in finished]) for k in (0, 1))
        self._points = [point for _, _, point in finished]
        self._gaps = [(c.x, c.y) for c in cells if c.point is None and not c.diverged]

    @property
    def is_flat(self) -> bool:
        """Whether all cells lie on one line, so that they enclose no area."""
        offsets = [self._x - self._x[0], self._y - self._y[0]]
        return int(np.linalg.matrix_rank(offsets, tol=1e-6)) < 2

    def bands(self, scale: ColourScale) -> tuple[Polygons, ...]:
        values = [point.accuracy for point in self._points]
        low, high = min(*values, *scale.levels) - 1, max(*values, *scale.levels) + 1
        return self._contours(values, [low, *scale.levels, high], filled=True)

    def lines(self) -> tuple[Line, ...]:
        values = [point.sparsity for point in self._points]
        found = []
        for k, sparsity in enumerate(SPARSITIES, start=1):
            if not min(values) < sparsity < max(values):
                continue
            (pieces,) = self._contours(values, [sparsity], filled=False)
            if pieces:
                # Neighbouring lines are nearly parallel: labels at equal shares would collide.
                label = _point_along(max(pieces, key=_length), k / (len(SPARSITIES) + 1))
                found.append(Line(sparsity, pieces, label))
        return tuple(found)

    def _contours(
        self, values: Sequence[float], levels: Sequence[float], *, filled: bool
    ) -> tuple[Polygons, ...]:
        """Return the polygons of each band, or the pieces of each line."""
        axes = Figure().add_subplot()
        drawn: ContourSet
        if self._is_grid:
            heights = np.ma.masked_all((len(self._rows), len(self._columns)))
            heights[self._indices(self._x, self._y)] = values
            if self._gaps:
                # Settings that did not run are interpolated; diverged ones stay masked.
                x, y = np.array(self._gaps).T
                surface = LinearTriInterpolator(Triangulation(self._x, self._y), values)
                heights[self._indices(x, y)] = surface(x, y)
            # corner_mask: where one of four corners is masked, draw the triangle of the others.
            draw = axes.contourf if filled else axes.contour
            drawn = draw(self._columns, self._rows, heights, levels=levels, corner_mask=True)
        else:
            mesh = Triangulation(self._x, self._y)
            drawn = (axes.tricontourf if filled else axes.tricontour)(mesh, values, levels=levels)
        return tuple(
            tuple(np.asarray(piece) for piece in path.to_polygons(closed_only=filled))
            for path in drawn.get_paths()
        )

    def _indices(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.searchsorted(self._rows, y), np.searchsorted(self._columns, x)


def _point_along(piece: np.ndarray, share: float) -> tuple[float, float]:
    """Return the point at a share of a line's length."""
    lengths = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(piece, axis=0).T))])
    x, y = (float(np.interp(share * lengths[-1], lengths, piece[:, k])) for k in (0, 1))
    return x, y


def _length(piece: np.ndarray) -> float:
    return float(np.hypot(*np.diff(piece, axis=0).T).sum())
