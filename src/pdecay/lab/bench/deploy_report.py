"""``pdecay bench deploy``: measure sparse layers and models, print tables, write a figure."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from rich.console import Console

from pdecay.lab import machine
from pdecay.lab.bench import deploy as bench_deploy
from pdecay.lab.bench.deploy import Row
from pdecay.lab.data.sources import DataError
from pdecay.lab.drawing import BLUE, FONTS, GREEN, INK, VERMILION, save
from pdecay.lab.tables import say, table_of

BATCHES = (1, 16)
_COLORS = {0.9: GREEN, 0.95: BLUE, 0.99: VERMILION}
_LAYER_COLUMNS = {
    "<layer": "{name}",
    "batch": "{batch}",
    "zeros": "{sparsity:.0%}",
    "dense us": "{dense:,.0f}",
    "sparse us": "{sparse:,.0f}",
    "times faster": "{ratio:.1f}",
    "aim": "{wanted:g}",
}
_NETWORK_COLUMNS = {
    "zeros": "{sparsity:.0%}",
    "acc. %": "{accuracy:.1f}",
    "threads": "{threads}",
    "batch": "{batch}",
    "dense us": "{dense:,.0f}",
    "ONNX us": "{onnx:,.0f}",
    "us": "{deployed:,.0f}",
    "x dense": "{ratio:.1f}",
    "x ONNX": "{onnx_ratio:.1f}",
    "% in sparse": "{in_sparse:.0f}",
    "% in dense": "{in_dense:.0f}",
    "% else": "{elsewhere:.0f}",
    "kB": "{kilobytes:,.0f}",
    "file kB": "{file_kilobytes:,.0f}",
}


def run(out: Path, *, quick: bool, console: Console | None = None) -> None:
    """Measure and print; write ``deploy.json``, ``.md``, ``.png`` and trained networks to `out`."""
    console = console or Console(width=max(140, Console().width))  # for wide tables
    threads = [1] if quick or (os.cpu_count() or 1) < 2 else [1, 2]
    layers: list[Row] = []
    networks: list[Row] = []
    with console.status("starting") as status:
        cases = bench_deploy.layer_cases()[:: 6 if quick else 1]
        rounds, seconds = (3, 0.01) if quick else (11, 0.3)
        layers += bench_deploy.layers(cases, threads, rounds, seconds, status.update)
        for network in bench_deploy.networks(quick):
            try:
                for sparsity in bench_deploy.SPARSITIES:
                    networks += bench_deploy.network_costs(
                        *(network, sparsity, out / "networks", BATCHES, threads),
                        *(0.05 if quick else 2.0, status.update),
                    )
            except DataError as error:  # the other networks do not need these data
                say(console, f"{network.name} is skipped: {error}")
    _show(console, layers, networks)
    results = {
        "command": "pdecay bench deploy",
        "machine": {**machine.describe(), "threads": " and ".join(map(str, threads))},
        "layers": _rounded(layers),
        "networks": _rounded(networks),
    }
    (out / "deploy.json").write_text(json.dumps(results, indent=1) + "\n")
    text = f"{layer_table(layers)}\n{network_table(networks)}"
    (out / "deploy.md").write_text(text, encoding="utf-8")
    draw(layers, networks, out / "deploy.png")
    names = ", ".join(str(out / f"deploy.{kind}") for kind in ("json", "md", "png"))
    say(console, f"written: {names}")


def _rounded(value: Any) -> Any:
    """Round all floats to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value


def _show(console: Console, layers: Sequence[Row], networks: Sequence[Row]) -> None:
    here = machine.describe()
    say(console, f"{here['processor']}, torch {here['torch']}")
    for (threads,), rows in _groups(layers, "threads"):
        title = f"Layers on {_on(threads)}, random zeros"
        console.print(table_of(title, _LAYER_COLUMNS, rows))
    for (name,), rows in _groups(networks, "name"):
        title = f"{name}, trained: dense in torch and ONNX Runtime, and deployed"
        table = table_of(title, _NETWORK_COLUMNS, map(_with_shares, rows))
        table.caption, table.caption_justify = "\n".join(map(_other_functions, rows)), "left"
        console.print(table)
    for row in [*layers, *networks]:
        if row["wanted"] and row["ratio"] < row["wanted"]:
            text = (
                "below the required speed-up: {name}, batch {batch}, {threads} threads, "
                "{sparsity:.0%}: {ratio:.1f} times, not {wanted:g}"
            )
            say(console, text.format_map(row))


def _groups(rows: Sequence[Row], *names: str) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Group rows by the values of some names, in the order of their first rows."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.items())


