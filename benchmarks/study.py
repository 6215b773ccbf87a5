"""The study of accuracy at a given sparsity: tuned methods on three tasks, reported on test splits.

    python benchmarks/study.py tune --task shakespeare      # nine trials for each method
    python benchmarks/study.py final --task shakespeare     # best settings, three seeds
    python benchmarks/study.py tables                       # docs/_data/study_*.md from the records

Each command resumes where it was interrupted. Records are in benchmarks/results/TASK-STAGE.jsonl.

Protocol. Every method gets nine trials with seed 0: three learning rates times three values of its
other setting. Methods that reach a given sparsity are tuned at 95 % and use the same setting at
lower levels. Methods with a fixed strength are judged by their best trial above each level. The
setting with the best validation accuracy then runs with three seeds, and the test accuracy of these
runs is reported. Trials run for half of the training steps, final runs for all of them.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from pdecay.lab.sweep import Grid, sweep
from pdecay.lab.tasks import get_task
from pdecay.lab.train import records
from pdecay.lab.train.records import Record

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLES = ROOT / "docs" / "_data"

TASKS = ("shakespeare", "fashion", "cifar10")
LEVELS = (0.8, 0.9, 0.95)
SEEDS = (0, 1, 2)
TUNED_AT = 0.95
L2 = (0.1, 0.3, 1.0)

# The method's name in the tables, its options, and its second axis of tuning.
METHODS: dict[str, tuple[dict[str, Any], dict[str, tuple[float, ...]]]] = {
    "AdamW, dense": ({"method": "adamw"}, {"weight_decay": L2}),
    "target": ({"method": "target", "target": TUNED_AT}, {"weight_decay": L2}),
    "GMP": ({"method": "gmp", "target": TUNED_AT}, {"weight_decay": L2}),
    "GMP, adaptive rank": (
        {"method": "gmp", "target": TUNED_AT, "rank": "adaptive"},
        {"weight_decay": L2},
    ),
    "MP": ({"method": "mp"}, {"threshold": (0.03, 0.1, 0.2)}),
    "OTO": ({"method": "oto"}, {"target": (0.5, 0.7, 0.8)}),
    "L1": ({"method": "l1"}, {"lam": (0.03, 0.1, 0.3)}),
    "DWF": ({"method": "dwf"}, {"lam": (1e-5, 1e-4, 1e-3)}),
    "elastic": ({"method": "elastic", "l2": 0.1}, {"lam": (0.01, 0.03, 0.1)}),
    "PAdam, p = 0.5": ({"method": "padam", "p": 0.5}, {"lam": (0.003, 0.01, 0.03)}),
    "PAdam, p = 0.8": ({"method": "padam", "p": 0.8}, {"lam": (0.01, 0.03, 0.1)}),
    "PAdam, p = 1": ({"method": "padam", "p": 1.0}, {"lam": (0.03, 0.1, 0.3)}),
    "PAdam, p = 1.2": ({"method": "padam", "p": 1.2}, {"lam": (0.1, 0.3, 1.0)}),
    "PAdam, p = 1.5": ({"method": "padam", "p": 1.5}, {"lam": (0.1, 0.3, 1.0)}),
}
# The methods that decide the main claim run first.
FIRST = ("AdamW, dense", "GMP", "target")
STEERED = ("target", "GMP", "GMP, adaptive rank")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stage", choices=("tune", "final", "tables"))
    parser.add_argument("--task", choices=TASKS, action="append", help="default: all")
    parser.add_argument("--only", choices=METHODS, action="append", help="default: all methods")
    parser.add_argument("--first", action="store_true", help="only the methods of the main claim")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="unfinished runs")
    args = parser.parse_args()
    methods = args.only or (FIRST if args.first else tuple(METHODS))
    for task in args.task or TASKS:
        if args.stage == "tables":
            write_tables(task)
        else:
            for name in methods:
                grids = [tuning_grid(task, name)] if args.stage == "tune" else finals(task, name)
                if grids:
                    run(task, args.stage, name, grids, args)


def run(task: str, stage: str, name: str, grids: list[Any], args: argparse.Namespace) -> None:
    """Run the cells of a method and add their records to the committed ones."""
    folder = args.runs / f"{task}-{stage}-{name.replace(', ', '-').replace(' ', '')}"
    resume = (folder / "study.log").exists()
    plan = Grid(task=task, scale="cpu", grids=grids)
    outcome = sweep(plan, folder, workers=args.workers, threads=1, resume=resume, console=Console())
    path = RESULTS / f"{task}-{stage}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {record["id"]: record for record in (records.read(path) if path.exists() else [])}
    known.update({record["id"]: record for record in outcome.records})
    records.write(path, [known[key] for key in sorted(known)])


def tuning_grid(task: str, name: str) -> dict[str, Any]:
    """Return the nine trials of a method."""
    options, axis = METHODS[name]
    recipe = get_task(task, "cpu")
    steps = recipe.steps // 2
    rates = [recipe.lr / 2, recipe.lr, recipe.lr * 2]
    values: dict[str, Any] = {**options, **{key: list(value) for key, value in axis.items()}}
    return as_axes({**values, "lr": rates, "steps": steps, "seed": 0})


def as_axes(values: dict[str, Any]) -> dict[str, list[Any]]:
    """Return lists of values; options that are None take their defaults."""
    given = {key: value for key, value in values.items() if value is not None}
    return {key: value if isinstance(value, list) else [value] for key, value in given.items()}


def finals(task: str, name: str) -> list[dict[str, Any]]:
    """Return the final runs of a method: its best trial, or the best above each level."""
    trials = trials_of(task, name)
    if not trials:
        return []
    levels = LEVELS if name in STEERED else (0.0, *LEVELS)
    grids: list[dict[str, Any]] = []
    for level in levels:
        above = [trial for trial in trials if trial["result"]["sparsity"] >= level - 1e-3]
        if not above:
            continue
        best = max(above, key=lambda trial: float(trial["result"]["accuracy"]))["settings"]
        options = dict(best["options"])
        if name in STEERED:
            options["target"] = level
        grid = as_axes({"method": best["method"], **options, "lr": best["lr"], "seed": list(SEEDS)})
        if grid not in grids:
            grids.append(grid)
    return grids


def trials_of(task: str, name: str) -> list[Record]:
    """Return the finished trials of a method."""
    path = RESULTS / f"{task}-tune.jsonl"
    wanted = Grid(task=task, scale="cpu", grids=[tuning_grid(task, name)]).cells
    found = records.read(path) if path.exists() else []
    return [record for record in found if record["id"] in wanted]


def write_tables(task: str) -> None:
    """Write the test accuracy of each method above each level of sparsity."""
    path = RESULTS / f"{task}-final.jsonl"
    if not path.exists():
        return
    found = {record["id"]: record for record in records.read(path)}
    lines = ["| method | dense | 80 % | 90 % | 95 % |", "|---|---|---|---|---|"]
    for name in METHODS:
        grids = finals(task, name)
        runs = [
            [found[key] for key in Grid(task=task, scale="cpu", grids=[grid]).cells if key in found]
            for grid in grids
        ]
        runs = [group for group in runs if group]
        if runs:
            lines.append(f"| {name} | " + " | ".join(cell(runs, x) for x in (0.0, *LEVELS)) + " |")
    TABLES.mkdir(exist_ok=True)
    (TABLES / f"study_{task}.md").write_text("\n".join(lines) + "\n")


def cell(runs: list[list[Record]], level: float) -> str:
    """Return mean and standard deviation of the best setting above a level, over its seeds."""
    above = [g for g in runs if min(r["result"]["sparsity"] for r in g) >= level - 1e-3]
    if not above or (level == 0.0 and runs[0][0]["settings"]["method"] in ("target", "gmp")):
        return "-"
    best = max(above, key=lambda g: statistics.mean(r["result"]["accuracy"] for r in g))
    values = [float(record["result"]["test_accuracy"]) for record in best]
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {spread:.2f}"


if __name__ == "__main__":
    main()
