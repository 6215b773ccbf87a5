"""Measure how exactly SparsityTarget reaches its target, over tasks, p, targets and lr.

    python benchmarks/sparsity_target.py runs       # records/target_grid.jsonl
    python benchmarks/sparsity_target.py table      # docs/_data/target_grid.md from the records

Each run is a lab task at scale ``quick``, at a quarter of its length, on one thread. Cells with a
record are skipped, so an interrupted set can be continued. The data are looked up in PDECAY_DATA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from pdecay.lab.methods.decay import TargetMethod
from pdecay.lab.tasks import cached_task
from pdecay.lab.train.loop import Trainer

RECORDS = Path(__file__).parent / "records" / "target_grid.jsonl"
TABLE = Path(__file__).parents[1] / "docs" / "_data" / "target_grid.md"

TASKS = ("digits", "fashion", "cifar10", "shakespeare")
P = (0.5, 0.8, 1.0, 1.2)
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
LR = (1.0, 0.1)  # relative to the task's rate for AdamW
LENGTH = 0.25


def run(cell: dict) -> dict:
    """Train once and return the cell with its results."""
    torch.set_num_threads(1)
    task = cached_task(cell["task"], "quick", "cpu")
    steps = max(50, round(LENGTH * task.steps))
    method = TargetMethod(p=cell["p"], target=cell["target"], weight_decay=0.0, rank="magnitude")
    began = time.perf_counter()
    trainer = Trainer(task, method, seed=0, lr=cell["lr"] * task.lr, steps=steps, points=0)
    for _ in trainer.train():
        pass
    result = trainer.finish()
    return {
        **cell,
        "steps": steps,
        **{name: result[name] for name in ("sparsity", "accuracy", "test_accuracy", "loss")},
        "seconds": round(time.perf_counter() - began, 1),
    }


def cells() -> list[dict]:
    """Return a cell for every task, p, target and learning rate."""
    names = ("task", "p", "target", "lr")
    return [
        dict(zip(names, cell, strict=True)) for cell in itertools.product(TASKS, P, TARGETS, LR)
    ]


def key(cell: dict) -> tuple:
    return cell["task"], cell["p"], cell["target"], cell["lr"]


def read() -> list[dict]:
    return (
        [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []
    )


def run_all(workers: int) -> None:
    done = {key(record) for record in read()}
    todo = [cell for cell in cells() if key(cell) not in done]
    print(f"{len(cells())} runs, {len(todo)} to do", flush=True)
    with ProcessPoolExecutor(workers) as pool, open(RECORDS, "a") as file:
        futures = [pool.submit(run, cell) for cell in todo]
        for count, future in enumerate(as_completed(futures), start=1):
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
    found = {key(record): record for record in records}
    for name, p, lr in itertools.product(TASKS, P, LR):
        row = [found[name, p, target, lr] for target in TARGETS]
        shown = [f"{100 * one['sparsity']:.2f} ({one['accuracy']:.1f})" for one in row]
        lines.append(f"| {name} | {p:g} | x {lr:g} | " + " | ".join(shown) + " |")
    worst = max(abs(one["sparsity"] - one["target"]) for one in records)
    lines.append("")
    lines.append(
        f"{len(records)} runs; the largest distance between target and result is "
        f"{100 * worst:.3f} points."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("runs", "table"))
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.what == "runs":
        run_all(arguments.workers)
    else:
        TABLE.write_text(grid_table(read()))


if __name__ == "__main__":
    main()
