"""What the demo shows while it runs and when it is done.

rich leaves colours and cursor movements out where the output is no terminal. All text is ASCII, so
that no encoding can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pdecay._sparsity.counting import SparsityReport
from pdecay.lab.data import digits
from pdecay.lab.demo import toy
from pdecay.lab.demo.runs import Setting, Summary
from pdecay.lab.demo.story import Plan, Story


def opening(console: Console, plan: Plan) -> None:
    """What is about to be trained."""
    layers = "-".join(map(str, digits.SIZES))
    _say(
        console,
        f"Training a {layers} network on scikit-learn's digits: {len(plan.settings)} settings, "
        f"{plan.seeds} seed{'s' * (plan.seeds > 1)} each, {plan.epochs} epochs.",
    )


@contextmanager
def progress(console: Console, plan: Plan) -> Iterator[Callable[[Setting], None]]:
    """A function to call before each run: a bar on a terminal, else a line for each setting."""
    total = len(plan.settings) * plan.seeds
    if not console.is_terminal:
        seen: set[Setting] = set()

        def print_line(setting: Setting) -> None:
            if setting not in seen:
                seen.add(setting)
                _say(console, f"  {len(seen):2}/{len(plan.settings)}  {setting.name}")

        yield print_line
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=total)
        begun = 0

        def move_bar(setting: Setting) -> None:
            nonlocal begun
            bar.update(task, description=f"{setting.name:<35}", completed=begun)
            begun += 1

        yield move_bar
        bar.update(task, completed=total)


def story(console: Console, told: Story) -> None:
    """The table of all settings, and the layers of the one worth recommending."""
    console.print(results(told))
    console.print(layers(told.pick.runs[0].report, told.pick.setting.name))


def results(told: Story) -> Table:
    """Accuracy and zeros of each setting."""
    table = _table("Validation accuracy and zeros")
    table.add_column("AdamW, or PAdam with", no_wrap=True)
    for heading in ("accuracy %", "vs AdamW", "zeros %"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for summary in told.summaries:
        spread = f" +- {100 * summary.spread:.2f}" if told.plan.seeds > 1 else ""
        setting = summary.setting
        table.add_row(
            setting.decay_name if setting.decay else setting.name,
            f"{100 * summary.accuracy:.2f}{spread}",
            "" if summary is told.dense else f"{-100 * told.lost(summary):+z.2f}",
            f"{100 * summary.sparsity:.2f}",
            _remark(told, summary),
            style="bold" if summary in (told.dense, told.pick) else None,
        )
    return table


def layers(report: SparsityReport, of: str) -> Table:
    """The zeros of each layer that decays, and its outputs and inputs that no weight is left of."""
    decayed = [layer for layer in report.layers if layer.decayed]
    table = _table(f"Layer by layer: {of}, first seed")
    table.add_column("layer")
    for heading in ("shape", "weights", "left", "zeros %", "dead out", "dead in"):
        table.add_column(heading, justify="right")
    for layer in decayed:
        outputs, inputs = layer.shape
        table.add_row(
            layer.name,
            f"{outputs} x {inputs}",
            f"{layer.size:,}",
            f"{layer.size - layer.zeros:,}",
            f"{100 * layer.sparsity:.2f}",
            f"{len(layer.dead_rows)}/{outputs}",
            f"{len(layer.dead_columns)}/{inputs}",
        )
    size = sum(layer.size for layer in decayed)
    zeros = sum(layer.zeros for layer in decayed)
    table.add_section()
    table.add_row("all", "", f"{size:,}", f"{size - zeros:,}", f"{100 * report.total:.2f}", "", "")
    return table


def closing(console: Console, told: Story, paths: Mapping[str, Path], seconds: float) -> None:
    """The toy's check, where the files are, and the sentence to remember."""
    zero_below = told.pick.runs[0].report.threshold
    _say(
        console,
        f"Zero means |w| < {zero_below:g}. The {digits.VALIDATION_IMAGES} validation images also "
        f"chose the best AdamW and the recommended run; one image is "
        f"{100 / digits.VALIDATION_IMAGES:g} points.",
    )
    _say(
        console,
        f"Toy example (p = {toy.P:g}, lam = {toy.LAM:g}): the library's PSGD follows the paper's "
        f"curves to {max(told.toy.difference.values()):.0e}.",
    )
    console.print()
    for what, path in paths.items():
        # soft_wrap: a path that is broken over two lines cannot be copied
        console.print(Text(f"{what:<26} {path}"), soft_wrap=True)
    console.print()
    console.print(Text(told.headline(), style="bold"))
    _say(console, f"Done in {seconds:.0f} s.")


def _remark(told: Story, summary: Summary) -> str:
    if summary is told.dense:
        return "best AdamW"
    return "recommended" if summary is told.pick else ""


def _table(title: str) -> Table:
    return Table(
        title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )


def _say(console: Console, text: str) -> None:
    console.print(Text(text))
