"""The CSV tables of an experiment."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from pdecay.lab.report import best
from pdecay.lab.report.experiments import Point
from pdecay.lab.report.style import Style
from pdecay.lab.train.records import Record

Rows = Iterable[Iterable[object]]

_POINT_MEASURES = ("accuracy", "deviation", "test_accuracy", "test_deviation", "sparsity",
                   "tradeoff")  # fmt: skip
_RUN_MEASURES = ("accuracy", "test_accuracy", "loss", "sparsity", "tradeoff", "total_sparsity",
                 "weights")  # fmt: skip


def files(style: Style) -> dict[str, str]:
    """Return the text of all tables by file name."""
    experiment = style.experiment
    tables: dict[str, Rows] = {
        "above_sparsity.csv": _above_sparsity(style),
        "front.csv": _settings(best.pareto_front(experiment.means)),
        "settings.csv": _settings(experiment.means),
        "runs.csv": _runs([*experiment.runs, *experiment.failed]),
        "layers.csv": _layers(experiment.runs),
    }
    return {name: _csv(rows) for name, rows in tables.items()}


def _above_sparsity(style: Style) -> Rows:
    """Return the most accurate setting at each level: a row per method, and per p of a method."""
    columns = ("accuracy", "deviation", "test_accuracy", "setting")
    yield [
        "method",
        "p",
        "settings",
        *(f"{name}_{100 * level:g}" for level in best.LEVELS for name in columns),
    ]
    for method in style.experiment.methods:
        points = [point for point in style.experiment.means if point.method == method]
        yield _levels(style, method, "", points)
        used = sorted({index for point in points if (index := style.p_index(point)) is not None})
        for index in used if len(used) > 1 else ():
            with_p = [point for point in points if style.p_index(point) == index]
            yield _levels(style, method, style.p_ranges[index].label, with_p)


def _levels(style: Style, method: str, p: str, points: Sequence[Point]) -> list[object]:
    row: list[object] = [method, p, len(points)]
    for level in best.LEVELS:
        point = best.at_sparsity(points, level)
        if point is None:
            row += [""] * 4
        else:
            name = style.experiment.name(point) + ", collapsed" * point.collapsed
            row += [point.accuracy, point.deviation, point.test_accuracy, name]
    return row


def _settings(points: Sequence[Point]) -> Rows:
    names = _option_names(run for point in points for run in point.runs)
    yield ["method", "lr", *names, *_POINT_MEASURES, "seeds", "diverged", "collapsed"]
    for point in points:
        yield [
            point.method,
            point.lr,
            *(point.options.get(name, "") for name in names),
            *(getattr(point, name) for name in _POINT_MEASURES),
            len(point.runs),
            point.diverged,
            point.collapsed,
        ]


def _runs(records: Sequence[Record]) -> Rows:
    names = _option_names(records)
    yield ["id", "status", "method", "seed", "lr", *names, *_RUN_MEASURES, "seconds"]
    for record in records:
        settings = record["settings"]
        yield [
            record["id"],
            record["status"],
            *(settings[name] for name in ("method", "seed", "lr")),
            *(settings["options"].get(name, "") for name in names),
            *(record["result"].get(name) for name in _RUN_MEASURES),
            record["timing"].get("seconds", ""),
        ]


def _layers(records: Iterable[Record]) -> Rows:
    yield ["id", "layer", "shape", "size", "zeros"]
    for record in records:
        for layer in record["result"]["layers"]:
            shape = " x ".join(map(str, layer["shape"]))
            yield [record["id"], layer["name"], shape, layer["size"], layer["zeros"]]


def _option_names(records: Iterable[Record]) -> list[str]:
    names = {name: None for record in records for name in record["settings"]["options"]}
    first = [name for name in ("p", "lam", "target") if name in names]
    return [*first, *(name for name in names if name not in first)]


def _csv(rows: Rows) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([_cell(value) for value in row] for row in rows)
    return file.getvalue()


def _cell(value: object) -> object:
    """Return a cell that no spreadsheet evaluates: names in records are untrusted.

    Spreadsheets take text that starts with one of these characters for a formula. An apostrophe
    marks it as text. A carriage return would start another row: before Python 3.13, the csv module
    does not quote it.
    """
    if not isinstance(value, str):
        return value
    is_formula = value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return ("'" * is_formula + value).replace("\r", " ")
