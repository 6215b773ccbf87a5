"""The static figures of an experiment: the page's initial view as PNG and SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from pdecay.lab.drawing import (
    BLUE,
    FONTS,
    GREY,
    INK,
    VERMILION,
    from_decades,
    set_title,
    to_decades,
)
from pdecay.lab.report import best
from pdecay.lab.report.contours import SPARSITIES, ColourScale, Surface
from pdecay.lab.report.experiments import Point
from pdecay.lab.report.style import Style, marker_size
from pdecay.lab.train.records import Record

_TICKS = (0, 50, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9, 99.95, 99.98, 99.99)  # per cent of zeros
_MAX_ZEROS = 99.99  # per cent; sparser networks are drawn at the end of the axis
_GRID: Any = {"axis": "y", "color": "#e6e6e6", "linewidth": 0.8}
_COLUMNS = 3  # contour panels in a row, as in the paper
_SIZE = 46  # marker size in square points

_styled = matplotlib.rc_context(FONTS)  # decorator of the drawing functions


@_styled
def accuracy(style: Style) -> Figure:
    """Draw accuracy against sparsity, the Pareto front and the best AdamW."""
    figure, axes = _scatter(style, lambda point: point.accuracy, with_front=True)
    front = best.pareto_front(style.experiment.means)
    if front:
        # A staircase: at each sparsity, the best accuracy of all networks at least that sparse.
        sparsities = [axes.get_xlim()[0], *map(_zeros, front)]
        accuracies = [front[0].accuracy, *(point.accuracy for point in front)]
        axes.step(sparsities, accuracies, color=GREY, linewidth=1.2, where="pre", zorder=2)
    axes.set_ylabel("validation accuracy, %")
    cropped = len(best.cropped(style.experiment.means))
    note = f"; {cropped} below the plot, at its edge" if cropped else ""
    _title(axes, "Accuracy against sparsity", style.experiment.describe() + note)
    return figure


@_styled
def tradeoff(style: Style) -> Figure:
    """Draw the paper's trade-off: accuracy in percent plus sparsity from 0 to 1."""
    figure, axes = _scatter(style, lambda point: point.tradeoff, with_front=False)
    top = best.best_tradeoff(style.experiment.means)
    if top:
        ring: Any = {"facecolors": "none", "edgecolors": INK, "linewidths": 1.4, "zorder": 5}
        axes.scatter(_zeros(top), top.tradeoff, s=4.5 * _SIZE, **ring)
    axes.set_ylabel("accuracy in % + sparsity from 0 to 1")
    _title(axes, "Trade-off", f"{style.experiment.describe()}; ring: the best")
    return figure


