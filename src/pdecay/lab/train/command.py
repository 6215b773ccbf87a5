"""``pdecay train``: train one run, show its progress and its result."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
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

from pdecay._utils.signals import stop_requests
from pdecay.lab.tables import new_table, say
from pdecay.lab.train import training
from pdecay.lab.train.records import Record
from pdecay.lab.train.training import CHECKPOINT, RECORD, WEIGHTS, Settings, StoppedError, train

_SMOOTHING = 0.95  # of the displayed loss, because the loss of single batches is noisy


def train_and_show(
    settings: Settings, out: Path, console: Console, *, as_json: bool = False, **options: Any
) -> int:
    """Train a run, show it and return the exit code of the command.

    Args:
        settings: the run.
        out: its folder.
        console: the console to print to.
        as_json: also write the record to standard output, as one line of JSON.
        options: further arguments of :func:`pdecay.lab.train.training.train`.
    """
    finished_before = (out / RECORD).exists()

    def notify() -> None:
        say(console, "stopping after this step with a checkpoint; repeat to stop at once")

    try:
        progress = _Progress(console)
        with stop_requests(notify) as stop, progress.bar:
            record = train(settings, out, progress=progress, stop=stop, **options)
    except StoppedError as error:
        say(console, f"{error}; to continue, run the same command again.")
        _print_files(console, out, {"checkpoint": CHECKPOINT})
        return 130
    if finished_before:
        _print_settings(console, settings)
        say(console, "This run was already finished. Its result:")
    _print_result(console, record)
    _print_files(console, out, {"record": RECORD, "weights": WEIGHTS})
    if as_json:
        sys.stdout.write(f"{json.dumps(record)}\n")
    return 0


class _Progress(training.Progress):
    """A bar on a terminal; elsewhere a line for each evaluation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._loss: float | None = None
        self.bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def begin(self, settings: Settings, step: int) -> None:
        _print_settings(self._console, settings, step)
        self._steps = settings.steps
        self._evaluation = ""
        self._task = self.bar.add_task("", total=self._steps, completed=step, text="")

    def step(self, step: int, loss: float) -> None:
        old = loss if self._loss is None else self._loss
        self._loss = _SMOOTHING * old + (1 - _SMOOTHING) * loss
        text = f"loss {self._loss:.3f}  {self._evaluation}"
        self.bar.update(self._task, completed=step, text=text)

    def point(self, point: Mapping[str, Any]) -> None:
        accuracy, zeros = _number(point["accuracy"], ".2f"), _number(point["sparsity"], ".2%")
        self._evaluation = f"accuracy {accuracy} %  zeros {zeros}"
        if not self._console.is_terminal:
            step = f"step {point['step']:>{len(str(self._steps))}}/{self._steps}"
            loss = _number(point["train_loss"], ".4f")
            say(self._console, f"{step}  loss {loss}  {self._evaluation}")


def _print_result(console: Console, record: Record) -> None:
    result = record["result"]
    table = new_table(
        "Zeros of each decayed layer", "<layer", "shape", "weights", "left", "zeros %"
    )
    for layer in result["layers"]:
        size, zeros = layer["size"], layer["zeros"]
        shape = "x".join(map(str, layer["shape"]))
        table.add_row(
            layer["name"], shape, f"{size:,}", f"{size - zeros:,}", f"{100 * zeros / size:.2f}"
        )
    left = sum(layer["size"] - layer["zeros"] for layer in result["layers"])
    table.add_section()
    zeros = _number(100 * result["sparsity"], ".2f")
    table.add_row("all", "", f"{result['weights']:,}", f"{left:,}", zeros)
    console.print(table)
    if record["status"] == "diverged":
        steps = record["curve"][-1]["step"]
        say(console, f"Diverged: the loss is not finite after {steps:,} steps. Try a lower lr.")
    else:
        test = result.get("test_accuracy")  # older records have none
        say(
            console,
            f"validation accuracy {result['accuracy']:.2f} %, loss {result['loss']:.4f}, "
            f"test accuracy {_number(test, '.2f')} %, sparsity {result['sparsity']:.2%}; "
            f"trade-off (validation accuracy % + sparsity) {result['tradeoff']:.2f}",
        )
    timing = record["timing"]
    times = timing.get("resumed")
    resumed = f", resumed {times} time{'s' * (times > 1)}" if times else ""
    say(console, f"{_number(timing.get('seconds'), '.0f')} s of training{resumed}")


def _print_files(console: Console, out: Path, names: Mapping[str, str]) -> None:
    for what, name in names.items():
        say(console, f"{what:<10} {out / name}")


def _print_settings(console: Console, settings: Settings, step: int = 0) -> None:
    recorded = settings.to_dict()["options"]
    options = ", ".join(f"{name}={value}" for name, value in recorded.items())
    say(
        console,
        f"{settings.task} ({settings.scale}) with {settings.method}({options}): "
        f"lr {settings.lr:g}, {settings.steps:,} steps, seed {settings.seed}",
    )
    if step:
        say(console, f"resuming at step {step:,}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
