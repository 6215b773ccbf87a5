"""``pdecay bench deploy``: measure sparse layers and models, print tables, write a figure."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table

from pdecay.lab import machine
from pdecay.lab.bench import deploy as bench_deploy
from pdecay.lab.bench.deploy import LayerCost, NetworkCost
from pdecay.lab.bench.steps_report import new_table
from pdecay.lab.data.sources import DataError
from pdecay.lab.drawing import (
    BLUE,
    FONTS,
    GREEN,
    INK,
    VERMILION,
    save,
)

BATCHES = (1, 16)
_COLORS = {0.9: GREEN, 0.95: BLUE, 0.99: VERMILION}


def run(out: Path, *, quick: bool, console: Console | None = None) -> None:
    """Measure and print; write ``deploy.json``, ``.md``, ``.png`` and trained networks to `out`."""
    console = console or Console(width=max(140, Console().width))  # for wide tables
    threads = [1] if quick or (os.cpu_count() or 1) < 2 else [1, 2]
    layers: list[LayerCost] = []
    networks: list[NetworkCost] = []
    with console.status("starting") as status:
        cases = bench_deploy.layer_cases()
        if quick:
            cases = cases[::6]
        rounds, seconds = (3, 0.01) if quick else (11, 0.3)
        layers += bench_deploy.layers(cases, threads, rounds, seconds, status.update)
        for network in bench_deploy.networks(quick):
            try:
                for sparsity in bench_deploy.SPARSITIES:
                    found = bench_deploy.trained(network, sparsity, out / "networks", status.update)
                    networks += bench_deploy.network_costs(
                        *(network, sparsity, found, BATCHES, threads),
                        *(0.05 if quick else 2.0, status.update),
                    )
            except DataError as error:  # the other networks do not need these data
                console.print(f"{network.name} is skipped: {error}", highlight=False)
    _show(console, layers, networks)
    results = {
        "machine": {**machine.describe(), "threads": " and ".join(map(str, threads))},
        "layers": [_rounded(asdict(cost)) for cost in layers],
        "networks": [_rounded(asdict(cost)) for cost in networks],
    }
    (out / "deploy.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "deploy.md").write_text(_markdown(layers, networks), encoding="utf-8")
    _draw(layers, networks, out / "deploy.png")
    names = ", ".join(str(out / f"deploy.{kind}") for kind in ("json", "md", "png"))
    console.print(f"written: {names}", highlight=False)


def _rounded(value: Any) -> Any:
    """Round all floats to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value


def _show(console: Console, layers: Sequence[LayerCost], networks: Sequence[NetworkCost]) -> None:
    here = machine.describe()
    console.print(f"{here['processor']}, torch {here['torch']}", highlight=False)
    for threads in dict.fromkeys(cost.threads for cost in layers):
        console.print(_layer_table([cost for cost in layers if cost.threads == threads]))
    for name in dict.fromkeys(cost.name for cost in networks):
        console.print(_network_table([cost for cost in networks if cost.name == name]))
    costs: list[LayerCost | NetworkCost] = [*layers, *networks]
    for cost in costs:
        if cost.wanted and cost.ratio < cost.wanted:
            console.print(
                f"below the required speed-up: {cost.name}, batch {cost.batch}, "
                f"{cost.threads} threads, {cost.sparsity:.0%}: {cost.ratio:.1f} times, "
                f"not {cost.wanted:g}",
                highlight=False,
            )


def _layer_table(costs: Sequence[LayerCost]) -> Table:
    made = new_table(
        f"Layers on {costs[0].threads} thread{'s' * (costs[0].threads > 1)}, random zeros",
        *("layer", "batch", "zeros", "dense us", "sparse us", "times faster", "aim"),
    )
    for cost in costs:
        made.add_row(
            cost.name,
            str(cost.batch),
            f"{cost.sparsity:.0%}",
            f"{cost.dense:,.0f}",
            f"{cost.sparse:,.0f}",
            f"{cost.ratio:.1f}",
            f"{cost.wanted:g}",
        )
    return made


def _network_table(costs: Sequence[NetworkCost]) -> Table:
    """Return the times of a network and the shares of its layers and functions."""
    made = new_table(
        f"{costs[0].name}, trained: dense in torch and ONNX Runtime, and deployed",
        *("zeros", "acc. %", "threads", "batch", "dense us", "ONNX us", "us", "x dense", "x ONNX"),
        *("% in sparse", "% in dense", "% else", "kB", "file kB"),
    )
    made.caption = "\n".join(_other_functions(cost) for cost in costs)
    made.caption_justify = "left"
    for cost in costs:
        share = {"sparse": 0.0, "dense": 0.0}
        for _, kind, taken in cost.layers:
            share[kind] += 100 * taken / cost.deployed
        made.add_row(
            f"{cost.sparsity:.0%}",
            f"{cost.accuracy:.1f}",
            str(cost.threads),
            str(cost.batch),
            f"{cost.dense:,.0f}",
            "" if cost.onnx is None else f"{cost.onnx:,.0f}",
            f"{cost.deployed:,.0f}",
            f"{cost.ratio:.1f}",
            "" if cost.onnx_ratio is None else f"{cost.onnx_ratio:.1f}",
            f"{share['sparse']:.0f}",
            f"{share['dense']:.0f}",
            f"{max(0.0, 100 - sum(share.values())):.0f}",
            f"{cost.deployed_bytes / 1e3:,.0f}",
            f"{cost.file / 1e3:,.0f}",
        )
    return made


