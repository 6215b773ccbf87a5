"""Data of the page: every number and text that it shows, as plain values ready for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pdecay.lab.report import best, contours
from pdecay.lab.report.contours import Surface
from pdecay.lab.report.experiments import Experiment, Point, text
from pdecay.lab.report.style import Style, marker_path
from pdecay.lab.train.records import Record

_CURVE = ("step", "accuracy", "loss", "train_loss", "sparsity")
_TEST_NOTE = (
    "settings are chosen by validation accuracy; the table below reports the accuracy of the "
    "chosen settings on the test split."
)
_VALIDATION_NOTE = (
    "all accuracies are measured on the validation split, which also chooses the best settings; "
    "on new data the chosen settings are a little worse."
)


def page_data(styles: Sequence[Style]) -> dict[str, Any]:
    """Return the data of all experiments, and the constants that they share."""
    return {
        "levels": best.LEVELS,
        "rounding": best.ROUNDING,
        "crop": best.CROP,
        "dot": marker_path("o"),
        "experiments": [_experiment(style) for style in styles],
    }


def initial_run(experiment: Experiment) -> Record | None:
    """Return the run that is shown in detail first: the best trade-off, else the first run."""
    point = best.best_tradeoff(experiment.means) or next(iter(experiment.means), None)
    return point.runs[0] if point else None


def notes(experiment: Experiment) -> list[str]:
    """Return the remarks that a reader needs to interpret the plots."""
    found = []
    if not experiment.runs:
        found.append("every run diverged, so there are no plots.")
    else:
        found.append(_TEST_NOTE if experiment.has_test_accuracy else _VALIDATION_NOTE)
        if best.dense_reference(experiment.means) is None:
            found.append("there is no AdamW run to compare with, so there is no dashed line.")
    if count := len(experiment.failed):
        found.append(f"{count} run{'s' * (count != 1)} diverged; listed below, not plotted.")
    if not all(point.reliable for point in experiment.means):
        found.append("hollow points are settings with a diverged seed; they are never best.")
    if any(point.collapsed for point in experiment.means):
        found.append(
            "networks below half of the best accuracy have collapsed: they are not on the Pareto "
            "front and are never best."
        )
    if experiment.superseded:
        found.append(
            f"{experiment.superseded} older results of the same settings and seeds are ignored."
        )
    return found


def _experiment(style: Style) -> dict[str, Any]:
    experiment = style.experiment
    index = {run["id"]: k for k, run in enumerate(experiment.runs)}
    first = initial_run(experiment)
    layer_tables: dict[tuple[Any, ...], int] = {}
    groups = {"means": experiment.means, "runs": experiment.singles}
    return {
        "task": experiment.task,
        "title": experiment.title,
        "about": experiment.describe(),
        "origin": _origin(experiment),
        "notes": notes(experiment),
        "facts": _facts(experiment),
        "hasSeeds": experiment.has_seeds,
        "hasTest": experiment.has_test_accuracy,
        "methods": [
            {
                "name": method,
                "marker": marker_path(style.markers[method]),
                "colour": style.colours[method],
                "colouredByP": method in style.methods_with_p,
            }
            for method in experiment.methods
        ],
        "pRanges": [{"label": one.label, "colour": one.colour} for one in style.p_ranges],
        "points": {
            name: [_point(style, point, index) for point in points]
            for name, points in groups.items()
        },
        "dense": {
            name: None if (dense := best.dense_reference(points)) is None else points.index(dense)
            for name, points in groups.items()
        },
        "runs": [_run(experiment, run, layer_tables) for run in experiment.runs],
        "layerTables": [[list(layer) for layer in table] for table in layer_tables],
        "failed": [
            {
                "name": experiment.name(Point((run,))),
                "seed": run["settings"]["seed"],
                "step": run["curve"][-1]["step"] if run["curve"] else None,
            }
            for run in experiment.failed
        ],
        "initialRun": None if first is None else index[first["id"]],
        "contours": _contours(style),
    }


def _point(style: Style, point: Point, index: Mapping[str, int]) -> dict[str, Any]:
    measures = ("accuracy", "deviation", "test_accuracy", "test_deviation", "sparsity", "tradeoff")
    flags = ("diverged", "reliable", "collapsed", "recommended")
    return {
        "name": style.experiment.name(point),
        "method": style.experiment.methods.index(point.method),
        "pRange": style.p_index(point),
        **{name: getattr(point, name) for name in (*measures, *flags)},
        "runs": [index[run["id"]] for run in point.runs],
    }


def _run(
    experiment: Experiment, run: Record, layer_tables: dict[tuple[Any, ...], int]
) -> dict[str, Any]:
    settings, result = run["settings"], run["result"]
    # Most runs have the same layers, so each list of layers is stored once.
    table = tuple(
        (layer["name"], " x ".join(map(str, layer["shape"])), layer["size"])
        for layer in result["layers"]
    )
    options = {**experiment.shown_options(run), **settings["options"]}
    seconds = run["timing"].get("seconds")
    return {
        "id": run["id"],
        "seed": settings["seed"],
        "settings": [
            ["method", settings["method"]],
            *([name, text(value, 12)] for name, value in options.items()),
            ["lr", text(float(settings["lr"]), 12)],
            ["seed", str(settings["seed"])],
        ],
        **{name: result[name] for name in ("accuracy", "sparsity", "loss", "tradeoff")},
        "test_accuracy": result.get("test_accuracy"),
        "seconds": seconds if isinstance(seconds, int | float) else None,
        "curve": {name: [_rounded(point[name]) for point in run["curve"]] for name in _CURVE},
        "layers": {
            "table": layer_tables.setdefault(table, len(layer_tables)),
            "zeros": [layer["zeros"] for layer in result["layers"]],
        },
    }


def _facts(experiment: Experiment) -> list[dict[str, Any]]:
    """Return the headline numbers, each with the setting that reached it."""
    points = experiment.means
    dense = best.dense_reference(points)
    accurate = best.at_sparsity(points, 0.0)
    reference = dense or accurate
    if accurate is None or reference is None:
        return []
    reference_name = "AdamW" if dense else "the best"
    facts = [
        ("Best AdamW", dense, "accuracy"),
        ("Best accuracy", accurate, "accuracy"),
        (
            f"Sparsest less than {best.ACCURACY_LOSS:g} points below {reference_name}",
            best.sparsest(points, reference.accuracy - best.ACCURACY_LOSS),
            "sparsity",
        ),
        ("Best trade-off", best.best_tradeoff(points), "tradeoff"),
    ]
    found = []
    for title, point, measure in facts:
        if point:
            values = {
                "accuracy": f"{point.accuracy:.2f} %",
                "sparsity": f"{100 * point.sparsity:.2f} %",
                "tradeoff": f"{point.tradeoff:.2f}",
            }
            others = [
                f"{name} {values[name]}" for name in ("accuracy", "sparsity") if name != measure
            ]
            detail = f"{experiment.name(point)}: {', '.join(others)}"
            fact = {"title": title, "value": values[measure], "detail": detail}
            found.append({**fact, "point": points.index(point)})
    return found


def _origin(experiment: Experiment) -> str:
    """Return the training time, the versions and the machines of the runs."""
    runs = (*experiment.runs, *experiment.failed)
    seconds = sum(float(run["timing"].get("seconds") or 0) for run in runs)
    hours = seconds > 5400
    parts = [
        f"{seconds / (3600 if hours else 60):.1f} {'hours' if hours else 'minutes'} of training"
    ]
    for name in ("pdecay", "torch", "device", "processor"):
        known = {str(run["environment"][name]) for run in runs if run["environment"].get(name)}
        if known:
            parts.append(f"{name} {', '.join(sorted(known))}")
    return "; ".join(parts) + ". Static figures and CSV tables are in figures/ and tables/."


def _contours(style: Style) -> dict[str, Any]:
    experiment = style.experiment
    scale = contours.colour_scale(experiment.means)
    return {
        "levels": scale.levels,
        "colours": scale.colours,
        "surfaces": [_surface(style, one) for one in contours.surfaces(experiment, scale)],
    }


def _surface(style: Style, surface: Surface) -> dict[str, Any]:
    means = style.experiment.means
    return {
        "title": surface.title,
        "method": style.experiment.methods.index(surface.example.method),
        "pRange": style.p_index(surface.example),
        "note": surface.note,
        "xTicks": surface.x_ticks,
        "yTicks": surface.y_ticks,
        "bands": [_svg_path(band, closed=True) for band in surface.bands],
        "lines": [
            {"label": f"{line.sparsity:g}", "at": line.label, "path": _svg_path(line.pieces)}
            for line in surface.lines
        ],
        "cells": [
            {
                "x": _rounded(cell.x),
                "y": _rounded(cell.y),
                "lr": f"{cell.lr:g}",
                "lam": f"{cell.lam:g}",
                "point": None if cell.point is None else means.index(cell.point),
                "diverged": cell.diverged,
            }
            for cell in surface.cells
        ],
    }


def _svg_path(pieces: Sequence[np.ndarray], *, closed: bool = False) -> str:
    """Return polygons as the data of one SVG path."""
    return "".join(
        "M" + "L".join(f"{x:.4f} {y:.4f}" for x, y in piece) + "Z" * closed for piece in pieces
    )


def _rounded(value: float | None) -> float | None:
    """Round to six digits, which is more than a plot can show."""
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")
