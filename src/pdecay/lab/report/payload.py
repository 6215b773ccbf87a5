"""What the page is given: every number that it shows, as plain data ready for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pdecay.lab.report import best, contours
from pdecay.lab.report.contours import Surface
from pdecay.lab.report.study import Point, Study, text
from pdecay.lab.report.style import Style, marker_path
from pdecay.lab.train.records import Record

_CURVE = ("step", "accuracy", "loss", "train_loss", "sparsity")


def payload(styles: Sequence[Style]) -> dict[str, Any]:
    """All studies, and what they share."""
    return {
        "levels": best.LEVELS,
        "rounding": best.ROUNDING,
        "reach": best.REACH,
        "dot": marker_path("o"),
        "studies": [_study(style) for style in styles],
    }


def about(study: Study) -> str:
    """A study in one line."""
    runs = len(study.runs) + len(study.failed)
    line = (
        f"{study.task}, scale {study.scale}, {study.steps:,} steps: {runs} run{'s' * (runs != 1)}"
    )
    return f"{line}, {len(study.means)} settings" if study.has_seeds else line


def chosen(study: Study) -> Record | None:
    """The run that is shown in detail at first: the best trade-off, else any."""
    point = best.balanced(study.means) or next(iter(study.means), None)
    return point.runs[0] if point else None


def notes(study: Study) -> list[str]:
    """What a reader must know to read the plots rightly."""
    found = []
    if not study.runs:
        found.append("every run diverged, so there is nothing to plot.")
    elif best.adamw(study.means) is None:
        found.append("there is no AdamW run to compare with, so no dashed line.")
    if study.failed:
        count = len(study.failed)
        found.append(f"{count} run{'s' * (count != 1)} diverged; listed below, and in no plot.")
    if not all(point.reliable for point in study.means):
        found.append(
            "hollow points are settings of which some seed diverged; they count for no best."
        )
    if study.superseded:
        found.append(
            f"{study.superseded} older results of the same settings and seeds were left out."
        )
    return found


def _study(style: Style) -> dict[str, Any]:
    study = style.study
    place = {run["id"]: k for k, run in enumerate(study.runs)}
    first = chosen(study)
    tables: dict[tuple[Any, ...], int] = {}
    by_norm = {point.method for point in study.means if point.p is not None}
    groups = {"means": study.means, "runs": study.singles}
    return {
        "task": study.task,
        "title": f"{study.task}, {study.scale}, {study.steps:,} steps",
        "about": about(study),
        "origin": _origin(study),
        "notes": notes(study),
        "facts": _facts(study),
        "hasSeeds": study.has_seeds,
        "methods": [
            {
                "name": method,
                "marker": marker_path(style.markers[method]),
                "colour": style.colours[method],
                "byNorm": method in by_norm,
            }
            for method in study.methods
        ],
        "norms": [{"label": norm.label, "colour": norm.colour} for norm in style.norms],
        "points": {
            name: [_point(style, point, place) for point in points]
            for name, points in groups.items()
        },
        "adamw": {
            name: next((k for k, point in enumerate(points) if point is dense), None)
            for name, points in groups.items()
            for dense in [best.adamw(points)]
        },
        "runs": [_run(study, run, tables) for run in study.runs],
        "layerTables": [[list(layer) for layer in table] for table in tables],
        "failed": [_failed(study, run) for run in study.failed],
        "chosen": None if first is None else place[first["id"]],
        "contours": _contours(style),
    }


def _point(style: Style, point: Point, place: Mapping[str, int]) -> dict[str, Any]:
    return {
        "name": style.study.name(point),
        "method": style.study.methods.index(point.method),
        "norm": style.norm(point),
        "accuracy": point.accuracy,
        "spread": point.spread,
        "sparsity": point.sparsity,
        "tradeoff": point.tradeoff,
        "diverged": point.diverged,
        "reliable": point.reliable,
        "runs": [place[run["id"]] for run in point.runs],
    }


def _run(study: Study, run: Record, tables: dict[tuple[Any, ...], int]) -> dict[str, Any]:
    settings, result = run["settings"], run["result"]
    # Most runs have the same layers: their names are kept once.
    table = tuple(
        (layer["name"], " x ".join(map(str, layer["shape"])), layer["size"])
        for layer in result["layers"]
    )
    options = {**study.telling(run), **settings["options"]}
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
        "seconds": seconds if isinstance(seconds, int | float) else None,
        "curve": {name: [_short(point[name]) for point in run["curve"]] for name in _CURVE},
        "layers": {
            "table": tables.setdefault(table, len(tables)),
            "zeros": [layer["zeros"] for layer in result["layers"]],
        },
    }


def _failed(study: Study, run: Record) -> dict[str, Any]:
    return {
        "name": study.name(Point((run,))),
        "seed": run["settings"]["seed"],
        "step": run["curve"][-1]["step"] if run["curve"] else None,
    }


def _facts(study: Study) -> list[dict[str, Any]]:
    """The numbers to take home, each with the setting that gave it."""
    points = study.means
    dense = best.adamw(points)
    accurate = best.above(points, 0.0)
    reference = dense or accurate
    if accurate is None or reference is None:
        return []
    close = best.sparsest(points, reference.accuracy - best.DROP)
    balanced = best.balanced(points)
    facts = [
        ("Best AdamW", dense, "{accuracy} %", "sparsity {sparsity} %"),
        ("Best accuracy", accurate, "{accuracy} %", "sparsity {sparsity} %"),
        (
            f"Sparsest less than {best.DROP:g} points below {'AdamW' if dense else 'the best'}",
            close,
            "{sparsity} %",
            "accuracy {accuracy} %",
        ),
        ("Best trade-off", balanced, "{tradeoff}", "accuracy {accuracy} %, sparsity {sparsity} %"),
    ]
    return [
        {
            "what": what,
            "value": value.format_map(_measures(point)),
            "how": f"{study.name(point)}: {how.format_map(_measures(point))}",
            "point": points.index(point),
        }
        for what, point, value, how in facts
        if point
    ]


def _measures(point: Point) -> dict[str, str]:
    return {
        "accuracy": f"{point.accuracy:.2f}",
        "sparsity": f"{100 * point.sparsity:.2f}",
        "tradeoff": f"{point.tradeoff:.2f}",
    }


def _origin(study: Study) -> str:
    """Where the runs come from."""
    records = (*study.runs, *study.failed)
    seconds = sum(float(record["timing"].get("seconds") or 0) for record in records)
    parts = [
        f"{seconds / 3600:.1f} hours of training"
        if seconds > 5400
        else f"{seconds / 60:.1f} minutes of training"
    ]
    for name in ("pdecay", "torch", "device", "processor"):
        known = sorted(
            {
                str(record["environment"][name])
                for record in records
                if record["environment"].get(name)
            }
        )
        if known:
            parts.append(f"{name} {', '.join(known)}")
    return "; ".join(parts) + ". Pictures and tables lie beside this page, in figures/ and tables/."


def _contours(style: Style) -> dict[str, Any]:
    study = style.study
    scale = contours.scale(study.means)
    return {
        "levels": scale.levels,
        "colours": scale.colours,
        "surfaces": [_surface(style, surface) for surface in contours.surfaces(study, scale)],
    }


def _surface(style: Style, surface: Surface) -> dict[str, Any]:
    means = style.study.means
    return {
        "title": surface.title,
        "method": style.study.methods.index(surface.of.method),
        "norm": style.norm(surface.of),
        "note": surface.note,
        "xTicks": surface.x_ticks,
        "yTicks": surface.y_ticks,
        "bands": [_path(band, closed=True) for band in surface.bands],
        "lines": [
            {"label": f"{line.sparsity:g}", "at": line.label, "path": _path(line.pieces)}
            for line in surface.lines
            if line.label
        ],
        "cells": [
            {
                "x": _short(cell.x),
                "y": _short(cell.y),
                "lr": f"{cell.lr:g}",
                "lam": f"{cell.lam:g}",
                "point": None if cell.point is None else means.index(cell.point),
                "diverged": cell.diverged,
            }
            for cell in surface.cells
        ],
    }


def _path(pieces: Sequence[np.ndarray], *, closed: bool = False) -> str:
    """Polygons as the data of one SVG path."""
    return "".join(
        "M" + "L".join(f"{x:.4f} {y:.4f}" for x, y in piece) + "Z" * closed for piece in pieces
    )


def _short(value: float | None) -> float | None:
    """Six digits are more than a plot can show."""
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")
