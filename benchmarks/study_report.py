"""Write the tables and figures of docs/results.md from the records of the study.

    python benchmarks/study_report.py

The tables go to docs/_data/study_*.md and the figures to docs/_static/study_*.png. A test compares
the tables with the records.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from itertools import product
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import documents
from documents import ROOT, markdown
from pdecay.lab import drawing
from pdecay.lab.train.records import Record
from study import (
    ABLATION,
    CONTOUR_LAM,
    CONTOUR_LR,
    CONTOUR_P,
    LEVELS,
    METHODS,
    STEERED,
    TASKS,
    Study,
    accuracies_on_test,
)

DOCS = ROOT / "docs"
SCALES = ("cpu", "quick")
README_LEVELS = (0.8, 0.9, 0.95)
NETWORKS = {
    "shakespeare": "GPT, Tiny Shakespeare",
    "fashion": "CNN, Fashion-MNIST",
    "cifar10": "ResNet, CIFAR-10",
}
# Colour and marker of each method. PAdam is green, darker for smaller p.
_THICK = {"linewidth": 2.2, "zorder": 3}
STYLES: dict[str, dict[str, Any]] = {
    "target": {"color": drawing.VERMILION, "marker": "D", **_THICK},
    "target, scaled updates": {
        "color": drawing.VERMILION,
        "marker": "*",
        "linestyle": "--",
        **_THICK,
    },
    "GMP": {"color": drawing.BLUE, "marker": "o", **_THICK},
    "GMP, adaptive rank": {"color": drawing.SKY, "marker": "o", **_THICK},
    "MP": {"color": drawing.BLUE, "marker": "X", "linestyle": ":"},
    "OTO": {"color": drawing.GREY, "marker": "^"},
    "L1": {"color": drawing.GREY, "marker": "s"},
    "DWF": {"color": drawing.GREY, "marker": "v"},
    "elastic": {"color": "#CC79A7", "marker": "P"},
    "PAdam, p = 0.5": {"color": "#00432F", "marker": "o"},
    "PAdam, p = 0.8": {"color": "#00704F", "marker": "o"},
    "PAdam, p = 1": {"color": drawing.GREEN, "marker": "o"},
    "PAdam, p = 1.2": {"color": "#5CC4A3", "marker": "o"},
    "PAdam, p = 1.5": {"color": "#A5DCCB", "marker": "o"},
}
TARGETS = ("target", "target, scaled updates")
MAX_ZEROS = 99.0  # of the axis; more zeros leave networks that hardly learn


def main() -> None:
    documents.write(tables(), readme())
    with matplotlib.rc_context(drawing.FONTS):
        for task, scale in product(TASKS, SCALES):
            study = Study(task, scale)
            if study.path("final").exists():
                drawing.save(draw_tradeoff(study), DOCS / "_static" / f"{_name(study)}.png")
            if study.path("contours").exists():
                path = DOCS / "_static" / f"{_name(study)}_contours.png"
                drawing.save(draw_contours(study), path)


def tables() -> dict[str, str]:
    """Return all tables in Markdown by name."""
    found = {}
    for task, scale in product(TASKS, SCALES):
        study = Study(task, scale)
        if study.path("tune").exists():
            found[_name(study)] = accuracy_table(study)
            found[f"{_name(study)}_gaps"] = gap_table(study)
        if study.path("deploy").exists():
            found[f"{_name(study)}_deploy"] = deploy_table(study)
        if study.path("ablation").exists():
            found[f"{_name(study)}_ablation"] = ablation_table(study)
    return {**found, "study_summary": summary()}


def readme() -> dict[str, str]:
    """Return the section of README in Markdown by name."""
    return {"accuracy": summary()}


def summary() -> str:
    """Return README's table: dense AdamW, GMP and the targets on all tasks, at the usual levels."""
    rows = []
    for task, network in NETWORKS.items():
        study = Study(task, "cpu")
        dense, *others = (final_runs(study, name) for name in ("AdamW, dense", "GMP", *TARGETS))
        rows += [
            [
                network,
                f"{100 * level:.0f} %",
                *map(_cell, (dense[0.0], *(o.get(level) for o in others))),
            ]
            for level in README_LEVELS
            if level in others[0] and level in others[1]
        ]
    header = ["test accuracy", "zeros", "AdamW, dense", "GMP", "pdecay", "pdecay, scaled updates"]
    return markdown(header, rows)


