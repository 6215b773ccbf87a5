"""The static figures of a study: what the page shows when it is opened, as PNG and SVG."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec

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
    to_decades,
)
from pdecay.lab.report import best
from pdecay.lab.report.contours import SPARSITIES, Polygons, Scale, Surface
from pdecay.lab.report.study import Point
from pdecay.lab.report.style import Style, size
from pdecay.lab.train.records import Record

_Given = ParamSpec("_Given")

_TICKS = (0, 50, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9, 99.95, 99.98, 99.99)  # per cent of zeros
_MOST = 99.99  # per cent: what is sparser is drawn at the end of the axis
_LINES = "#e6e6e6"
_COLUMNS = 3  # of contours, as in the paper
_SIZE = 46  # of a marker, in square points


def _in_our_fonts(draw: Callable[_Given, Figure]) -> Callable[_Given, Figure]:
    @functools.wraps(draw)
    def drawn(*args: _Given.args, **kwargs: _Given.kwargs) -> Figure:
        with matplotlib.rc_context({**FONTS, "text.parse_math": False}):  # "$" is no formula
            return draw(*args, **kwargs)

    return drawn


@_in_our_fonts
def accuracy(style: Style) -> Figure:
    """Accuracy against sparsity, the Pareto front and the best AdamW."""
    figure, axes = _scatter(style, lambda point: point.accuracy, bars=True)
    front = best.front(style.study.means)
    if front:
        sparsities = [_zeros(point) for point in front]
        accuracies = [point.accuracy for point in front]
        # A staircase: at each sparsity, the best accuracy of all that are at least so sparse.
        axes.step(
            [axes.get_xlim()[0], *sparsities],
            [accuracies[0], *accuracies],
            color=GREY,
            linewidth=1.2,
            where="pre",
            zorder=2,
        )
    axes.set_ylabel("validation accuracy, %")
    beyond = len(best.collapsed(style.study.means))
    about = f"{_about(style)}; {beyond} that collapsed at the edge" if beyond else _about(style)
    _title(axes, "Accuracy against sparsity", style, about=about)
    return figure


@_in_our_fonts
def tradeoff(style: Style) -> Figure:
    """The paper's trade-off: accuracy in percent plus sparsity from 0 to 1."""
    figure, axes = _scatter(style, lambda point: point.tradeoff, bars=False)
    chosen = best.balanced(style.study.means)
    if chosen:
        axes.scatter(
            _zeros(chosen),
            chosen.tradeoff,
            s=4.5 * _SIZE,
            facecolors="none",
            edgecolors=INK,
            linewidths=1.4,
            zorder=5,
        )
    axes.set_ylabel("accuracy in % + sparsity from 0 to 1")
    _title(axes, "Trade-off", style, about=f"{_about(style)}; ringed: the best")
    return figure


