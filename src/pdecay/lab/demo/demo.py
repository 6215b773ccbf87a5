"""``pdecay demo``: AdamW against PAdam on handwritten digits, and the paper's toy example.

The demo is a small grid of lab runs on the task ``digits``, with a table and two figures. Its
records are written too, so ``pdecay report`` reads the output folder.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

import pdecay
from pdecay import SparsityReport
from pdecay.lab.data import digits
from pdecay.lab.demo import toy
from pdecay.lab.demo.results import Results, Summary
from pdecay.lab.drawing import save
from pdecay.lab.report import figures
from pdecay.lab.report.experiments import experiments
from pdecay.lab.report.style import Style
from pdecay.lab.tables import new_table, say
from pdecay.lab.tasks import get_task
from pdecay.lab.train import records
from pdecay.lab.train.training import WEIGHTS, Settings, train

SCALE, LAYERS = "quick", "64-300-100-10"
LR = 3e-2  # AdamW is as accurate from 1e-2 to 3e-2; zeros appear soonest at 3e-2


@dataclass(frozen=True)
class Grid:
    """The runs of a demo: methods with their options, times seeds."""

    cells: tuple[tuple[str, dict[str, Any]], ...]
    seeds: int
    steps: int


_ELASTIC: tuple[str, dict[str, Any]] = ("elastic", {"p": 0.8, "lam": 0.06, "l2": 0.1})
FULL = Grid(
    cells=(
        *(("adamw", {"weight_decay": decay}) for decay in (0.01, 0.3, 1.0)),
        *(("padam", {"p": 0.8, "lam": lam}) for lam in (0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4)),
        *(("padam", {"p": 1.2, "lam": lam}) for lam in (0.1, 0.3, 1.0)),
        _ELASTIC,
    ),
    seeds=3,
    steps=400,
)
# A tenth of the work, to check that everything runs. Do not quote its numbers.
QUICK = Grid(
    cells=(
        ("adamw", {"weight_decay": 0.3}),
        *(("padam", {"p": 0.8, "lam": lam}) for lam in (0.03, 0.1, 0.2)),
        _ELASTIC,
    ),
    seeds=1,
    steps=160,
)


def run(
    out: Path, *, seed: int = 0, quick: bool = False, console: Console | None = None
) -> Results:
    """Train the grid, print the results and write the figures and records.

    Args:
        out: the folder for the files; it must exist.
        seed: the first seed. Equal seeds give equal numbers and figures.
        quick: train a few short runs only.
        console: the console to print to; standard output by default.
    """
    console = console or Console()
    grid = QUICK if quick else FULL
    began = time.perf_counter()
    console.print(
        f"Training a {LAYERS} network on scikit-learn's digits: {len(grid.cells)} settings, "
        f"{grid.seeds} seed{'s' * (grid.seeds > 1)} each, {grid.steps} steps.",
        highlight=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        results = train_grid(grid, Path(folder), seed=seed, console=console)
        model = _model(results.recommended, Path(folder))
    report = pdecay.sparsity(model)
    paths = write(results, out)
    print_tables(console, results, report)
    _print_notes(console, results, report, paths)
    _deploy(console, model, out / "model.safetensors")
    say(console, f"Done in {time.perf_counter() - began:.0f} s.")
    return results


def train_grid(grid: Grid, folder: Path, *, seed: int = 0, console: Console) -> Results:
    """Train all cells and seeds of a grid in subfolders of `folder`."""
    summaries = []
    for number, (method, options) in enumerate(grid.cells, start=1):
        found = []
        for offset in range(grid.seeds):
            own: Any = {"seed": seed + offset, "steps": grid.steps, **options}
            settings = Settings.of("digits", method, scale=SCALE, lr=LR, **own)
            # Matrices this small are slower on several threads.
            found.append(train(settings, folder / settings.id, threads=1))
        summaries.append(Summary(tuple(found)))
        say(console, f"  {number:2}/{len(grid.cells)}  {summaries[-1].name}")
    return Results(tuple(summaries), toy.run())


def _model(summary: Summary, folder: Path) -> torch.nn.Module:
    """Return the network of a summary's first seed."""
    record = summary.runs[0]
    model = get_task("digits", SCALE).model(0)
    model.load_state_dict(torch.load(folder / record["id"] / WEIGHTS, weights_only=True))
    return model


