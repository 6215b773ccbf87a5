"""What a sweep shows: a line for each worker and one for all; without a terminal, one for each run.

Our own text is ASCII, so that no encoding can fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from pdecay.lab.train.records import Record


def label(settings: Mapping[str, Any]) -> str:
    """A run's settings in a few words.

    Example:
        >>> label({"method": "padam", "options": {"p": 0.8, "lam": 0.01}, "lr": 0.003, "seed": 0})
        'padam p=0.8 lam=0.01 lr=0.003 seed=0'
    """
    named = {**settings["options"], "lr": settings["lr"], "seed": settings["seed"]}
    return " ".join([settings["method"], *(f"{name}={_short(v)}" for name, v in named.items())])


def outcome(record: Record) -> str:
    """A run's result in a few words."""
    if record["status"] != "ok":
        return "diverged"
    result = record["result"]
    return f"accuracy {result['accuracy']:.2f} %, zeros {100 * result['sparsity']:.2f} %"


class View:
    """The sweep on a console.

    Args:
        console: where.
        workers: how many lines to keep.
        total, finished: how many runs there are, and how many of them are over.
    """

    def __init__(self, console: Console, workers: int, total: int, finished: int) -> None:
        self._console, self._total = console, total
        self._moving = console.is_terminal
        self._bars = Progress(
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            expand=True,
            disable=not self._moving,
        )
        self._lines = [self._bars.add_task("starts", total=None) for _ in range(workers)]
        self._all = self._bars.add_task("all runs", total=total, completed=finished)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._bars.console.print(Text(text), soft_wrap=True)

    def waits(self, worker: int) -> None:
        """A worker has nothing to run."""
        self._bars.update(self._lines[worker], visible=False)

    def begins(self, worker: int, settings: Mapping[str, Any], step: int) -> None:
        """A worker starts a run, or goes on with one."""
        self._bars.reset(
            self._lines[worker],
            description=label(settings),
            total=settings["steps"],
            completed=step,
            visible=True,
        )

    def steps(self, worker: int, step: int) -> None:
        """A worker's run has come so far."""
        self._bars.update(self._lines[worker], completed=step)

    def finished(self, count: int) -> None:
        """So many runs are over, here and elsewhere."""
        self._bars.update(self._all, completed=count)

    def ran(self, record: Record, finished: int) -> None:
        """A run is over here."""
        self.finished(finished)
        width = len(str(self._total))
        seconds = record["timing"]["seconds"]
        self.say(
            f"{finished:{width}}/{self._total}  {label(record['settings'])}: {outcome(record)} "
            f"({seconds:.0f} s)"
        )


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
