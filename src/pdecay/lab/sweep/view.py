"""Progress of a sweep: a bar for each worker and one for all runs; without a terminal, lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """Return a run's settings in a few words.

    Example:
        >>> label({"method": "padam", "options": {"p": 0.8, "lam": 0.01}, "lr": 0.003, "seed": 0})
        'padam p=0.8 lam=0.01 lr=0.003 seed=0'
    """
    named = {**settings["options"], "lr": settings["lr"], "seed": settings["seed"]}
    shown = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in named.items()}
    return " ".join([settings["method"], *(f"{name}={text}" for name, text in shown.items())])


class View(Progress):
    """The progress of a sweep on a console, as a context manager.

    Args:
        console: the console.
        workers: the number of workers, each with a bar.
        total: the number of runs.
    """

    def __init__(self, console: Console, workers: int, total: int) -> None:
        wide = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        super().__init__(
            TextColumn("{task.description}", markup=False, table_column=wide),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._total = total
        self._bars = [self.add_task("starting", visible=False) for _ in range(workers)]
        self._all = self.add_task("all runs", total=total)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(Text(text), soft_wrap=True)

    def begin(self, worker: int, settings: Mapping[str, Any], step: int) -> None:
        """Show a run that starts or resumes."""
        self.reset(
            self._bars[worker],
            description=label(settings),
            total=settings["steps"],
            completed=step,
            visible=True,
        )

    def show_step(self, worker: int, step: int) -> None:
        """Show a run's progress."""
        self.update(self._bars[worker], completed=step)

    def idle(self, worker: int) -> None:
        """Hide the bar of a worker without a run."""
        self.update(self._bars[worker], visible=False)

    def show_finished(self, count: int) -> None:
        """Show the number of finished runs, on all machines."""
        self.update(self._all, completed=count)

    def trained(self, record: Record, finished: int) -> None:
        """Print the result of a run."""
        result, text = record["result"], "diverged"
        if record["status"] == "ok":
            text = f"accuracy {result['accuracy']:.2f} %, zeros {100 * result['sparsity']:.2f} %"
        count = f"{finished:{len(str(self._total))}}/{self._total}"
        seconds = record["timing"]["seconds"]
        self.say(f"{count}  {label(record['settings'])}: {text} ({seconds:.0f} s)")
