"""The demo's two figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from pdecay.lab.demo.runs import Summary
from pdecay.lab.drawing import (
    BLUE,
    FONTS,
    GREEN,
    GREY,
    INK,
    VERMILION,
    from_decades,
    save,
    to_decades,
)

_STYLES = (
    {"color": BLUE, "marker": "o"},
    {"color": VERMILION, "marker": "s"},
    {"color": GREEN, "marker": "D"},
)
_TICKS = (0, 50, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9)  # per cent of zeros


def accuracy_against_sparsity(
    curves: Mapping[str, Sequence[Summary]],
    dense: Summary,
    marked: Sequence[Summary],
    path: Path,
    *,
    title: str,
    subtitle: str,
) -> None:
    """Accuracy over the share of zeros, one line for each way to decay.

    The horizontal axis is logarithmic in the weights that are left: what matters happens between
    90 and 99 % of zeros, a sliver of a linear axis.

    Args:
        curves: by name, the settings of one curve.
        dense: what the dashed line stands for.
        marked: settings whose numbers are written beside their points.
        path: the PNG to write.
        title, subtitle: what the figure says, and of what.
    """
    with matplotlib.rc_context(FONTS):
        figure = Figure(figsize=(7.6, 4.4), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xscale("function", functions=(to_decades, from_decades))
        axes.axhline(
            100 * dense.accuracy,
            color="black",
            linestyle="--",
            linewidth=1.4,
            zorder=1,
            label=f"AdamW, dense: {100 * dense.accuracy:.1f} %",
        )
        for (name, summaries), style in zip(curves.items(), _STYLES, strict=False):
            _curve(axes, name, summaries, style)
        _limits(axes, [*(s for curve in curves.values() for s in curve), dense])
        # Left of the first point the curve is flat, so its numbers stand well below it; left of the
        # others, on the curve's fall, there is room.
        for summary, offset in zip(marked, ((-32, -60), (-34, -28), (-30, -14)), strict=False):
            _annotate(axes, summary, dense, offset)
        axes.set_xlabel("weights that are zero, %   (logarithmic in the weights that are left)")
        axes.set_ylabel("validation accuracy, %")
        axes.set_title(f"{title}\n", pad=4)
        axes.text(0, 1.02, subtitle, transform=axes.transAxes, color=GREY, va="bottom", fontsize=10)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(loc="lower center")
        save(figure, path)


def toy(curves: Mapping[str, Sequence[float]], path: Path, *, subtitle: str) -> None:
    """The weight over the steps, for the three ways of section 4.2."""
    styles: dict[str, tuple[str, dict[str, Any]]] = {
        "gradient": ("norm in the gradient", {"color": GREY, "linewidth": 1.2, "linestyle": ":"}),
        "s every step": ("p-norm decay, s at every step", {"color": BLUE, "linewidth": 2.4}),
        "s every 20 steps": (
            "p-norm decay, s at every 20th step",
            {"color": VERMILION, "linewidth": 2, "linestyle": "--"},
        ),
    }
    with matplotlib.rc_context(FONTS):
        figure = Figure(figsize=(7.6, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.axhline(0, color="black", linewidth=0.8)
        for name, curve in curves.items():
            label, style = styles[name]
            axes.plot(range(len(curve)), curve, label=label, **style)
        axes.set_xlabel("step")
        axes.set_ylabel("weight")
        axes.set_xlim(0, len(next(iter(curves.values()))) - 1)
        axes.set_title("The gradient oscillates, the decay goes to zero\n", pad=4)
        axes.text(0, 1.02, subtitle, transform=axes.transAxes, color=GREY, va="bottom", fontsize=10)
        axes.legend(loc="upper right")
        save(figure, path)


def _curve(axes: Any, name: str, summaries: Sequence[Summary], style: Mapping[str, str]) -> None:
    ordered = sorted(summaries, key=lambda summary: summary.sparsity)
    axes.errorbar(
        [100 * summary.sparsity for summary in ordered],
        [100 * summary.accuracy for summary in ordered],
        yerr=[100 * summary.spread for summary in ordered],
        label=f"PAdam, {name}",
        linewidth=2,
        markersize=6,
        elinewidth=1,
        capsize=2,
        zorder=3,
        **style,
    )


def _annotate(axes: Any, summary: Summary, dense: Summary, offset: tuple[int, int]) -> None:
    """A point's numbers to the lower left of it, where a falling curve leaves room."""
    points = 100 * (summary.accuracy - dense.accuracy)
    axes.annotate(
        f"{100 * summary.sparsity:.1f} % zeros\n{points:+z.1f} points",
        (100 * summary.sparsity, 100 * summary.accuracy),
        xytext=offset,
        textcoords="offset points",
        ha="right",
        va="center",
        color=INK,
        arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.8, "shrinkB": 5},
    )


def _limits(axes: Any, summaries: Sequence[Summary]) -> None:
    """Round limits around all points and their error bars, and ticks that fit between them."""
    low = min(100 * (summary.accuracy - summary.spread) for summary in summaries)
    high = max(100 * (summary.accuracy + summary.spread) for summary in summaries)
    axes.set_ylim(math.floor(low - 0.7), min(100, math.ceil(high + 0.3)))
    most = max(100 * summary.sparsity for summary in summaries)
    right = next((tick for tick in _TICKS[3:] if tick > most), 99.95)
    axes.set_xlim(-4, from_decades(to_decades(right) + 0.04))
    ticks = [tick for tick in _TICKS if tick <= right]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
