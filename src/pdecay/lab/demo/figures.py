"""The demo's two figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from pdecay.lab.demo.results import Results, Summary
from pdecay.lab.drawing import (
    BLUE,
    FONTS,
    GREEN,
    GREY,
    INK,
    VERMILION,
    from_decades,
    save,
    set_title,
    to_decades,
)

_STYLES = (
    {"color": BLUE, "marker": "o"},
    {"color": VERMILION, "marker": "s"},
    {"color": GREEN, "marker": "D"},
)
_TICKS = (0, 50, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9)  # per cent of zeros


def accuracy_against_sparsity(results: Results, path: Path, *, subtitle: str) -> None:
    """Draw the validation accuracy over the share of zeros, with one curve for each p.

    The horizontal axis is logarithmic in the number of remaining weights, because the interesting
    range from 90 to 99 % of zeros is narrow on a linear axis. The dashed line is the best AdamW.
    """
    dense = results.dense
    curves: dict[str, list[Summary]] = {}
    for summary in results.sparse:
        curves.setdefault(summary.curve, []).append(summary)
    with matplotlib.rc_context(FONTS):
        figure = Figure(figsize=(7.6, 4.4), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xscale("function", functions=(to_decades, from_decades))
        axes.axhline(
            dense.accuracy,
            color="black",
            linestyle="--",
            linewidth=1.4,
            zorder=1,
            label=f"AdamW, dense: {dense.accuracy:.1f} %",
        )
        for (name, summaries), style in zip(curves.items(), _STYLES, strict=False):
            _curve(axes, name, summaries, style)
        _set_limits(axes, [*results.sparse, dense])
        # The curve is flat to the left of the first label, which is therefore placed well below it.
        offsets = ((-75, -85), (-34, -28), (-30, -14))
        for summary, offset in zip(results.marked, offsets, strict=False):
            _annotate(axes, summary, dense, offset)
        axes.set_xlabel("weights that are zero, %   (logarithmic in the remaining weights)")
        axes.set_ylabel("validation accuracy, %")
        set_title(axes, results.title(), subtitle)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(loc="lower center")
        save(figure, path)


def toy(curves: Mapping[str, Sequence[float]], path: Path, *, subtitle: str) -> None:
    """Draw the weight over the steps for the three variants of section 4.2."""
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
        set_title(axes, "The gradient oscillates, the decay goes to zero", subtitle)
        axes.legend(loc="upper right")
        save(figure, path)


def _curve(axes: Any, name: str, summaries: Sequence[Summary], style: Mapping[str, str]) -> None:
    ordered = sorted(summaries, key=lambda summary: summary.sparsity)
    axes.errorbar(
        [100 * summary.sparsity for summary in ordered],
        [summary.accuracy for summary in ordered],
        yerr=[summary.spread for summary in ordered],
        label=f"PAdam, {name}",
        linewidth=2,
        markersize=6,
        elinewidth=1,
        capsize=2,
        zorder=3,
        **style,
    )


def _annotate(axes: Any, summary: Summary, dense: Summary, offset: tuple[int, int]) -> None:
    """Label a point at its lower left, where a falling curve leaves room."""
    points = summary.accuracy - dense.accuracy
    axes.annotate(
        f"{100 * summary.sparsity:.1f} % zeros\n{points:+z.1f} points",
        (100 * summary.sparsity, summary.accuracy),
        xytext=offset,
        textcoords="offset points",
        ha="right",
        va="center",
        color=INK,
        arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.8, "shrinkB": 5},
    )


def _set_limits(axes: Any, summaries: Sequence[Summary]) -> None:
    """Set round limits around all points with their error bars, and ticks to match."""
    low = min(summary.accuracy - summary.spread for summary in summaries)
    high = max(summary.accuracy + summary.spread for summary in summaries)
    axes.set_ylim(math.floor(low - 0.7), min(100, math.ceil(high + 0.3)))
    most = max(100 * summary.sparsity for summary in summaries)
    right = next((tick for tick in _TICKS[3:] if tick > most), 99.95)
    axes.set_xlim(-4, from_decades(to_decades(right) + 0.04))
    ticks = [tick for tick in _TICKS if tick <= right]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
