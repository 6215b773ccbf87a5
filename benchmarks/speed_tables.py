"""Write the numbers of docs/speed.md and README from the record of ``pdecay bench``.

PDECAY_DATA=... pdecay bench                     # about 20 minutes on an idle machine
cp pdecay-bench/bench.json benchmarks/records
python benchmarks/speed_tables.py                # docs/_data/speed_*.md, README, the figure
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import documents
from documents import RECORDS, ROOT, markdown
from pdecay.lab.bench import steps_report
from pdecay.lab.bench.steps import Cost

RECORD = RECORDS / "bench.json"
FRESH = RECORDS / "bench_fresh.json"  # the same command on the machine when it had just started
FUSED_ADAMW, FOREACH_ADAMW = "AdamW fused", "AdamW foreach"
OURS = ("PAdam", "PSGD", "attach")  # the beginnings of the names of pdecay's methods
SMALL = "MLP"  # has 0.05 M weights; all other models have at least 0.8 M

PARTS = {"steps", "steps_with_avx2", "target", "growth", "training", "first_use_seconds"}

Row = dict[str, Any]


def main() -> None:
    record = json.loads(RECORD.read_text())
    if missing := PARTS - record.keys():
        raise SystemExit(
            f"{RECORD} has no {', '.join(sorted(missing))}: run pdecay bench with all parts, and "
            "with PDECAY_DATA set for the training"
        )
    documents.write(tables(record), readme(record))
    costs = [Cost(**row) for row in record["steps"]]
    steps_report.draw(costs, ROOT / "docs" / "_static" / "bench.png")


def tables(record: Row) -> dict[str, str]:
    """Return all tables in Markdown by name."""
    fresh = json.loads(FRESH.read_text())
    return {
        "speed_machine": machine(record),
        "speed_aims": aims(record),
        "speed_fresh": f"{difference(record, fresh)}\n{machine(fresh)}\n{aims(fresh)}",
        "speed_first_use": first_use(record["first_use_seconds"]),
        "speed_methods": methods(record["steps"]),
        "speed_avx2": methods(record["steps_with_avx2"]),
        "speed_every_p": every_p(record["steps"]),
        "speed_growth": growth(record["growth"]),
        "speed_training": training(record),
    }


def machine(record: Row) -> str:
    """Return a line that describes the machine and the command, and the spread of the ratios."""
    here = record["machine"]
    rows = [row for key in ("steps", "steps_with_avx2") for row in record[key]]
    changes = [
        abs(ratio / row["ratio"] - 1)
        for row in rows
        if row["method"].startswith(OURS)
        for ratio in row["ratios"]
    ]
    processes = len(rows[0]["ratios"])
    return (
        f"`{record['command'].strip()}`: {here['processor']}, {here['instructions']}, "
        f"{here['threads']} threads, torch {here['torch']}, commit {here['commit'][:9]}\n\n"
        f"Each ratio is the median of {processes} processes. The ratio of a pdecay method in one "
        f"process differs from it by {statistics.mean(changes):.1%} on average, and by "
        f"{max(changes):.0%} at most.\n"
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
    return markdown(["", *sizes, f"extra bytes a weight, {models[-1]}"], rows)


@dataclass(frozen=True)
class Aim:
    """A limit for some ratios of the record.

    Args:
        name: what is limited.
        limit: the largest ratio that meets the aim.
        found: the measured ratios, by the cases that they are of.
    """

    name: str
    limit: float
    found: dict[str, float]

    def row(self) -> list[str]:
        worst = max(self.found, key=lambda case: self.found[case])
        values = f"{min(self.found.values()):.2f} to {self.found[worst]:.2f}"
        met = round(self.found[worst], 2) <= self.limit
        within = sum(round(value, 2) <= self.limit for value in self.found.values())
        answer = "yes" if met else f"in {within} of {len(self.found)} cases"
        return [self.name, f"{self.limit:.2f}", values, worst, answer]


def aims(record: Row) -> str:
    """Return the aims for the cost of a step, and whether the record meets them."""
    found = []
    for key, label, limit in (("steps", "", 1.0), ("steps_with_avx2", ", AVX2", 1.12)):
        steps = record[key]
        for large, share, size in (
            (True, limit, "from 0.8 M weights on"),
            (False, 1.15, "at 0.05 M weights"),
        ):
            costs = _ratios(steps, "PAdam fused", large=large)
            found.append(Aim(f"`PAdam`, fused, every p, {size}{label}", share, costs))
        costs = _ratios(steps, "attach to AdamW fused", large=True)
        found.append(Aim(f"`attach` to AdamW fused, from 0.8 M weights on{label}", 2.0, costs))
        relative = _relative_to_foreach(steps)
        if relative:
            found.append(Aim(f"`PAdam`, foreach, relative to AdamW foreach{label}", 1.6, relative))
    for scaled, name in ((False, ""), (True, ", scaled updates")):
        target = {
            model: 1 + share
            for model, share in record["target"].items()
            if model.endswith("scaled updates") == scaled
        }
        found.append(Aim(f"training with `SparsityTarget` during its ramp{name}", 1.03, target))
    return markdown(
        ["", "aim, at most", "measured", "largest at", "met"], [aim.row() for aim in found]
    )


def _ratios(steps: Sequence[Row], method: str, *, large: bool) -> dict[str, float]:
    return {
        f"{row['model']}, p = {row['norm']}": row["ratio"]
        for row in steps
        if row["method"] == method and (row["model"] != SMALL) == large
    }


def _relative_to_foreach(steps: Sequence[Row]) -> dict[str, float]:
    base = {row["model"]: row["ratio"] for row in steps if row["method"] == FOREACH_ADAMW}
    return {
        row["model"]: row["ratio"] / base[row["model"]]
        for row in steps
        if row["method"] == "PAdam foreach"
    }


def difference(record: Row, fresh: Row) -> str:
    """Return a sentence about the speed of the memory in two runs."""
    now, before = (
        next(
            row["milliseconds"]
            for row in each["steps"]
            if (row["model"], row["method"]) == ("GPT-2", FUSED_ADAMW)
        )
        for each in (record, fresh)
    )
    return (
        f"A step of fused AdamW on GPT-2 takes {now:.0f} ms in the run above, and {before:.0f} ms "
        "in this one.\n"
    )


def first_use(seconds: Row) -> str:
    """Return a sentence about the first step of a process."""
    cold, cached = seconds["cold"], seconds["from the cache"]
    return (
        f"The first step of a process takes {cold:.1f} s if it compiles, and {cached:.3f} s if the "
        "library is in the cache.\n"
    )


def readme(record: Row) -> dict[str, str]:
    """Return the section of README in Markdown by name."""
    here = record["machine"]
    text = (
        f"Measured on {here['threads']} cores of an {here['processor']} ({here['instructions']}), "
        f"torch {here['torch'].partition('+')[0]}.\n\n{summary(record)}\n"
    )
    return {"speed": text}


def summary(record: Row) -> str:
    """Return README's table: a few methods on three models."""
    models = ("char-GPT", "nanoGPT", "GPT-2")
    ratios = {(row["model"], row["method"], row["norm"]): row["ratio"] for row in record["steps"]}
    several = ("0.8", "1", "0.8 + 2")
    label = "p = 0.8; p = 1; 0.8 + 2"
    rows = [
        (f"`PAdam`, {label}", "PAdam fused", several),
        ("`attach` to AdamW fused, p = 0.8", "attach to AdamW fused", ("0.8",)),
        ("AdamW as torch chooses by default", "AdamW default", ("",)),
        ("the paper's listing, p = 0.8", "the paper's listing", ("0.8",)),
    ]
    cells = [
        [
            name,
            *(
                "; ".join(f"{ratios[model, method, norm]:.2f}" for norm in norms)
                for model in models
            ),
        ]
        for name, method, norms in rows
    ]
    return markdown(["", *(f"{m}, {_millions(record['steps'], m)}" for m in models)], cells)


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
    return markdown(["method", "model", *(f"p = {norm}" for norm in norms)], rows)


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
    return markdown(["weights", "AdamW fused, ns a weight", "PAdam fused, p = 0.8", "ratio"], rows)


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
    return markdown(["", "training time, relative"], rows)


def _models(steps: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in steps))


def _millions(steps: Sequence[Row], model: str) -> str:
    weights = next(row["weights"] for row in steps if row["model"] == model)
    return f"{weights / 1e6:.2g} M" if weights < 1e7 else f"{weights / 1e6:.1f} M"


if __name__ == "__main__":
    main()