def _deploy(console: Console, model: torch.nn.Module, path: Path) -> None:
    """Save the network, deploy it for a batch of 16 images, and print its size and speed."""
    saved = pdecay.save(model, path)
    deployed: Any = pdecay.deploy(model.eval(), digits.load().test[0][:16], seconds=5)
    say(console, f"{'recommended network':<26} {path}")
    console.print(
        f"Its file has {saved.nbytes / 1e3:,.0f} kB instead of {saved.dense_nbytes / 1e3:,.0f} kB. "
        f"Deployed for batches of 16 images, it is {deployed.report.speedup:.1f} times as fast "
        "as the dense network, measured on this machine.",
        highlight=False,
    )


def write(results: Results, out: Path) -> dict[str, Path]:
    """Write the figures and the records, and return their paths."""
    paths = {
        "accuracy against sparsity": out / "accuracy_vs_sparsity.png",
        "toy example": out / "toy.png",
        "records": out / "records.jsonl",
    }
    runs = [run for summary in results.summaries for run in summary.runs]
    (experiment,) = experiments(runs)
    save(figures.accuracy(Style(experiment)), paths["accuracy against sparsity"])
    toy.draw(results.toy, paths["toy example"])
    records.write(paths["records"], runs)
    return paths


def print_tables(console: Console, results: Results, report: SparsityReport) -> None:
    """Print the accuracy and zeros of all settings, and the layers of the recommended one."""
    table = new_table(
        "Accuracy and zeros",
        *("<AdamW, or PAdam with", "validation %", "vs AdamW", "test %", "zeros %", "<"),
    )
    remarks = {results.dense: "best AdamW", results.recommended: "recommended"}
    for summary in results.summaries:
        spread = f" +- {summary.spread:.2f}" if len(summary.runs) > 1 else ""
        table.add_row(
            summary.name if summary.dense else summary.decay,
            f"{summary.accuracy:.2f}{spread}",
            "" if summary is results.dense else f"{-results.lost(summary):+z.2f}",
            f"{summary.test_accuracy:.2f}",
            f"{100 * summary.sparsity:.2f}",
            remarks.get(summary, ""),
            style="bold" if summary in remarks else None,
        )
    console.print(table)

    table = new_table(
        f"Layers of {results.recommended.name}, first seed",
        *("<layer", "shape", "weights", "left", "zeros %", "dead out", "dead in"),
    )
    decayed = [layer for layer in report.layers if layer.decayed]
    for layer in decayed:
        outputs, inputs = layer.shape
        table.add_row(
            *(layer.name, f"{outputs} x {inputs}", f"{layer.size:,}"),
            *(f"{layer.size - layer.zeros:,}", f"{100 * layer.sparsity:.2f}"),
            *(f"{len(layer.dead_rows)}/{outputs}", f"{len(layer.dead_columns)}/{inputs}"),
        )
    size, zeros = (sum(getattr(one, name) for one in decayed) for name in ("size", "zeros"))
    table.add_section()
    table.add_row("all", "", f"{size:,}", f"{size - zeros:,}", f"{100 * report.total:.2f}", "", "")
    console.print(table)


def _print_notes(
    console: Console, results: Results, report: SparsityReport, paths: Mapping[str, Path]
) -> None:
    console.print(
        f"Zero means |w| < {report.threshold:g}. The {digits.VALIDATION} validation images choose "
        f"the best AdamW and the recommended run; the {digits.TEST} test images choose nothing. "
        f"One image is {100 / digits.TEST:g} points.\n"
        f"Toy example (p = {toy.P:g}, lam = {toy.LAM:g}): the library's PSGD follows the paper's "
        f"curves to {max(results.toy.difference.values()):.0e}.\n",
        highlight=False,
    )
    for what, path in paths.items():
        say(console, f"{what:<26} {path}")
    console.print(Text(f"\n{results.headline()}", style="bold"))