def _other_functions(cost: NetworkCost) -> str:
    """Return the shares of time that functions besides layers take."""
    parts = ", ".join(
        f"{name} {100 * taken / cost.deployed:.0f} %" for name, taken in cost.functions
    )
    return (
        f"other functions at {cost.sparsity:.0%} on {cost.threads} "
        f"thread{'s' * (cost.threads > 1)}, batch {cost.batch}: {parts}"
    )


def _markdown(layers: Sequence[LayerCost], networks: Sequence[NetworkCost]) -> str:
    """Return both tables for the documentation: ratios only, one column for each thread count."""
    threads = list(dict.fromkeys(cost.threads for cost in layers))
    on = [f"{count} thread{'s' * (count > 1)}" for count in threads]
    rows = [["layer, zeros", "batch", *on, "aim"]]
    for name, batch in dict.fromkeys((cost.name, cost.batch) for cost in layers):
        these = [cost for cost in layers if (cost.name, cost.batch) == (name, batch)]
        first = [cost for cost in these if cost.threads == threads[0]]
        zeros = "/".join(f"{100 * cost.sparsity:.0f}" for cost in first)
        ratios = [
            "; ".join(f"{cost.ratio:.1f}" for cost in these if cost.threads == count)
            for count in threads
        ]
        aims = "/".join(f"{cost.wanted:g}" for cost in first)
        rows.append([f"{name}, {zeros} %", str(batch), *ratios, aims])
    text = _pipes(rows)
    rows = [["network", "zeros", "accuracy %", "batch", *(f"x dense, {count}" for count in on)]]
    rows[0] += [
        *(f"x ONNX Runtime, {count}" for count in on),
        "MB, dense",
        "MB, deployed",
        "MB, file",
    ]
    keys = dict.fromkeys((cost.name, cost.sparsity, cost.batch) for cost in networks)
    for key in keys:
        same = [cost for cost in networks if (cost.name, cost.sparsity, cost.batch) == key]
        first_cost = same[0]
        rows.append(
            [
                *(first_cost.name, f"{100 * first_cost.sparsity:.0f} %"),
                *(f"{first_cost.accuracy:.1f}", str(first_cost.batch)),
                *(f"{cost.ratio:.1f}" for cost in same),
                *("" if cost.onnx_ratio is None else f"{cost.onnx_ratio:.1f}" for cost in same),
                f"{first_cost.dense_bytes / 1e6:.2f}",
                f"{first_cost.deployed_bytes / 1e6:.2f}",
                f"{first_cost.file / 1e6:.2f}",
            ]
        )
    return f"{text}\n{_pipes(rows)}"


def _pipes(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))


def _draw(layers: Sequence[LayerCost], networks: Sequence[NetworkCost], path: Path) -> None:
    """Draw the speed-ups of layers and networks as bars, for the largest number of threads."""
    with matplotlib.rc_context(FONTS):
        figure = Figure(figsize=(12, 8), layout="constrained")
        upper, lower = figure.subplots(2, 1)
        for axes, costs, title in (
            (upper, layers, "Sparse layers: times faster than torch's dense"),
            (lower, networks, "Trained networks, deployed: times faster than torch's dense"),
        ):
            _bars(axes, costs, title)
        save(figure, path)


def _bars(axes: Axes, costs: Sequence[LayerCost] | Sequence[NetworkCost], title: str) -> None:
    threads = max((cost.threads for cost in costs), default=1)
    places: dict[tuple[str, int], int] = {}
    for cost in costs:
        if cost.threads != threads:
            continue
        place: float = places.setdefault((cost.name, cost.batch), len(places))
        zeros = min(_COLORS, key=lambda known: abs(known - cost.sparsity))
        place += 0.27 * (list(_COLORS).index(zeros) - 1)
        axes.bar(place, cost.ratio, 0.25, color=_COLORS[zeros])
        if isinstance(cost, NetworkCost) and cost.onnx:
            axes.hlines(cost.dense / cost.onnx, place - 0.12, place + 0.12, color=INK)
    axes.axhline(1, color=INK, linewidth=1)
    axes.set_xticks(
        range(len(places)),
        [f"{_short(name)}\nbatch {batch}" for name, batch in places],
        fontsize=7,
    )
    axes.set_title(f"{title}, {threads} thread{'s' * (threads > 1)}")
    shown: list[Patch | Line2D] = [
        Patch(color=color, label=f"{zeros:.0%} zeros") for zeros, color in _COLORS.items()
    ]
    if any(isinstance(cost, NetworkCost) for cost in costs):
        shown[2] = Line2D([], [], color=INK, label="dense in ONNX Runtime")
    axes.legend(handles=shown, fontsize=9)


def _short(name: str) -> str:
    """Break a name into short lines for an axis tick."""
    words = name.replace(" channels", "").replace("Conv2d ", "")
    words = words.replace("Linear 1024x1024", "Linear\n1024")
    return words.replace(", ", "\n")
