"""Write the tables of docs/speed.md from the record of ``pdecay bench``.

pdecay bench --out benchmarks/records            # about 15 minutes on an idle machine
python benchmarks/speed_tables.py                # docs/_data/speed_*.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "bench.json"
TABLES = ROOT / "docs" / "_data"
FUSED_ADAMW, FOREACH_ADAMW = "AdamW fused", "AdamW foreach"

Row = dict[str, Any]


def main() -> None:
    for name, text in tables(json.loads(RECORD.read_text())).items():
        (TABLES / f"{name}.md").write_text(text)


def tables(record: Row) -> dict[str, str]:
    """Return all tables in Markdown by name."""
    return {
        "speed_machine": machine(record),
        "speed_methods": methods(record["steps"]),
        "speed_avx2": methods(record["steps_with_avx2"]),
        "speed_every_p": every_p(record["steps"]),
        "speed_growth": growth(record["growth"]),
        "speed_training": training(record),
    }


def machine(record: Row) -> str:
    """Return a line that describes the machine and the command."""
    here = record["machine"]
    return (
        f"`{record['command'].strip()}`: {here['processor']}, {here['instructions']}, "
        f"{here['threads']} threads, torch {here['torch']}, commit {here['commit'][:9]}\n"
    )


def methods(steps: Sequence[Row]) -> str:
    """Return the ratio of each method with p = 0.8 to fused AdamW, a column for each model.

    The last column is the memory that a step needs on the largest model.
    """
    models = _models(steps)
    ratios = {(row["model"], row["method"], row["norm"]): row["ratio"] for row in steps}
    memory = {(row["model"], row["method"], row["norm"]): row["extra_bytes"] for row in steps}
    rows = []
    for name in dict.fromkeys(row["method"] for row in steps):
        if "SGD" in name:
            continue
        norm = "" if (models[0], name, "") in ratios else "0.8"
        label = name + (", p = 0.8" if norm else "")
        extra = f"{memory[models[-1], name, norm]:.1f}"
        rows.append([label, *(f"{ratios[model, name, norm]:.2f}" for model in models), extra])
        if name == "PAdam foreach":
            relative = [
                ratios[model, name, norm] / ratios[model, FOREACH_ADAMW, ""] for model in models
            ]
            cells = [f"{value:.2f}" for value in relative]
            rows.append([f"{label}, relative to {FOREACH_ADAMW}", *cells, ""])
    sizes = [f"{name}, {_millions(steps, name)}" for name in models]
    return _markdown(["", *sizes, f"extra bytes a weight, {models[-1]}"], rows)


def every_p(steps: Sequence[Row]) -> str:
    """Return the ratio of the fused and compiled methods for each p."""
    shown = ("PAdam fused", "PSGD fused", "PAdam compiled", "PSGD compiled")
    ratios = {(row["model"], row["method"], row["norm"]): row["ratio"] for row in steps}
    norms = list(dict.fromkeys(row["norm"] for row in steps if row["method"] in shown))
    rows = [
        [method, model, *(f"{ratios[model, method, norm]:.2f}" for norm in norms)]
        for method in shown
        for model in _models(steps)
    ]
    return _markdown(["method", "model", *(f"p = {norm}" for norm in norms)], rows)


def growth(steps: Sequence[Row]) -> str:
    """Return the nanoseconds for each weight by number of weights."""
    rows = []
    for base, ours in zip(steps[::2], steps[1::2], strict=True):
        times = [1e6 * row["milliseconds"] / row["weights"] for row in (base, ours)]
        rows.append(
            [
                f"{base['weights'] / 1e6:,.0f} M",
                *(f"{t:.2f}" for t in times),
                f"{ours['ratio']:.2f}",
            ]
        )
    return _markdown(["weights", "AdamW fused, ns a weight", "PAdam fused, p = 0.8", "ratio"], rows)


def training(record: Row) -> str:
    """Return the relative times of training and of the target."""
    rows = [
        [f"{name}, char-GPT", f"{value:.3f}"]
        for name, value in record["training"].items()
        if name != FUSED_ADAMW
    ]
    rows += [
        [f"`SparsityTarget` during its ramp, {model}", f"{1 + share:.3f}"]
        for model, share in record["target"].items()
    ]
    return _markdown(["", "training time, relative"], rows)


def _models(steps: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in steps))


def _millions(steps: Sequence[Row], model: str) -> str:
    weights = next(row["weights"] for row in steps if row["model"] == model)
    return f"{weights / 1e6:.2g} M" if weights < 1e7 else f"{weights / 1e6:.1f} M"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