def accuracy_table(study: Study) -> str:
    """Return the test accuracy of each method above each level of sparsity that has runs."""
    found = {name: groups for name in METHODS if (groups := final_runs(study, name))}
    levels = [
        level for level in (0.0, *LEVELS) if any(level in groups for groups in found.values())
    ]
    header = ["method", *(f"{100 * level:.0f} % zeros" if level else "dense" for level in levels)]
    rows = [
        [name, *(_cell(groups.get(level)) for level in levels)] for name, groups in found.items()
    ]
    return markdown(header, rows)


def gap_table(study: Study) -> str:
    """Return the accuracy that the targets and GMP lose against dense AdamW, and the ratios."""
    dense = final_runs(study, "AdamW, dense").get(0.0)
    baseline = final_runs(study, "GMP")
    ours = {name: runs for name in TARGETS if (runs := final_runs(study, name))}
    rows = []
    for level in LEVELS:
        if not dense or level not in baseline or not any(level in runs for runs in ours.values()):
            continue
        lost = _mean(dense) - _mean(baseline[level])
        row = [f"{100 * level:.0f} %", f"{lost:.2f}"]
        for runs in ours.values():
            own = _mean(dense) - _mean(runs[level]) if level in runs else None
            row += ["-", "-"] if own is None else [f"{own:.2f}", f"{own / lost:.2f}"]
        rows.append(row)
    header = [cell for name in ours for cell in (f"gap of {name}", "ratio")]
    return markdown(["zeros", "gap of GMP", *header], rows)


def ablation_table(study: Study) -> str:
    """Return the zeros and the accuracies of the variations."""
    rows = []
    for (name, _), grid in zip(ABLATION.items(), study.ablation_grids(), strict=True):
        runs = study.runs(grid)
        if runs:
            zeros = 100 * statistics.mean(r["result"]["sparsity"] for r in runs)
            validation = statistics.mean(r["result"]["accuracy"] for r in runs)
            rows.append([name, f"{zeros:.1f} %", f"{validation:.2f}", _cell(runs)])
    return markdown(["variation", "zeros", "validation", "test"], rows)


def deploy_table(study: Study) -> str:
    """Return the accuracy, size and speed of the final networks with seed 0."""
    networks = [json.loads(line) for line in study.path("deploy").read_text().splitlines()]
    dense = networks[0]
    rows = []
    for one in networks:
        gains = [
            one["original_us"][state] / one["deployed_us"][state] for state in ("warm", "cold")
        ]
        rows.append(
            [
                one["method"],
                f"{100 * one['zeros']:.1f} %",
                f"{one['test_accuracy']:.2f}",
                f"{one['deployed_test_accuracy']:.2f}",
                f"{one['file_bytes'] / 1e3:,.0f}",
                f"{dense['file_bytes'] / one['file_bytes']:.1f}",
                *(f"{gain:.2f}" for gain in gains),
            ]
        )
    columns = ["zeros", "test", "deployed", "file, kB", "times smaller", "speed-up, warm", "cold"]
    return markdown(["method", *columns], rows)


def final_runs(study: Study, name: str) -> dict[float, list[Record]]:
    """Return the final runs of a method by level.

    A method with a fixed strength may have a better setting at a higher level, which then also
    counts for the lower ones.
    """
    found = {level: study.runs(grid) for level, grid in study.final_grids(name).items()}
    found = {level: runs for level, runs in found.items() if runs}
    if name in STEERED:
        return found
    best: dict[float, list[Record]] = {}
    for level in (0.0, *LEVELS):
        above = [
            runs
            for runs in found.values()
            if min(r["result"]["sparsity"] for r in runs) >= level - 1e-3
        ]
        if above:
            best[level] = max(
                above, key=lambda runs: statistics.mean(r["result"]["accuracy"] for r in runs)
            )
    return best


