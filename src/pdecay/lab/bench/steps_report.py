"""``pdecay bench``: measure optimizer steps, print tables, write ``bench.json`` and a figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from rich.console import Console

from pdecay.lab import machine
from pdecay.lab.bench import steps as bench
from pdecay.lab.bench.steps import Cost
from pdecay.lab.data.sources import DataError
from pdecay.lab.drawing import BLUE, FONTS, INK, VERMILION, save
from pdecay.lab.tables import Row, say, table_of

SIZES = (1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000, 300_000_000)
# In each of several processes.
_ROUNDS = {"MLP": 301, "char-GPT": 61, "ResNet": 31, "nanoGPT": 21, "GPT-2": 13}
_TARGETS = {"char-GPT": ((32, 64), 60), "GPT-2": ((1, 128), 6)}  # batch, iterations
_BARS = {"PAdam fused": BLUE, "PSGD fused": VERMILION}
_COLUMNS = 3  # panels of the figure beside each other
_STEP_COLUMNS = {
    "<method": "{method}",
    "<p": "{norm}",
    "ms": "{milliseconds:.2f}",
    "x fused": "{ratio:.2f}",
    "extra bytes/weight": "{extra_bytes:.1f}",
}
_GROWTH_COLUMNS = {
    "weights": "{millions:,.0f} M",
    "<method": "{method}",
    "ns/weight": "{nanoseconds:.3f}",
    "x fused": "{ratio:.2f}",
}


def run(out: Path, parts: Sequence[str], *, quick: bool, console: Console | None = None) -> None:
    """Measure, print and write ``bench.json`` and ``bench.png`` to `out`."""
    console = console or Console()
    results: dict[str, Any] = {
        "command": "pdecay bench " + " ".join([*parts, *(["--quick"] if quick else [])]),
        "machine": machine.describe() | {"instructions": torch.backends.cpu.get_cpu_capability()},
    }
    rounds, processes = ({"nanoGPT": 5}, 1) if quick else (_ROUNDS, bench.PROCESSES)
    costs: list[Cost] = []
    with console.status("starting") as status:
        if "step" in parts:
            costs = bench.steps("steps", rounds, processes, status.update)
            results["steps"] = [asdict(cost) for cost in costs]
        if "avx2" in parts:
            found = bench.steps("steps_with_avx2", rounds, processes, status.update)
            results["steps_with_avx2"] = [asdict(cost) for cost in found]
        if "target" in parts:
            results["target"] = {}
            for model in ["char-GPT"] if quick else list(_TARGETS):
                batch, iterations = _TARGETS[model]
                for power, name in ((0.0, model), (0.5, f"{model}, scaled updates")):
                    status.update(f"SparsityTarget on {name}")
                    steps = 6 if quick else iterations
                    results["target"][name] = bench.target_share(model, batch, steps, power)
        if "growth" in parts:
            sizes = SIZES[:3] if quick else SIZES
            grown = bench.growth(sizes, 5, processes, status.update)
            results["growth"] = [{"size": size, **asdict(cost)} for size, cost in grown]
        if "train" in parts:
            try:
                results["training"] = bench.training(20 if quick else 300, status.update)
            except DataError as error:  # the other measurements need no data
                say(console, f"training is skipped: {error}")
        if "start" in parts:
            status.update("first use, in new processes")
            results["first_use_seconds"] = bench.first_use()
    _show(console, results)
    (out / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    written = [out / "bench.json"]
    if costs:
        draw(costs, out / "bench.png")
        written.append(out / "bench.png")
    say(console, "written: " + ", ".join(map(str, written)))


def _show(console: Console, results: dict[str, Any]) -> None:
    here = results["machine"]
    say(console, f"{here['processor']}, {here['threads']} threads, torch {here['torch']}")
    for key, note in (("steps", ""), ("steps_with_avx2", ", AVX2 only")):
        steps = results.get(key, [])
        for model in dict.fromkeys(row["model"] for row in steps):
            rows = [row for row in steps if row["model"] == model]
            title = f"{model}: {rows[0]['weights'] / 1e6:.2f} M weights, one step{note}"
            console.print(table_of(title, _STEP_COLUMNS, rows))
    if "growth" in results:
        rows = [_per_weight(row) for row in results["growth"]]
        console.print(table_of("By number of weights, p = 0.8", _GROWTH_COLUMNS, rows))
    for key, title, first, second in (
        ("target", "SparsityTarget during its ramp", "<model", "x other training time"),
        ("training", "Training the char-GPT: wall time", "<method", "x AdamW fused"),
        ("first_use_seconds", "First step in a new process", "<cache", "seconds"),
    ):
        if key in results:
            rows = [{"name": name, "value": value} for name, value in results[key].items()]
            console.print(table_of(title, {first: "{name}", second: "{value:.3f}"}, rows))


def _per_weight(row: Row) -> Row:
    nanoseconds = 1e6 * row["milliseconds"] / row["weights"]
    return {**row, "millions": row["weights"] / 1e6, "nanoseconds": nanoseconds}


def draw(costs: Sequence[Cost], path: Path) -> None:
    """Draw the ratio for each p and model as bars, with a line at 1 for torch's fused optimizer."""
    models, norms = list(dict.fromkeys(cost.model for cost in costs)), list(bench.NORMS)
    ratio = {(cost.model, cost.method, cost.norm): cost.ratio for cost in costs}
    rows = -(-len(models) // _COLUMNS)
    with matplotlib.rc_context({**FONTS, "font.size": 10, "axes.titlesize": 12}):
        figure = Figure(figsize=(9, 2.6 * rows), layout="constrained")
        panels = figure.subplots(rows, _COLUMNS, sharey=True, squeeze=False).flat
        for axes in list(panels)[len(models) :]:
            axes.remove()
        for axes, model in zip(figure.axes, models, strict=True):
            for k, (method, color) in enumerate(_BARS.items()):
                places = [i + 0.4 * (k - 0.5) for i in range(len(norms))]
                heights = [ratio[model, method, norm] for norm in norms]
                axes.bar(places, heights, 0.38, color=color, label=method)
            axes.axhline(1, color=INK, linewidth=1)
            axes.set_xticks(range(len(norms)), norms, rotation=45)
            axes.set_xlabel("p")
            axes.set_title(model)
        for axes in figure.axes[::_COLUMNS]:
            axes.set_ylabel("time, x torch's fused")
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=len(_BARS))
        save(figure, path)