@_styled
def contours(style: Style, surfaces: Sequence[Surface], scale: ColourScale) -> Figure:
    """Draw accuracy over (lr, lam), one panel for each surface; at least one is needed."""
    columns = min(_COLUMNS, len(surfaces))
    rows = math.ceil(len(surfaces) / columns)
    figure = Figure(figsize=(3.3 * columns + 1.3, 3.1 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for index, (axes, surface) in enumerate(zip(grid, surfaces, strict=False)):
        _surface(axes, surface, scale)
        if index % columns == 0:
            axes.set_ylabel("lam")
        if index + columns >= len(surfaces):
            axes.set_xlabel("learning rate")
    for axes in grid[len(surfaces) :]:
        axes.set_axis_off()
    _colour_bar(figure, scale)
    lines = ", ".join(f"{sparsity:g}" for sparsity in SPARSITIES)
    subtitle = f"{_printable(style.experiment.describe(), 90)}\nlines: sparsity {lines}"
    figure.suptitle(subtitle, color=GREY, fontsize=10, x=0.01, ha="left")
    return figure


@_styled
def layers(record: Record, name: str) -> Figure:
    """Draw the share of non-zero weights in each layer of one run."""
    found = record["result"]["layers"]
    shares = [100 * (1 - layer["zeros"] / max(1, layer["size"])) for layer in found]
    figure = Figure(figsize=(7.6, 1.5 + 0.27 * len(found)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(len(found)), shares, color=BLUE, height=0.72)
    for index, (share, layer) in enumerate(zip(shares, found, strict=True)):
        label = f"  {share:.3g} % of {layer['size']:,}"
        axes.text(share, index, label, va="center", fontsize=9, color=GREY)
    names = [_printable(layer["name"], 44) for layer in found]
    axes.set_yticks(range(len(found)), names, fontsize=9)
    axes.set(xlim=(0, 1.3 * max([*shares, 0.01])), ylim=(len(found) - 0.4, -0.6))
    axes.set_xlabel("weights that are not zero, %")
    _title(axes, "Non-zero weights of each layer", name)
    return figure


@_styled
def curves(record: Record, reference: Record | None, name: str) -> Figure:
    """Draw accuracy, loss and sparsity of one run over its steps, and those of the best AdamW."""
    figure = Figure(figsize=(10.5, 3.5), layout="constrained")
    panels = figure.subplots(1, 3)
    labels = ("validation accuracy, %", "loss", "weights that are zero, %")
    for axes, measure, label in zip(panels, ("accuracy", "loss", "sparsity"), labels, strict=True):
        if reference and reference is not record:
            _curve(axes, reference, measure, color=GREY, linestyle="--", label="best AdamW")
        _curve(axes, record, measure, color=BLUE, label="this run")
        axes.set(xlabel="step", ylabel=label)
        axes.grid(**_GRID)
        axes.set_axisbelow(True)
    _curve(panels[1], record, "train_loss", color=BLUE, linestyle=":", label="this run, training")
    panels[1].legend(fontsize=9)
    _title(panels[0], "Training", name)
    return figure


def _scatter(
    style: Style, height: Callable[[Point], float], *, with_front: bool
) -> tuple[Figure, Axes]:
    """Draw one marker for each setting; with the front, also deviations over seeds."""
    points = style.experiment.means
    outside = best.cropped(points)
    inside = [point for point in points if point not in outside]
    figure = Figure(figsize=(8.8, 5.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("function", functions=(to_decades, from_decades))
    highest = max([*(_zeros(point) for point in inside), 90.0])
    axes.set_xlim(from_decades(-0.05), from_decades(to_decades(highest) + 0.06))
    ticks = _ticks(highest)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("weights that are zero, %   (logarithmic in the non-zero weights)")
    axes.grid(**_GRID)
    axes.set_axisbelow(True)
    front = best.pareto_front(points)
    for point in inside:
        if with_front and point.deviation:
            bar: Any = {"color": style.colour(point)[0], "linewidth": 0.9, "zorder": 3}
            axes.errorbar(_zeros(point), point.accuracy, yerr=point.deviation, **bar)
        position = (_zeros(point), height(point))
        _mark(axes, style, point, position, hollow=not point.reliable, strong=point in front)
    dense = best.dense_reference(points)
    if dense:
        axes.axhline(height(dense), color=INK, linestyle="--", linewidth=1.4, zorder=1)
    axes.set_ylim(axes.get_ylim())  # the cropped points must not extend the axis
    for point in outside:
        edge = (min(_zeros(point), axes.get_xlim()[1]), axes.get_ylim()[0])
        _mark(axes, style, point, edge, hollow=True, strong=False)
    handles = [*_legend(style, dense, with_front=with_front)]
    figure.legend(handles=handles, loc="outside right upper", fontsize=9, labelspacing=0.55)
    return figure, axes


def _ticks(highest: float) -> list[float]:
    """Return the ticks up to `highest` whose labels do not overlap."""
    ticks = [0.0]
    for tick in _TICKS[1:]:
        distance = to_decades(tick) - to_decades(ticks[-1])
        if tick <= highest and distance > 0.085 * to_decades(highest):
            ticks.append(tick)
    return ticks


def _mark(
    axes: Axes,
    style: Style,
    point: Point,
    position: tuple[float, float],
    *,
    hollow: bool,
    strong: bool,
) -> None:
    colour, marker = style.colour(point)[0], style.markers[point.method]
    axes.scatter(
        *position,
        s=_SIZE * marker_size(marker) ** 2,
        marker=marker,
        color="white" if hollow else colour,
        edgecolors=colour if hollow else "white",
        linewidths=1.2 if hollow else 0.6,
        alpha=1.0 if strong or hollow else 0.55,
        zorder=4 if strong else 3.5 if point.method == "adamw" else 3,
        clip_on=False,
    )


def _legend(style: Style, dense: Point | None, *, with_front: bool) -> Iterator[Line2D]:
    if dense:
        label = f"best AdamW, {dense.accuracy:.2f} %"
        yield Line2D([], [], color=INK, linestyle="--", label=label)
    if with_front:
        yield Line2D([], [], color=GREY, linewidth=1.2, label="Pareto front")
    entries = [
        (
            _printable(method, 24),
            GREY if method in style.methods_with_p else style.colours[method][0],
            style.markers[method],
        )
        for method in style.experiment.methods
    ]
    entries += [(f"p = {one.label}", one.colour[0], "o") for one in style.p_ranges]
    for label, colour, marker in entries:
        size = 7 * marker_size(marker)
        look: Any = {"linestyle": "none", "markeredgecolor": "white", "markersize": size}
        yield Line2D([], [], color=colour, marker=marker, label=label, **look)


def _surface(axes: Axes, surface: Surface, scale: ColourScale) -> None:
    axes.set_title(_printable(surface.title, 36), fontsize=11)
    for polygons, colour in zip(surface.bands, scale.colours, strict=True):
        band = Path.make_compound_path(*(Path(polygon, closed=True) for polygon in polygons))
        # An edge of the band's own colour hides the gap between two bands.
        axes.add_patch(PathPatch(band, facecolor=colour, edgecolor=colour, linewidth=0.4))
    for line in surface.lines:
        for piece in line.pieces:
            (drawn,) = axes.plot(*piece.T, color="white", linewidth=1.5)
            drawn.set_path_effects([withStroke(linewidth=2.6, foreground="#00000066")])
        label = axes.text(*line.label, f"{line.sparsity:g}", color="white", fontsize=8.5)
        label.set(ha="center", va="center", zorder=4)
        label.set_path_effects([withStroke(linewidth=2.6, foreground=INK)])
    for cell in surface.cells:
        look: Any = {"marker": "s", "s": 16, "facecolors": "none", "edgecolors": GREY}
        if cell.diverged:
            look = {"marker": "x", "s": 22, "color": VERMILION}
        elif cell.point:
            look = {"s": 8, "color": "#00000070", "linewidths": 0}
        axes.scatter(cell.x, cell.y, zorder=3, **look)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    for ticks, set_ticks in (
        (surface.x_ticks, axes.set_xticks),
        (surface.y_ticks, axes.set_yticks),
    ):
        set_ticks([place for place, _ in ticks], [label for _, label in ticks])
    if surface.note:
        axes.text(0.02, 0.98, surface.note, transform=axes.transAxes, fontsize=8, color=GREY)


def _colour_bar(figure: Figure, scale: ColourScale) -> None:
    step = scale.levels[1] - scale.levels[0] if len(scale.levels) > 1 else 1.0
    ends = [scale.levels[0] - step, *scale.levels, scale.levels[-1] + step]
    colours = ScalarMappable(BoundaryNorm(ends, len(scale.colours)), ListedColormap(scale.colours))
    bar = figure.colorbar(colours, ax=figure.axes, shrink=0.75, aspect=28, pad=0.02)
    bar.set_ticks(list(scale.levels), labels=[f"{level:g}" for level in scale.levels])
    bar.set_label("validation accuracy, %")
    bar.outline.set_visible(False)


def _curve(axes: Axes, record: Record, measure: str, **look: Any) -> None:
    points = [(at["step"], at[measure]) for at in record["curve"] if at[measure] is not None]
    steps, values = np.array(points).reshape(-1, 2).T
    axes.plot(steps, values * (100 if measure == "sparsity" else 1), linewidth=1.8, **look)


def _title(axes: Axes, title: str, subtitle: str) -> None:
    set_title(axes, title, _printable(subtitle, 90))


def _printable(text: str, length: int) -> str:
    """Shorten a name, and replace characters that a font or an SVG file may not support."""
    printable = "".join(sign if " " <= sign <= "~" else "?" for sign in text)
    return printable if len(printable) <= length else f"{printable[: length - 3]}..."


def _zeros(point: Point) -> float:
    return min(100 * point.sparsity, _MAX_ZEROS)
