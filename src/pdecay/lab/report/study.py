"""Which runs belong together, and what they give on average.

Runs of different tasks, scales or lengths are never compared: each such group is a `Study`. Runs
that differ by their seed alone are one `Point`.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pdecay.lab.train.records import Record, tradeoff

# What names a setting even where it is the same in all runs; other options only where they differ.
_TELLING = ("p", "lam", "target", "threshold", "depth")


@dataclass(frozen=True, eq=False)
class Point:
    """A setting and its runs: one, or several that differ by their seed.

    Args:
        runs: the records that came to an end; at least one.
        diverged: how many other seeds of the setting diverged.
    """

    runs: tuple[Record, ...]
    diverged: int = 0

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
        """In percent, the mean over the seeds."""
        return statistics.fmean(run["result"]["accuracy"] for run in self.runs)

    @cached_property
    def spread(self) -> float | None:
        """The standard deviation of the accuracy over the seeds; None for a single one."""
        values = [float(run["result"]["accuracy"]) for run in self.runs]
        return statistics.stdev(values) if len(values) > 1 else None

    @cached_property
    def sparsity(self) -> float:
        return statistics.fmean(run["result"]["sparsity"] for run in self.runs)

    @property
    def tradeoff(self) -> float:
        return tradeoff(self.accuracy, self.sparsity)

    @property
    def reliable(self) -> bool:
        """Whether no seed diverged: only such settings are recommended."""
        return self.diverged == 0


@dataclass(frozen=True)
class Study:
    """The runs of one task, at one scale, of one length.

    Args:
        task, scale, steps: what they share.
        key: a short name for files, unlike that of any other study.
        runs: the records that came to an end, in a fixed order.
        failed: those that diverged.
        superseded: how many runs were left out, as the same settings ran again later.
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
        """Each run on its own."""
        return tuple(Point((run,)) for run in self.runs)

    @cached_property
    def means(self) -> tuple[Point, ...]:
        """Each setting, over its seeds."""
        diverged = _by_setting(self.failed)
        return tuple(
            Point(tuple(runs), len(diverged.get(setting, ())))
            for setting, runs in _by_setting(self.runs).items()
        )

    @property
    def has_seeds(self) -> bool:
        """Whether some setting ran for more than one seed."""
        return len(self.means) < len(self.singles)

    @cached_property
    def methods(self) -> tuple[str, ...]:
        names = (record["settings"]["method"] for record in (*self.runs, *self.failed))
        return tuple(sorted(set(names), key=_method_order))

    @cached_property
    def norms(self) -> tuple[float, ...]:
        """All values of p, from small to large."""
        found = (number(record["settings"]["options"], "p") for record in self.runs)
        return tuple(sorted({p for p in found if p is not None}))

    @cached_property
    def varying(self) -> Mapping[str, frozenset[str]]:
        """For each method, the options that differ between its runs."""
        seen: dict[str, dict[str, set[str]]] = {}
        for record in (*self.runs, *self.failed):
            options = seen.setdefault(record["settings"]["method"], {})
            for name, value in record["settings"]["options"].items():
                options.setdefault(name, set()).add(json.dumps(value, sort_keys=True))
        return {
            method: frozenset(name for name, values in options.items() if len(values) > 1)
            for method, options in seen.items()
        }

    def telling(self, record: Record, *, without: Iterable[str] = ()) -> dict[str, Any]:
        """The options of a run that tell it from others of its method."""
        settings = record["settings"]
        shown = {*_TELLING, *self.varying[settings["method"]]} - set(without)
        first = [name for name in _TELLING if name in settings["options"]]
        names = [*first, *(name for name in settings["options"] if name not in first)]
        return {name: settings["options"][name] for name in names if name in shown}

    def name(self, point: Point) -> str:
        """A setting in one line."""
        options = {**self.telling(point.runs[0]), "lr": point.lr}
        parts = [f"{name} = {text(value)}" for name, value in options.items()]
        return ", ".join([point.method, *parts])


def studies(records: Sequence[Record]) -> list[Study]:
    """The records by task, scale and length."""
    groups: dict[tuple[str, str, int], dict[str, list[Record]]] = {}
    for record in records:
        settings = record["settings"]
        group = groups.setdefault((settings["task"], settings["scale"], settings["steps"]), {})
        group.setdefault(record["id"], []).append(record)
    found: list[Study] = []
    for (task, scale, steps), by_id in sorted(groups.items()):
        latest = sorted((max(same, key=_finished) for same in by_id.values()), key=_order)
        found.append(
            Study(
                task,
                scale,
                steps,
                _key(f"{task}-{scale}-{steps}", {study.key for study in found}),
                runs=tuple(record for record in latest if _came_to_an_end(record)),
                failed=tuple(record for record in latest if not _came_to_an_end(record)),
                superseded=sum(len(same) - 1 for same in by_id.values()),
            )
        )
    return found


def number(options: Mapping[str, Any], name: str) -> float | None:
    """An option, if it is there and a finite number."""
    value = options.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def text(value: object, digits: int = 4) -> str:
    """A setting's value as people write it."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return value if isinstance(value, str) else json.dumps(value)


def canonical(options: Mapping[str, Any], *, without: str = "") -> str:
    """Options as text that is equal for equal options."""
    return json.dumps({k: v for k, v in options.items() if k != without}, sort_keys=True)


def _by_setting(records: Iterable[Record]) -> dict[tuple[str, float, str], list[Record]]:
    groups: dict[tuple[str, float, str], list[Record]] = {}
    for record in records:
        settings = record["settings"]
        setting = (settings["method"], float(settings["lr"]), canonical(settings["options"]))
        groups.setdefault(setting, []).append(record)
    return groups


def _came_to_an_end(record: Record) -> bool:
    result = record["result"]
    known = result["accuracy"] is not None and result["sparsity"] is not None
    return record["status"] == "ok" and known


def _finished(record: Record) -> str:
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
    """What is compared with first, then our own, then the others by name."""
    first = ("adamw", "padam", "elastic", "target")
    return (first.index(method) if method in first else len(first), method)


def _key(wanted: str, taken: set[str]) -> str:
    """A file name from whatever a task is called."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", wanted).strip("-")
    names = (plain, *(f"{plain}-{k}" for k in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)