def draw_tradeoff(study: Study) -> Figure:
    """Draw test accuracy against sparsity for all methods."""
    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    axes = figure.add_subplot()
    drawing.set_title(
        axes,
        f"Accuracy at a given sparsity: {study.task}, scale {study.scale}",
        "test split, mean and standard deviation of three seeds; settings chosen on validation",
    )
    for name in METHODS:
        points = list(_points(final_runs(study, name)))
        if not points:
            continue
        zeros, means, spreads = (np.array(column) for column in zip(*points, strict=True))
        if name == "AdamW, dense":
            axes.axhline(means[0], color=drawing.INK, linewidth=1, linestyle="--", label=name)
            continue
        shown = 100 * zeros <= MAX_ZEROS
        axes.errorbar(
            drawing.to_decades(100 * zeros[shown]),
            means[shown],
            spreads[shown],
            label=name,
            **STYLES[name],
        )
    _sparsity_axis(axes)
    axes.set_ylabel("test accuracy, %")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return figure


def draw_contours(study: Study) -> Figure:
    """Draw accuracy and sparsity over learning rate and lam, a column for each p."""
    runs = {
        (r["settings"]["options"]["p"], r["settings"]["options"]["lam"], r["settings"]["lr"]): r
        for r in study.runs(*study.contour_grids())
    }
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    grid = figure.subplots(2, len(CONTOUR_P), sharex=True, sharey=True)
    rates = [study.recipe.lr * factor for factor in CONTOUR_LR]
    for column, p in enumerate(CONTOUR_P):
        for row, (key, label) in enumerate(
            (("accuracy", "validation accuracy, %"), ("sparsity", "zeros, %"))
        ):
            scale = 100 if key == "sparsity" else 1
            values = np.array(
                [
                    [scale * runs[p, lam, lr]["result"][key] for lr in rates]
                    if all((p, lam, lr) in runs for lr in rates)
                    else [np.nan] * len(rates)
                    for lam in CONTOUR_LAM
                ]
            )
            axes = grid[row, column]
            filled = axes.contourf(rates, CONTOUR_LAM, values, levels=12, cmap="cividis")
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
            axes.set_yticks(CONTOUR_LAM, [f"{lam:g}" for lam in CONTOUR_LAM])
            axes.minorticks_off()
            if row == 0:
                axes.set_title(f"p = {p:g}")
            else:
                axes.set_xlabel("learning rate")
            if column == 0:
                axes.set_ylabel("lam")
            figure.colorbar(filled, ax=axes, label=label if column == len(CONTOUR_P) - 1 else None)
    return figure


def _points(groups: dict[float, list[Record]]) -> Iterator[tuple[float, float, float]]:
    for runs in groups.values():
        values = accuracies_on_test(runs)
        zeros = statistics.mean(r["result"]["sparsity"] for r in runs)
        yield zeros, statistics.mean(values), _spread(values)


def _sparsity_axis(axes: Axes) -> None:
    ticks = [0, 50, 80, 90, 95, 98, 99]
    axes.set_xticks(drawing.to_decades(ticks), [f"{tick} %" for tick in ticks])
    axes.set_xlabel("zeros among the decayed weights")


def _name(study: Study) -> str:
    return f"study_{study.task}" + ("" if study.scale == "cpu" else f"_{study.scale}")


def _cell(runs: list[Record] | None) -> str:
    if not runs:
        return "-"
    values = accuracies_on_test(runs)
    return (
        f"{statistics.mean(values):.2f}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{_spread(values):.2f}"
    )


def _mean(runs: list[Record]) -> float:
    return statistics.mean(accuracies_on_test(runs))


def _spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
