"""Measure how exactly SparsityTarget reaches its target, and its accuracy, as JSON lines.

    python benchmarks/sparsity_target.py grid       # final sparsity over tasks, p, targets and lr
    python benchmarks/sparsity_target.py compare    # accuracy against GMP and a fixed lam
    python benchmarks/sparsity_target.py tables     # docs/_data/*.md from the records

Each run is a lab task at scale ``quick`` on one thread. Cells with a record are skipped, so an
interrupted set can be continued. The data are looked up in PDECAY_DATA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from pdecay.lab.methods import Method
from pdecay.lab.methods.decay import AdamWMethod, ElasticMethod, TargetMethod
from pdecay.lab.methods.magnitude import GMPMethod
from pdecay.lab.tasks import cached_task
from pdecay.lab.train.loop import Trainer

RECORDS = Path(__file__).parent / "records"
TABLES = Path(__file__).parents[1] / "docs" / "_data"

TASKS = ("digits", "fashion", "cifar10", "shakespeare")
P = (0.5, 0.8, 1.0, 1.2)
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
COMPARED = ("shakespeare", "cifar10")
LEVELS = (0.9, 0.95)
SEEDS = (0, 1, 2)
# Learning rates for every method, relative to the task's rate for AdamW.
TUNED = (1.0,)
FIXED_LAM = (0.003, 0.01, 0.02, 0.03, 0.06, 0.08, 0.1, 0.15)


def method_of(cell: dict) -> Method:
    """Return the lab's method for a cell."""
    l2 = cell.get("l2", 0.0)
    if cell["method"] == "target":
        return TargetMethod(p=cell["p"], target=cell["target"], weight_decay=0.0, rank="magnitude")
    if cell["method"] == "gmp":
        return GMPMethod(target=cell["target"], weight_decay=l2)
    if cell["method"] == "fixed":
        return ElasticMethod(p=cell["p"], lam=cell["lam"], l2=l2)
    return AdamWMethod(weight_decay=l2)


def run(cell: dict) -> dict:
    """Train once and return the cell with its results."""
    torch.set_num_threads(1)
    task = cached_task(cell["task"], "quick", "cpu")
    steps = max(50, round(cell.get("length", 1.0) * task.steps))
    began = time.perf_counter()
    trainer = Trainer(
        task, method_of(cell), seed=cell["seed"], lr=cell["lr"] * task.lr, steps=steps, points=0
    )
    for _ in trainer.train():
        pass
    result = trainer.finish()
    return {
        **cell,
        "steps": steps,
        **{name: result[name] for name in ("sparsity", "accuracy", "test_accuracy", "loss")},
        "seconds": round(time.perf_counter() - began, 1),
    }


def grid() -> list[dict]:
    """Return cells for every task, p, target and learning rate, at a quarter of the length."""
    return [
        {
            "method": "target",
            "task": name,
            "p": p,
            "target": target,
            "lr": lr,
            "seed": 0,
            "length": 0.25,
        }
        for name, p, target, lr in itertools.product(TASKS, P, TARGETS, (1.0, 0.1))
    ]


def compare() -> list[dict]:
    """Return cells that compare the accuracy at equal sparsity, steps and tuning."""
    cells = []
    for name, lr, seed in itertools.product(COMPARED, TUNED, SEEDS):
        base = {"task": name, "lr": lr, "seed": seed}
        cells.append({**base, "method": "dense"})
        for target in LEVELS:
            cells.append({**base, "method": "target", "p": 0.8, "target": target})
            cells.append({**base, "method": "gmp", "target": target})
    for name, lam, seed in itertools.product(COMPARED, FIXED_LAM, SEEDS):
        cells.append(
            {"task": name, "lr": 1.0, "seed": seed, "method": "fixed", "p": 0.8, "lam": lam}
        )
    return sorted(cells, key=lambda cell: cell["task"])


def key(cell: dict) -> str:
    names = ("method", "task", "p", "lam", "target", "lr", "seed", "length", "l2")
    return json.dumps([cell.get(name) for name in names])


