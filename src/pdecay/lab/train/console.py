"""``pdecay train``: trains one run, and shows how it goes and what came out."""

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

_SMOOTHING = 0.95  # of the loss that the bar shows: one batch's alone jumps about


def run(settings: Settings, out: Path, console: Console, **options: Any) -> int:
    """Train, show and write one run; the command's exit code.

    Args:
        settings: what to train.
        out: the folder.
        console: where to show it.
        options: of :func:`pdecay.lab.train.training.train`.
    """
    done_before = (out / RECORD).exists()

    def notify() -> None:
        _say(console, "stopping after this step, with a checkpoint; once more to stop at once")

    with stop_requests(notify) as stop, _watch(console) as progress:
        try:
            record = train(settings, out, progress=progress, stop=stop, **options)
        except StoppedError as error:
            stopped = str(error)
        else:
            stopped = ""
    if stopped:
        _say(console, f"{stopped}; to go on, run the same command again.")
        _files(console, out, {"checkpoint": CHECKPOINT})
        return 130
    if done_before:
        _open(console, settings)
        _say(console, "This run was done before; here is what it gave.")
    _show(console, record)
    _files(console, out, {"record": RECORD, "weights": WEIGHTS})
    return 0


class _Lines:
    """A line for each evaluation, where the output is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, settings: Settings, step: int) -> None:
        _open(self._console, settings, step)
        self._steps = settings.steps

    def step(self, step: int, loss: float) -> None:
        pass

    def point(self, point: Mapping[str, Any]) -> None:
        _say(
            self._console,
            f"step {point['step']:>{len(str(self._steps))}}/{self._steps}  "
            f"loss {_number(point['train_loss'], '.4f')}  "
            f"accuracy {_number(point['accuracy'], '.2f')} %  "
            f"zeros {_number(point['sparsity'], '.2%')}",
        )


class _Bar:
    """A bar with the loss, the accuracy and the share of zeros."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._loss: float | None = None

    def begin(self, settings: Settings, step: int) -> None:
        _open(self._progress.console, settings, step)
        self._task = self._progress.add_task(
            "", total=settings.steps, completed=step, loss="", judged=""
        )

    def step(self, step: int, loss: float) -> None:
        old = loss if self._loss is None else self._loss
        self._loss = _SMOOTHING * old + (1 - _SMOOTHING) * loss
        self._progress.update(self._task, completed=step, loss=f"loss {self._loss:.3f}")

    def point(self, point: Mapping[str, Any]) -> None:
        accuracy, zeros = _number(point["accuracy"], ".2f"), _number(point["sparsity"], ".2%")
        self._progress.update(self._task, judged=f"accuracy {accuracy} %  zeros {zeros}")


@contextmanager
def _watch(console: Console) -> Iterator[_Lines | _Bar]:
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}", markup=False),
        TextColumn("{task.fields[judged]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress)


def _show(console: Console, record: Record) -> None:
    result = record["result"]
    table = Table(
        title=Text("Zeros of each layer that decays", style="bold"),
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
        _say(console, f"Diverged: the loss is not finite after {steps:,} steps. A smaller lr?")
    else:
        _say(
            console,
            f"validation accuracy {result['accuracy']:.2f} %, loss {result['loss']:.4f}, sparsity "
            f"{result['sparsity']:.2%}; trade-off (accuracy % + sparsity) {result['tradeoff']:.2f}",
        )
    timing = record["timing"]
    times = timing["resumed"]
    again = f", gone on {times} time{'s' * (times > 1)}" if times else ""
    _say(console, f"{timing['seconds']:.0f} s of training{again}")


def _files(console: Console, out: Path, names: Mapping[str, str]) -> None:
    for what, name in names.items():
        # soft_wrap: a path that is broken over two lines cannot be copied
        console.print(Text(f"{what:<10} {out / name}"), soft_wrap=True)


def _open(console: Console, settings: Settings, step: int = 0) -> None:
    options = ", ".join(f"{name}={value}" for name, value in settings.options.items())
    _say(
        console,
        f"{settings.task} ({settings.scale}) with {settings.method}({options}): "
        f"lr {settings.lr:g}, {settings.steps:,} steps, seed {settings.seed}",
    )
    if step:
        _say(console, f"going on from step {step:,}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