@_in_our_fonts
def contours(style: Style, surfaces: Sequence[Surface], scale: Scale) -> Figure:
    """Accuracy over (lr, lam) for each p, with the paper's lines of equal sparsity.

    Args:
        style: of the study.
        surfaces: those that can be drawn; at least one.
        scale: the colours of accuracy.
    """
    columns = min(_COLUMNS, len(surfaces))
    rows = math.ceil(len(surfaces) / columns)
    figure = Figure(figsize=(3.3 * columns + 1.3, 3.1 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for place, (axes, surface) in enumerate(zip(grid, surfaces, strict=False)):
        _surface(axes, surface, scale)
        if place % columns == 0:
            axes.set_ylabel("lam")
        if place + columns >= len(surfaces):
            axes.set_xlabel("learning rate")
    for axes in grid[len(surfaces) :]:
        axes.set_axis_off()
    _colour_bar(figure, scale)
    lines = ", ".join(f"{sparsity:g}" for sparsity in SPARSITIES)
    subtitle = f"{_about(style)}\nlines: sparsity {lines}"
    figure.suptitle(subtitle, color=GREY, fontsize=10, x=0.01, ha="left")
    return figure


@_in_our_fonts
def layers(style: Style, record: Record, name: str) -> Figure:
    """The share of weights that are left in each layer of one run."""
    found = record["result"]["layers"]
    left = [100 * (1 - layer["zeros"] / max(1, layer["size"])) for layer in found]
    figure = Figure(figsize=(7.6, 1.5 + 0.27 * len(found)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(found))
    axes.barh(places, left, color=BLUE, height=0.72)
    for place, share, layer in zip(places, left, found, strict=True):
        axes.text(
            share,
            place,
            f"  {share:.3g} % of {layer['size']:,}",
            va="center",
            fontsize=9,
            color=GREY,
        )
    axes.set_yticks(places, [_plain(layer["name"], 44) for layer in found], fontsize=9)
    axes.set(xlim=(0, 1.3 * max([*left, 0.01])), ylim=(len(found) - 0.4, -0.6))
    axes.set_xlabel("weights that are not zero, %")
    _title(axes, "What is left of each layer", style, about=name)
    return figure


@_in_our_fonts
def curves(style: Style, record: Record, reference: Record | None, name: str) -> Figure:
    """One run over its steps: accuracy, loss and sparsity, beside the best AdamW's."""
    figure = Figure(figsize=(10.5, 3.5), layout="constrained")
    panels = figure.subplots(1, 3)
    _curve(panels[0], record, reference, "accuracy")
    _curve(panels[1], record, reference, "loss")
    _line(panels[1], record, "train_loss", BLUE, linestyle=":", label="this run, training")
    _curve(panels[2], record, reference, "sparsity", scale=100)
    for axes, label in zip(
        panels, ("validation accuracy, %", "loss", "weights that are zero, %"), strict=True
    ):
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(axis="y", color=_LINES, linewidth=0.8)
        axes.set_axisbelow(True)
    panels[1].legend(fontsize=9)
    _title(panels[0], "Training", style, about=name)
    return figure


def _scatter(style: Style, height: Callable[[Point], float], *, bars: bool) -> tuple[Figure, Axes]:
    points = style.study.means
    outside = best.collapsed(points)
    inside = [point for point in points if point not in outside]
    figure = Figure(figsize=(8.8, 5.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("function", functions=(to_decades, from_decades))
    most = max([*(_zeros(point) for point in inside), 90.0])
    axes.set_xlim(from_decades(-0.05), from_decades(to_decades(most) + 0.06))
    ticks = _ticks(most)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("weights that are zero, %   (logarithmic in the weights that are left)")
    axes.grid(axis="y", color=_LINES, linewidth=0.8)
    axes.set_axisbelow(True)
    front = best.front(points)
    for point in inside:
        if bars and point.spread:
            _bar(axes, style, point)
        place = (_zeros(point), height(point))
        _mark(axes, style, point, place, hollow=not point.reliable, strong=point in front)
    dense = best.adamw(points)
    if dense:
        axes.axhline(height(dense), color=INK, linestyle="--", linewidth=1.4, zorder=1)
    axes.set_ylim(axes.get_ylim())  # and no further for what comes now
    for point in outside:
        edge = (min(_zeros(point), axes.get_xlim()[1]), axes.get_ylim()[0])
        _mark(axes, style, point, edge, hollow=True, strong=True)
    figure.legend(
        handles=[*_legend(style, dense, staircase=bars)],
        loc="outside right upper",
        fontsize=9,
        labelspacing=0.55,
    )
    return figure, axes


def _ticks(most: float) -> list[float]:
    """Those of `_TICKS` up to `most` whose labels do not touch."""
    kept = [0.0]
    for tick in _TICKS[1:]:
        if tick <= most and to_decades(tick) - to_decades(kept[-1]) > 0.085 * to_decades(most):
            kept.append(tick)
    return kept


def _bar(axes: Axes, style: Style, point: Point) -> None:
    """One standard deviation up and down."""
    axes.errorbar(
        _zeros(point),
        point.accuracy,
        yerr=point.spread,
        color=style.colour(point)[0],
        linewidth=0.9,
        zorder=3,
    )


def _mark(
    axes: Axes,
    style: Style,
    point: Point,
    place: tuple[float, float],
    *,
    hollow: bool,
    strong: bool,
) -> None:
    colour, marker = style.colour(point)[0], style.markers[point.method]
    axes.scatter(
        *place,
        s=_SIZE * size(marker) ** 2,
        marker=marker,
        color="white" if hollow else colour,
        edgecolors=colour if hollow else "white",
        linewidths=1.2 if hollow else 0.6,
        alpha=1.0 if strong else 0.55,
        zorder=4 if strong else 3.5 if point.method == "adamw" else 3,
        clip_on=False,
    )


def _legend(style: Style, dense: Point | None, *, staircase: bool) -> Iterable[Line2D]:
    if dense:
        label = f"best AdamW, {dense.accuracy:.2f} %"
        yield Line2D([], [], color=INK, linestyle="--", label=label)
    if staircase:
        yield Line2D([], [], color=GREY, linewidth=1.2, label="Pareto front")
    by_norm = {point.method for point in style.study.means if point.p is not None}
    for method in style.study.methods:
        colour = GREY if method in by_norm else style.colours[method][0]
        marker = style.markers[method]
        yield _key(_plain(method, 24), colour, marker)
    for norm in style.norms:
        yield _key(f"p = {norm.label}", norm.colour[0], "o")


def _key(label: str, colour: str, marker: str) -> Line2D:
    return Line2D(
        [],
        [],
        linestyle="none",
        color=colour,
        marker=marker,
        markersize=7 * size(marker),
        markeredgecolor="white",
        label=label,
    )


def _surface(axes: Axes, surface: Surface, scale: Scale) -> None:
    axes.set_title(_plain(surface.title, 36), fontsize=11)
    for polygons, colour in zip(surface.bands, scale.colours, strict=True):
        # An edge of the band's own colour hides the hairline between two bands.
        axes.add_patch(
            PathPatch(_path(polygons), facecolor=colour, edgecolor=colour, linewidth=0.4)
        )
    for line in surface.lines:
        for piece in line.pieces:
            (drawn,) = axes.plot(*piece.T, color="white", linewidth=1.5)
            drawn.set_path_effects([withStroke(linewidth=2.6, foreground="#00000066")])
    for line in surface.lines:
        if line.label:
            label = axes.text(*line.label, f"{line.sparsity:g}", color="white", fontsize=8.5)
            label.set(ha="center", va="center", zorder=4)
            label.set_path_effects([withStroke(linewidth=2.6, foreground=INK)])
    for cell in surface.cells:
        if cell.diverged:
            axes.scatter(cell.x, cell.y, marker="x", s=22, color=VERMILION, zorder=3)
        elif cell.point:
            axes.scatter(cell.x, cell.y, s=8, color="#00000070", linewidths=0, zorder=3)
        else:
            axes.scatter(
                cell.x, cell.y, marker="s", s=16, facecolors="none", edgecolors=GREY, zorder=3
            )
    axes.set(xlim=(0, 1), ylim=(0, 1))
    for ticks, put in ((surface.x_ticks, axes.set_xticks), (surface.y_ticks, axes.set_yticks)):
        put([place for place, _ in ticks], [label for _, label in ticks])
    if surface.note:
        axes.text(0.02, 0.98, surface.note, transform=axes.transAxes, fontsize=8, color=GREY)


def _path(polygons: Polygons) -> Path:
    """Polygons and their holes as one path."""
    return Path.make_compound_path(*(Path(polygon, closed=True) for polygon in polygons))


def _colour_bar(figure: Figure, scale: Scale) -> None:
    step = scale.levels[1] - scale.levels[0] if len(scale.levels) > 1 else 1.0
    ends = [scale.levels[0] - step, *scale.levels, scale.levels[-1] + step]
    colours = ScalarMappable(BoundaryNorm(ends, len(scale.colours)), ListedColormap(scale.colours))
    bar = figure.colorbar(colours, ax=figure.axes, shrink=0.75, aspect=28, pad=0.02)
    bar.set_ticks(list(scale.levels), labels=[f"{level:g}" for level in scale.levels])
    bar.set_label("validation accuracy, %")
    bar.outline.set_visible(False)


def _curve(
    axes: Axes, record: Record, reference: Record | None, name: str, scale: float = 1
) -> None:
    if reference and reference is not record:
        _line(axes, reference, name, GREY, scale, linestyle="--", label="best AdamW")
    _line(axes, record, name, BLUE, scale, label="this run")


def _line(
    axes: Axes, record: Record, name: str, colour: str, scale: float = 1, **look: Any
) -> None:
    points = [(point["step"], point[name]) for point in record["curve"] if point[name] is not None]
    steps, values = np.array(points).reshape(-1, 2).T
    axes.plot(steps, scale * values, color=colour, linewidth=1.8, **look)


def _title(axes: Axes, title: str, style: Style, *, about: str = "") -> None:
    axes.set_title(f"{title}\n", pad=4)
    subtitle = _plain(about, 90) if about else _about(style)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, color=GREY, va="bottom", fontsize=10)


def _about(style: Style) -> str:
    study = style.study
    task = _plain(f"{study.task}, scale {study.scale}", 60)
    about = f"{task}, {study.steps:,} steps: {len(study.runs)} run{'s' * (len(study.runs) != 1)}"
    return f"{about}, means over seeds" if study.has_seeds else about


def _plain(text: str, most: int) -> str:
    """What any font can draw and any file can hold, and not too long: names are the user's."""
    printable = "".join(sign if " " <= sign <= "~" else "?" for sign in text)
    return printable if len(printable) <= most else f"{printable[: most - 3]}..."


def _zeros(point: Point) -> float:
    return min(100 * point.sparsity, _MOST)
