"""``pdecay bench``: measure optimizer steps, print tables, write ``bench.json`` and a figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from pdecay.lab import machine
from pdecay.lab.bench import steps as bench
from pdecay.lab.bench.steps import Cost
from pdecay.lab.data.sources import DataError

SIZES = (1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000, 300_000_000, 500_000_000)
_ROUNDS = {"nanoGPT": 41, "ResNet18": 31, "GPT-2": 11}
_BARS = {"PAdam fused": "#0072B2", "PAdam compiled": "#56B4E9", "PSGD fused": "#D55E00"}


def run(out: Path, parts: Sequence[str], *, quick: bool, console: Console | None = None) -> None:
    """Measure, print and write ``bench.json`` and ``bench.png`` to `out`."""
    console = console or Console()
    results: dict[str, Any] = {"machine": machine.describe()}
    costs: list[Cost] = []
    with console.status("starting") as status:
        if "step" in parts:
            for model in ["nanoGPT"] if quick else list(bench.MODELS):
                rounds = 5 if quick else _ROUNDS[model]
                for methods in (bench.adam_methods(), bench.sgd_methods()):
                    costs += bench.steps(model, methods, rounds, status.update)
            results["steps"] = [asdict(cost) for cost in costs]
        if "growth" in parts:
            sizes = SIZES[:3] if quick else SIZES
            grown = list(bench.growth(sizes, 5 if quick else 9, status.update))
            results["growth"] = [{"size": size, **asdict(cost)} for size, cost in grown]
        if "train" in parts:
            try:
                results["training"] = bench.training(20 if quick else 300, status.update)
            except DataError as error:  # the other measurements need no data
                console.print(f"training is skipped: {error}", highlight=False)
        if "start" in parts:
            status.update("first use, in new processes")
            results["first_use_seconds"] = bench.first_use()
    _show(console, results, costs)
    (out / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    written = [out / "bench.json"]
    if costs:
        _draw(costs, out / "bench.png")
        written.append(out / "bench.png")
    console.print("written: " + ", ".join(map(str, written)), highlight=False)


def _show(console: Console, results: dict[str, Any], costs: Sequence[Cost]) -> None:
    here = results["machine"]
    console.print(
        f"{here['processor']}, {here['threads']} threads, torch {here['torch']}",
        highlight=False,
    )
    for model in dict.fromkeys(cost.model for cost in costs):
        console.print(_step_table([cost for cost in costs if cost.model == model]))
    if "growth" in results:
        console.print(_growth_table(results["growth"]))
    if "training" in results:
        table = new_table("Training the char-GPT: wall time", "method", "x AdamW fused")
        for name, ratio in results["training"].items():
            table.add_row(name, f"{ratio:.2f}")
        console.print(table)
    if "first_use_seconds" in results:
        table = new_table("First step in a new process", "cache", "seconds")
        for name, seconds in results["first_use_seconds"].items():
            table.add_row(name, f"{seconds:.2f}")
        console.print(table)


def _step_table(costs: Sequence[Cost]) -> Table:
    title = f"{costs[0].model}: {costs[0].weights / 1e6:.1f} M weights, one step"
    table = new_table(title, "method", "p", "ms", "x fused", "extra bytes/weight")
    for cost in costs:
        table.add_row(
            cost.method,
            cost.norm,
            f"{cost.milliseconds:.1f}",
            f"{cost.ratio:.2f}",
            f"{cost.extra_bytes:.1f}",
        )
    return table


def _growth_table(grown: Sequence[dict[str, Any]]) -> Table:
    table = new_table("By number of weights, p = 0.8", "weights", "method", "ns/weight", "x fused")
    for one in grown:
        table.add_row(
            f"{one['weights'] / 1e6:,.0f} M",
            one["method"],
            f"{1e6 * one['milliseconds'] / one['weights']:.3f}",
            f"{one['ratio']:.2f}",
        )
    return table


def new_table(title: str, *columns: str) -> Table:
    """Return a table with right-aligned columns of numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for i, column in enumerate(columns):
        numeric = i > 0 and column not in ("p", "method")
        table.add_column(column, justify="right" if numeric else "left")
    return table


def _draw(costs: Sequence[Cost], path: Path) -> None:
    """Draw the ratio for each p and model as bars, with a line at 1 for torch's fused optimizer."""
    models = list(dict.fromkeys(cost.model for cost in costs))
    with matplotlib.rc_context(
        {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(4.2 * len(models), 3.4), layout="constrained", dpi=150)
        for axes, model in zip(
            figure.subplots(1, len(models), squeeze=False)[0], models, strict=True
        ):
            norms = list(bench.NORMS)
            for k, (method, color) in enumerate(_BARS.items()):
                ratio = {
                    cost.norm: cost.ratio
                    for cost in costs
                    if (cost.model, cost.method) == (model, method)
                }
                places = [i + 0.27 * (k - 1) for i in range(len(norms))]
                axes.bar(places, [ratio[norm] for norm in norms], 0.25, color=color, label=method)
            axes.axhline(1, color="#222222", linewidth=1)
            axes.set_xticks(range(len(norms)), norms)
            axes.set_xlabel("p")
            axes.set_title(model, loc="left", fontweight="bold")
        figure.axes[0].set_ylabel("time of a step, x torch's fused")
        figure.axes[0].legend(frameon=False, fontsize=8, loc="upper left", ncols=3)
        for axes in figure.axes:
            axes.set_ylim(0, 1.15 * max(axes.get_ylim()[1], 1.2))
        figure.savefig(path)
