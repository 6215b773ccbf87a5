"""The tables of a study, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pdecay.lab.report import best
from pdecay.lab.report.study import Point, Study
from pdecay.lab.report.style import Norm, Style
from pdecay.lab.train.records import Record

Rows = Sequence[Sequence[object]]


@dataclass(frozen=True)
class Row:
    """A row of the paper's table: a method, over all its p or for one, and its best settings.

    Args:
        method: its name.
        norm: the p, or None for the best of all.
        cells: for each of `best.LEVELS` the most accurate setting that is so sparse, if any.
    """

    method: str
    norm: Norm | None
    cells: tuple[Point | None, ...]


def above_sparsity(style: Style) -> list[Row]:
    """Accuracy above a given sparsity, for each method, and for each p of those that have many."""
    rows = []
    for method in style.study.methods:
        points = [point for point in style.study.means if point.method == method]
        rows.append(_row(method, None, points))
        norms = sorted({place for point in points if (place := style.norm(point)) is not None})
        if len(norms) > 1:
            for place in norms:
                of_norm = [point for point in points if style.norm(point) == place]
                rows.append(_row(method, style.norms[place], of_norm))
    return rows


def files(style: Style) -> dict[str, str]:
    """All tables, by file name."""
    study = style.study
    tables: dict[str, Rows] = {
        "above_sparsity.csv": _above_sparsity(style),
        "front.csv": _settings(study, best.front(study.means)),
        "settings.csv": _settings(study, study.means),
        "runs.csv": _runs([*study.runs, *study.failed]),
        "layers.csv": _layers(study.runs),
    }
    return {name: _csv(rows) for name, rows in tables.items()}


def _row(method: str, norm: Norm | None, points: Sequence[Point]) -> Row:
    return Row(method, norm, tuple(best.above(points, level) for level in best.LEVELS))


def _above_sparsity(style: Style) -> Rows:
    head: list[object] = ["method", "p"]
    for level in best.LEVELS:
        head += [f"{name}_{100 * level:g}" for name in ("accuracy", "deviation", "setting")]
    rows: list[list[object]] = [head]
    for row in above_sparsity(style):
        line: list[object] = [row.method, row.norm.label if row.norm else ""]
        for point in row.cells:
            line += [point.accuracy, point.spread, style.study.name(point)] if point else [""] * 3
        rows.append(line)
    return rows


def _settings(study: Study, points: Iterable[Point]) -> Rows:
    points = list(points)
    names = _option_names(run for point in points for run in point.runs)
    head = ["accuracy", "deviation", "sparsity", "tradeoff", "seeds", "diverged"]
    return [
        ["method", "lr", *names, *head],
        *(
            [
                point.method,
                point.lr,
                *(point.options.get(name, "") for name in names),
                point.accuracy,
                point.spread,
                point.sparsity,
                point.tradeoff,
                len(point.runs),
                point.diverged,
            ]
            for point in points
        ),
    ]


def _runs(records: Sequence[Record]) -> Rows:
    names = _option_names(records)
    measures = ("accuracy", "loss", "sparsity", "tradeoff", "total_sparsity", "weights")
    return [
        ["id", "status", "method", "seed", "lr", *names, *measures, "seconds"],
        *(
            [
                record["id"],
                record["status"],
                *(record["settings"][name] for name in ("method", "seed", "lr")),
                *(record["settings"]["options"].get(name, "") for name in names),
                *(record["result"][name] for name in measures),
                record["timing"].get("seconds", ""),
            ]
            for record in records
        ),
    ]


def _layers(records: Iterable[Record]) -> Rows:
    return [
        ["id", "layer", "shape", "size", "zeros"],
        *(
            [record["id"], layer["name"], " x ".join(map(str, layer["shape"])), *_counts(layer)]
            for record in records
            for layer in record["result"]["layers"]
        ),
    ]


def _counts(layer: dict[str, Any]) -> list[int]:
    return [layer["size"], layer["zeros"]]


def _option_names(records: Iterable[Record]) -> list[str]:
    names = {name: None for record in records for name in record["settings"]["options"]}
    first = [name for name in ("p", "lam", "target") if name in names]
    return [*first, *(name for name in names if name not in first)]


def _csv(rows: Rows) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()
