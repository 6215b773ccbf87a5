"""Deploy the final networks of the study, and measure accuracy, file size and latency.

    python benchmarks/study_deploy.py                # all tasks with final runs
    python benchmarks/study_deploy.py --task fashion

Run it on an idle machine, then run study_report.py. Networks whose weights are not in a folder
below ``--runs`` are trained first. Latencies are of one example. Warm calls follow each other;
before a cold call, the caches are filled with other data.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pdecay
from pdecay.deployment.runtime.timing import interleaved
from pdecay.lab import machine
from pdecay.lab.train.training import RECORD, WEIGHTS, train
from provenance import provenance
from study import TASKS, Study

NETWORKS = (
    ("AdamW, dense", 0.0),
    ("target", 0.9),
    ("target", 0.95),
    ("target, scaled updates", 0.9),
    ("target, scaled updates", 0.95),
)
CACHE_BYTES = 1 << 28  # more than the caches hold
COLD_CALLS = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=TASKS, action="append", help="default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="folder of the runs")
    args = parser.parse_args()
    for task in args.task or TASKS:
        study = Study(task, "cpu")
        if study.path("final").exists():
            rows = [
                measure(study, name, level, args)
                for name, level in NETWORKS
                if has_runs(study, name, level)
            ]
            lines = [json.dumps({**row, **provenance()}) + "\n" for row in rows]
            study.path("deploy").write_text("".join(lines))


def has_runs(study: Study, name: str, level: float) -> bool:
    """Return whether the study has final runs of a method at a level of sparsity."""
    grid = study.final_grids(name).get(level)
    return grid is not None and bool(study.runs(grid))


def measure(study: Study, name: str, level: float, args: argparse.Namespace) -> dict[str, Any]:
    """Deploy the network with seed 0 of a method at a level of sparsity."""
    grid = study.final_grids(name)[level]
    ((key, settings),) = study.plan([{**grid, "seed": [0]}]).cells.items()
    finished = [path.parent for path in args.runs.glob(f"**/{key}/{RECORD}")]
    folder = finished[0] if finished else args.runs / "deploy" / key
    train(settings, folder, threads=1)
    model = study.recipe.model(0)
    model.load_state_dict(torch.load(folder / WEIGHTS, weights_only=True))
    model.eval()
    inputs, _ = next(iter(study.recipe.validation()))
    x = inputs[:1].clone()
    with machine.use_threads(args.threads), torch.inference_mode():
        deployed = pdecay.deploy(model, x)
        both = [functools.partial(one, x) for one in (model, deployed)]
        warm = interleaved(both, rounds=7, seconds=2.0, turn=20e-3).seconds
        cold = _cold_seconds(both)
    print(
        f"{study.task}, {name}, {level:.0%}: {warm[0] / warm[1]:.2f}, cold {cold[0] / cold[1]:.2f}"
    )
    return {
        "method": name,
        "level": level,
        "id": key,
        "threads": args.threads,
        "zeros": pdecay.sparsity(model).total,
        "test_accuracy": study.recipe.evaluate(model, "test")["accuracy"],
        "deployed_test_accuracy": study.recipe.evaluate(deployed, "test")["accuracy"],
        "file_bytes": _file_size(model),
        "original_us": {"warm": 1e6 * warm[0], "cold": 1e6 * cold[0]},
        "deployed_us": {"warm": 1e6 * warm[1], "cold": 1e6 * cold[1]},
    }


def _cold_seconds(functions: list[functools.partial[Tensor]]) -> list[float]:
    """Return the median seconds of calls with cold caches, measured in turns."""
    other = torch.zeros(CACHE_BYTES // 4)
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(COLD_CALLS):
        for function, times in zip(functions, taken, strict=True):
            other.add_(1.0)
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in taken]


def _file_size(model: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        pdecay.save(model, path)
        return path.stat().st_size


if __name__ == "__main__":
    main()
