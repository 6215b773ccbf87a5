"""``pdecay train``: train one run, show its progress and its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from pdecay._utils.signals import stop_requests
from pdecay.lab.train.records import Record
from pdecay.lab.train.training import (
    CHECKPOINT,
    RECORD,
    WEIGHTS,
    Settings,
    StoppedError,
    train,
)

_SMOOTHING = 0.95  # of the displayed loss, because the loss of single batches is noisy


def train_and_show(settings: Settings, out: Path, console: Console, **options: Any) -> int:
    """Train a run, show it and return the exit code of the command.

    Args:
        settings: the run.
        out: its folder.
        console: the console to print to.
        options: further arguments of :func:`pdecay.lab.train.training.train`.
    """
    finished_before = (out / RECORD).exists()

    def notify() -> None:
        _print(console, "stopping after this step with a checkpoint; repeat to stop at once")

    try:
        with stop_requests(notify) as stop, _progress(console) as progress:
            record = train(settings, out, progress=progress, stop=stop, **options)
    except StoppedError as error:
        _print(console, f"{error}; to continue, run the same command again.")
        _print_files(console, out, {"checkpoint": CHECKPOINT})
        return 130
    if finished_before:
        _print_settings(console, settings)
        _print(console, "This run was already finished. Its result:")
    _print_result(console, record)
    _print_files(console, out, {"record": RECORD, "weights": WEIGHTS})
    return 0


class _Lines:
    """Progress as one line for each evaluation, for output that is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, settings: Settings, step: int) -> None:
        _print_settings(self._console, settings, step)
        self._steps = settings.steps

    def step(self, step: int, loss: float) -> None:
        pass

    def point(self, point: Mapping[str, Any]) -> None:
        _print(
            self._console,
            f"step {point['step']:>{len(str(self._steps))}}/{self._steps}  "
            f"loss {_number(point['train_loss'], '.4f')}  "
            f"accuracy {_number(point['accuracy'], '.2f')} %  "
            f"zeros {_number(point['sparsity'], '.2%')}",
        )


class _Bar:
    """Progress as a bar with the loss, the accuracy and the share of zeros."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._loss: float | None = None

    def begin(self, settings: Settings, step: int) -> None:
        _print_settings(self._progress.console, settings, step)
        self._task = self._progress.add_task(
            "", total=settings.steps, completed=step, loss="", evaluation=""
        )

    def step(self, step: int, loss: float) -> None:
        old = loss if self._loss is None else self._loss
        self._loss = _SMOOTHING * old + (1 - _SMOOTHING) * loss
        self._progress.update(self._task, completed=step, loss=f"loss {self._loss:.3f}")

    def point(self, point: Mapping[str, Any]) -> None:
        accuracy, zeros = _number(point["accuracy"], ".2f"), _number(point["sparsity"], ".2%")
        self._progress.update(self._task, evaluation=f"accuracy {accuracy} %  zeros {zeros}")


@contextmanager
def _progress(console: Console) -> Iterator[_Lines | _Bar]:
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}", markup=False),
        TextColumn("{task.fields[evaluation]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress)


def _print_result(console: Console, record: Record) -> None:
    result = record["result"]
    table = Table(
        title=Text("Zeros of each decayed layer", style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("layer")
    for heading in ("shape", "weights", "left", "zeros %"):
        table.add_column(heading, justify="right", no_wrap=True)
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
        _print(console, f"Diverged: the loss is not finite after {steps:,} steps. Try a lower lr.")
    else:
        test = result.get("test_accuracy")  # older records have none
        _print(
            console,
            f"validation accuracy {result['accuracy']:.2f} %, loss {result['loss']:.4f}, "
            f"test accuracy {_number(test, '.2f')} %, sparsity {result['sparsity']:.2%}; "
            f"trade-off (validation accuracy % + sparsity) {result['tradeoff']:.2f}",
        )
    timing = record["timing"]
    times = timing["resumed"]
    resumed = f", resumed {times} time{'s' * (times > 1)}" if times else ""
    _print(console, f"{timing['seconds']:.0f} s of training{resumed}")


def _print_files(console: Console, out: Path, names: Mapping[str, str]) -> None:
    for what, name in names.items():
        _print(console, f"{what:<10} {out / name}")


def _print_settings(console: Console, settings: Settings, step: int = 0) -> None:
    options = ", ".join(f"{name}={value}" for name, value in settings.options.items())
    _print(
        console,
        f"{settings.task} ({settings.scale}) with {settings.method}({options}): "
        f"lr {settings.lr:g}, {settings.steps:,} steps, seed {settings.seed}",
    )
    if step:
        _print(console, f"resuming at step {step:,}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _print(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)  # a wrapped path could not be copied
