"""Experiments: groups of comparable run records, and averages over their seeds.

Only runs of the same task, scale and number of steps are compared. Each such group is an
`Experiment`. Runs that differ only in their seed form one `Point`.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pdecay.lab.train import records
from pdecay.lab.train.records import Record, tradeoff

# Options that a setting's name always shows. Other options are shown only where they differ.
_NAMED_OPTIONS = ("p", "lam", "target", "threshold", "depth")
# A network with less than this share of the experiment's best accuracy has collapsed: it is at or
# near the accuracy of a constant prediction.
_COLLAPSED = 0.5
_MAX_KEY = 100  # characters; file systems allow names of 255 bytes


@dataclass(frozen=True, eq=False)
class Point:
    """One setting and its runs, which differ only in their seed.

    Args:
        runs: records of the finished runs; at least one.
        diverged: number of other seeds of this setting that diverged.
        collapsed: whether the accuracy is below half of the experiment's best.
    """

    runs: tuple[Record, ...]
    diverged: int = 0
    collapsed: bool = False

    @property
    def method(self) -> str:
        return str(self.runs[0]["settings"]["method"])

    @property
    def lr(self) -> float:
        return float(self.runs[0]["settings"]["lr"])

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.runs[0]["settings"]["options"])

    @property
    def p(self) -> float | None:
        return number(self.options, "p")

    @cached_property
    def accuracy(self) -> float:
        """Mean validation accuracy over the seeds, in percent."""
        return statistics.fmean(run["result"]["accuracy"] for run in self.runs)

    @cached_property
    def deviation(self) -> float | None:
        """Standard deviation of the validation accuracy over the seeds; None for one seed."""
        return _deviation([run["result"]["accuracy"] for run in self.runs])

    @cached_property
    def test_accuracy(self) -> float | None:
        """Mean test accuracy over the seeds, in percent; None if a run did not measure it."""
        values = self._test_accuracies
        return statistics.fmean(values) if values else None

    @cached_property
    def test_deviation(self) -> float | None:
        """Standard deviation of the test accuracy over the seeds."""
        return _deviation(self._test_accuracies)

    @cached_property
    def sparsity(self) -> float:
        return statistics.fmean(run["result"]["sparsity"] for run in self.runs)

    @property
    def tradeoff(self) -> float:
        return tradeoff(self.accuracy, self.sparsity)

    @property
    def reliable(self) -> bool:
        """Whether no seed diverged. Tables list reliable settings only."""
        return self.diverged == 0

    @property
    def recommended(self) -> bool:
        """Whether the setting may be on the Pareto front or named as a best setting."""
        return self.reliable and not self.collapsed

    @property
    def _test_accuracies(self) -> list[float]:
        values = [run["result"].get("test_accuracy") for run in self.runs]
        return [] if None in values else [float(value) for value in values]


@dataclass(frozen=True)
class Experiment:
    """The runs of one task at one scale with one number of steps.

    Args:
        task, scale, steps: common settings of all runs.
        key: short unique name, used for folders.
        runs: records of the finished runs, in a fixed order.
        failed: records of the runs that diverged.
        superseded: number of older results of the same settings and seed, which are ignored.
    """

    task: str
    scale: str
    steps: int
    key: str
    runs: tuple[Record, ...]
    failed: tuple[Record, ...] = ()
    superseded: int = 0

    @cached_property
    def singles(self) -> tuple[Point, ...]:
        """One point for each run."""
        return tuple(self._point([run]) for run in self.runs)

    @cached_property
    def means(self) -> tuple[Point, ...]:
        """One point for each setting, averaged over its seeds."""
        diverged = _by_setting(self.failed)
        return tuple(
            self._point(runs, len(diverged.get(setting, ())))
            for setting, runs in _by_setting(self.runs).items()
        )

    @property
    def has_seeds(self) -> bool:
        """Whether any setting ran with more than one seed."""
        return len(self.means) < len(self.singles)

    @property
    def has_test_accuracy(self) -> bool:
        """Whether every finished run measured its accuracy on the test split."""
        return bool(self.means) and all(point.test_accuracy is not None for point in self.means)

    @cached_property
    def methods(self) -> tuple[str, ...]:
        names = (record["settings"]["method"] for record in (*self.runs, *self.failed))
        return tuple(sorted(set(names), key=_method_order))

    @cached_property
    def p_values(self) -> tuple[float, ...]:
        """All values of p in ascending order."""
        return tuple(sorted({point.p for point in self.means if point.p is not None}))

    @cached_property
    def varying(self) -> Mapping[str, frozenset[str]]:
        """Options that differ between the runs of each method."""
        seen: dict[str, dict[str, set[str]]] = {}
        for record in (*self.runs, *self.failed):
            options = seen.setdefault(record["settings"]["method"], {})
            for name, value in record["settings"]["options"].items():
                options.setdefault(name, set()).add(json.dumps(value, sort_keys=True))
        return {
            method: frozenset(name for name, values in options.items() if len(values) > 1)
            for method, options in seen.items()
        }

    def shown_options(self, record: Record, *, without: str = "") -> dict[str, Any]:
        """Return the options that distinguish a run from other runs of its method."""
        options = record["settings"]["options"]
        varying = self.varying[record["settings"]["method"]]
        names = [*(name for name in _NAMED_OPTIONS if name in options), *options]
        shown = {name: options[name] for name in names if name in (*_NAMED_OPTIONS, *varying)}
        shown.pop(without, None)
        return shown

    def name(self, point: Point) -> str:
        """Return a one-line name of a setting."""
        options = {**self.shown_options(point.runs[0]), "lr": point.lr}
        return joined(point.method, options)

    @property
    def title(self) -> str:
        return f"{self.task}, scale {self.scale}, {self.steps:,} steps"

    def describe(self) -> str:
        """Return the title and the number of runs and settings."""
        runs = len(self.runs) + len(self.failed)
        line = f"{self.title}: {runs} run{'s' * (runs != 1)}"
        settings = len(self.means)
        return f"{line}, {settings} setting{'s' * (settings != 1)}" if self.has_seeds else line

    @cached_property
    def _best_accuracy(self) -> float:
        return float(max(run["result"]["accuracy"] for run in self.runs))

    def _point(self, runs: Sequence[Record], diverged: int = 0) -> Point:
        mean = statistics.fmean(run["result"]["accuracy"] for run in runs)
        return Point(tuple(runs), diverged, collapsed=mean < _COLLAPSED * self._best_accuracy)


def load(paths: Iterable[str | Path]) -> list[Experiment]:
    """Read records from files and folders, and group them.

    Raises:
        RecordError: a file is missing or invalid, or there are no records.
    """
    paths = list(paths)
    found = experiments(records.read(paths))
    if not found:
        raise records.RecordError(
            f"no records in {', '.join(map(str, paths))}: run pdecay train or pdecay sweep first"
        )
    return found


def experiments(runs: Sequence[Record]) -> list[Experiment]:
    """Group records by task, scale and number of steps."""
    groups: dict[tuple[str, str, int], dict[str, list[Record]]] = {}
    for record in runs:
        settings = record["settings"]
        group = groups.setdefault((settings["task"], settings["scale"], settings["steps"]), {})
        group.setdefault(record["id"], []).append(record)
    found: list[Experiment] = []
    for (task, scale, steps), by_id in sorted(groups.items()):
        latest = sorted((max(same, key=_finish_time) for same in by_id.values()), key=_order)
        found.append(
            Experiment(
                task,
                scale,
                steps,
                _unique_key(f"{task}-{scale}-{steps}", {other.key for other in found}),
                runs=tuple(record for record in latest if _is_finished(record)),
                failed=tuple(record for record in latest if not _is_finished(record)),
                superseded=sum(len(same) - 1 for same in by_id.values()),
            )
        )
    return found


def number(options: Mapping[str, Any], name: str) -> float | None:
    """Return an option's value if it is a finite number, else None."""
    value = options.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def text(value: object, digits: int = 3) -> str:
    """Format an option's value."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return value if isinstance(value, str) else json.dumps(value)


def joined(method: str, options: Mapping[str, Any]) -> str:
    """Format a method and its options as one line."""
    return ", ".join([method, *(f"{name} = {text(value)}" for name, value in options.items())])


def canonical(options: Mapping[str, Any], *, without: str = "") -> str:
    """Return the same text for equal options, whatever their order."""
    return json.dumps({k: v for k, v in options.items() if k != without}, sort_keys=True)


def _by_setting(runs: Iterable[Record]) -> dict[tuple[str, float, str], list[Record]]:
    groups: dict[tuple[str, float, str], list[Record]] = {}
    for record in runs:
        settings = record["settings"]
        setting = (settings["method"], float(settings["lr"]), canonical(settings["options"]))
        groups.setdefault(setting, []).append(record)
    return groups


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(map(float, values)) if len(values) > 1 else None


def _is_finished(record: Record) -> bool:
    result = record["result"]
    measured = result["accuracy"] is not None and result["sparsity"] is not None
    return record["status"] == "ok" and measured


def _finish_time(record: Record) -> str:
    return str(record["timing"].get("finished", ""))


def _order(record: Record) -> tuple[Any, ...]:
    settings = record["settings"]
    numbers = (number(settings["options"], "p"), number(settings["options"], "lam"))
    return (
        _method_order(settings["method"]),
        *(math.inf if value is None else value for value in numbers),
        settings["lr"],
        canonical(settings["options"]),
        settings["seed"],
    )


def _method_order(method: str) -> tuple[int, str]:
    """Order the dense reference first, then the p-norm methods, then the others by name."""
    first = ("adamw", "padam", "elastic", "target")
    return (first.index(method) if method in first else len(first), method)


def _unique_key(wanted: str, taken: set[str]) -> str:
    """Return a valid folder name that is not taken yet."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", wanted)[-_MAX_KEY:].strip("-")
    names = (plain, *(f"{plain}-{k}" for k in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)