def _on(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def _with_shares(row: Row) -> Row:
    """Add the shares of time of sparse layers, dense layers and the rest, and sizes in kB."""
    shares = {
        kind: sum(
            100 * taken / row["deployed"] for _, found, taken in row["layers"] if found == kind
        )
        for kind in ("sparse", "dense")
    }
    return {
        **row,
        "in_sparse": shares["sparse"],
        "in_dense": shares["dense"],
        "elsewhere": max(0.0, 100 - sum(shares.values())),
        "kilobytes": row["deployed_bytes"] / 1e3,
        "file_kilobytes": row["file"] / 1e3,
    }


def _other_functions(row: Row) -> str:
    """Return the shares of time that functions besides layers take."""
    shares = (f"{name} {100 * taken / row['deployed']:.0f} %" for name, taken in row["functions"])
    return (
        f"other functions at {row['sparsity']:.0%} on {_on(row['threads'])}, "
        f"batch {row['batch']}: {', '.join(shares)}"
    )


def layer_table(layers: Sequence[Row]) -> str:
    """Return the speed-ups of layers in Markdown, one column for each number of threads."""
    threads = list(dict.fromkeys(row["threads"] for row in layers))
    table = [["layer, zeros", "batch", *map(_on, threads), "aim"]]
    for (name, batch), rows in _groups(layers, "name", "batch"):
        first = [row for row in rows if row["threads"] == threads[0]]
        zeros = "/".join(f"{100 * row['sparsity']:.0f}" for row in first)
        ratios = [
            "; ".join(f"{row['ratio']:.1f}" for row in rows if row["threads"] == count)
            for count in threads
        ]
        aims = "/".join(f"{row['wanted']:g}" for row in first)
        table.append([f"{name}, {zeros} %", str(batch), *ratios, aims])
    return _pipes(table)


def network_table(networks: Sequence[Row]) -> str:
    """Return the speed-ups and sizes of networks in Markdown, a row for each batch size."""
    on = [_on(count) for count in dict.fromkeys(row["threads"] for row in networks)]
    against = [f"{one}, {count}" for one in ("x dense", "x ONNX Runtime") for count in on]
    table = [["network", "zeros", "accuracy %", "batch", *against]]
    table[0] += ["MB, dense", "MB, deployed", "MB, file"]
    for (name, sparsity, batch), rows in _groups(networks, "name", "sparsity", "batch"):
        sizes = [rows[0][size] / 1e6 for size in ("dense_bytes", "deployed_bytes", "file")]
        table.append(
            [
                *(name, f"{100 * sparsity:.0f} %", f"{rows[0]['accuracy']:.1f}", str(batch)),
                *(f"{row['ratio']:.1f}" for row in rows),
                *(f"{row['onnx_ratio']:.1f}" if row["onnx"] else "" for row in rows),
                *(f"{size:.2f}" for size in sizes),
            ]
        )
    return _pipes(table)


def _pipes(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))


def draw(layers: Sequence[Row], networks: Sequence[Row], path: Path) -> None:
    """Draw the speed-ups of layers and networks as bars, for the largest number of threads."""
    with matplotlib.rc_context(FONTS):
        figure = Figure(figsize=(9, 7.5), layout="constrained")
        upper, lower = figure.subplots(2, 1)
        _bars(upper, layers, "Sparse layers: times as fast as torch's dense")
        _bars(lower, networks, "Deployed networks: times as fast as torch's dense")
        save(figure, path)


def _bars(axes: Axes, rows: Sequence[Row], title: str) -> None:
    threads = max((row["threads"] for row in rows), default=1)
    shown: list[Patch | Line2D] = [
        Patch(color=color, label=f"{zeros:.0%} zeros") for zeros, color in _COLORS.items()
    ]
    groups = _groups([row for row in rows if row["threads"] == threads], "name", "batch")
    for middle, (_, group) in enumerate(groups):
        for row in group:
            k = min(range(3), key=lambda k: abs(list(_COLORS)[k] - row["sparsity"]))
            place = middle + 0.27 * (k - 1)
            axes.bar(place, row["ratio"], 0.25, color=list(_COLORS.values())[k])
            if row.get("onnx"):
                axes.hlines(row["dense"] / row["onnx"], place - 0.12, place + 0.12, color=INK)
                shown[2] = Line2D([], [], color=INK, label="dense in ONNX Runtime")
    axes.axhline(1, color=INK, linewidth=1)
    labels = [f"{_short(name)}\nbatch {batch}" for (name, batch), _ in groups]
    axes.set_xticks(range(len(groups)), labels, fontsize=7)
    axes.set_title(f"{title}, {_on(threads)}")
    axes.legend(handles=shown, fontsize=9)


def _short(name: str) -> str:
    """Break a name into short lines for an axis tick."""
    words = name.replace(" channels", "").replace("Conv2d ", "")
    words = words.replace("Linear 1024x1024", "Linear\n1024")
    return words.replace(", ", "\n")