def read(name: str) -> list[dict]:
    path = RECORDS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_all(name: str, cells: list[dict], workers: int) -> None:
    done = {key(record) for record in read(name)}
    todo = [cell for cell in cells if key(cell) not in done]
    print(f"{len(cells)} runs, {len(todo)} to do", flush=True)
    RECORDS.mkdir(exist_ok=True)
    with ProcessPoolExecutor(workers) as pool, open(RECORDS / f"{name}.jsonl", "a") as file:
        for count, future in enumerate(
            as_completed([pool.submit(run, cell) for cell in todo]), start=1
        ):
            record = future.result()
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(f"{count}/{len(todo)}", record, flush=True)


def grid_table(records: list[dict]) -> str:
    """Return a table of the final sparsity for each task, p, learning rate and target."""
    lines = [
        "| task | p | lr | " + " | ".join(f"{100 * target:g} %" for target in TARGETS) + " |",
        "|---|---|---|" + "---|" * len(TARGETS),
    ]
    found = {(one["task"], one["p"], one["lr"], one["target"]): one for one in records}
    for name, p, lr in itertools.product(TASKS, P, (1.0, 0.1)):
        cells = [found.get((name, p, lr, target)) for target in TARGETS]
        if not any(cells):
            continue
        shown = [
            f"{100 * cell['sparsity']:.2f} ({cell['accuracy']:.1f})" if cell else ""
            for cell in cells
        ]
        lines.append(f"| {name} | {p:g} | x {lr:g} | " + " | ".join(shown) + " |")
    worst = max(abs(one["sparsity"] - one["target"]) for one in records)
    lines.append("")
    lines.append(
        f"{len(records)} runs; the largest distance between target and result is "
        f"{100 * worst:.3f} points."
    )
    return "\n".join(lines) + "\n"


def compare_table(records: list[dict]) -> str:
    """Return a table of mean and deviation over seeds, at each method's best learning rate."""
    lines = ["| task | sparsity | method | lr | accuracy % |", "|---|---|---|---|---|"]
    for name in COMPARED:
        dense = _best([one for one in records if (one["task"], one["method"]) == (name, "dense")])
        title = "Adam without decay, dense"
        lines.append(f"| {name} | 0 | {title} | x {dense[0]:g} | {_shown(dense[1])} |")
        for target in LEVELS:
            for method, title in (
                ("gmp", "gradual magnitude pruning"),
                ("target", "SparsityTarget"),
            ):
                chosen = [
                    one
                    for one in records
                    if (one["task"], one["method"], one.get("target")) == (name, method, target)
                ]
                lr, accuracies = _best(chosen)
                lines.append(
                    f"| {name} | {100 * target:g} % | {title} | x {lr:g} | {_shown(accuracies)} |"
                )
            at_level = [_fixed_at(records, name, seed, target) for seed in SEEDS]
            lines.append(
                f"| {name} | {100 * target:g} % | fixed lam, between two runs | x 1 | "
                f"{_shown(at_level)} |"
            )
    return "\n".join(lines) + "\n"


def _best(records: list[dict]) -> tuple[float, list[float]]:
    """Return the learning rate with the best mean over seeds, and its accuracies."""
    by_lr: dict[float, list[float]] = {}
    for one in records:
        by_lr.setdefault(one["lr"], []).append(one["accuracy"])
    return max(by_lr.items(), key=lambda item: statistics.mean(item[1]))


def _fixed_at(records: list[dict], name: str, seed: int, target: float) -> float:
    """Interpolate the accuracy of a fixed lam at a sparsity between two runs."""
    runs = sorted(
        (one["sparsity"], one["accuracy"])
        for one in records
        if (one["task"], one["method"], one["seed"]) == (name, "fixed", seed)
    )
    for (s0, a0), (s1, a1) in itertools.pairwise(runs):
        if s0 <= target <= s1:
            return a0 + (a1 - a0) * (target - s0) / (s1 - s0) if s1 > s0 else a0
    raise SystemExit(f"no fixed lam on {name}, seed {seed}, reaches sparsity {target}: {runs}")


def _shown(accuracies: list[float]) -> str:
    return f"{statistics.mean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("grid", "compare", "tables"))
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.what == "tables":
        TABLES.mkdir(exist_ok=True)
        (TABLES / "target_grid.md").write_text(grid_table(read("target_grid")))
        (TABLES / "target_compare.md").write_text(compare_table(read("target_compare")))
        return
    cells = {"grid": grid, "compare": compare}[arguments.what]()
    run_all(f"target_{arguments.what}", cells, arguments.workers)


if __name__ == "__main__":
    main()
