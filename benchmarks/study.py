"""The study of accuracy at a given sparsity: tuned methods on three tasks, reported on test splits.

    python benchmarks/study.py tune                  # choose a setting for each method and task
    python benchmarks/study.py final                 # the chosen settings at all levels
    python benchmarks/study.py ablation              # variations of the target and of the decay
    python benchmarks/study.py contours              # learning rate and lam for three p
    python benchmarks/study.py check                 # repeat a few final runs and compare them
    python benchmarks/study_deploy.py                # deploy the final networks
    python benchmarks/study_report.py                # tables and figures of docs/results.md

Every stage resumes where it was interrupted. Its records are in benchmarks/results, in the files
TASK-SCALE-STAGE.jsonl; unfinished runs are in runs/study.

Protocol. Every method gets five trials of full length with seed 0: the task's learning rate, half
and twice of it, with the middle value of the method's other setting, and the two outer values of
that setting with the task's learning rate. Methods that reach a given sparsity are tuned at 95 %
and use the same setting at the other levels. Methods with a fixed strength are judged by their best
trials above each level. The two best trials are repeated with two more seeds. The setting with the
better mean validation accuracy is chosen, and its mean test accuracy over three seeds is reported.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from pdecay.lab.sweep import Grid, sweep
from pdecay.lab.tasks import get_task
from pdecay.lab.train import records
from pdecay.lab.train.records import Record
from provenance import command

RESULTS = Path(__file__).parent / "results"
TASKS = ("shakespeare", "fashion", "cifar10")
LEVELS = (0.7, 0.8, 0.9, 0.95, 0.98)
SEEDS = (0, 1, 2)
TUNED_AT = 0.95
L2 = (0.1, 0.3, 1.0)

Options = dict[str, Any]

# The method's name in the tables, its options, and its second axis of tuning.
METHODS: dict[str, tuple[Options, dict[str, tuple[float, ...]]]] = {
    "AdamW, dense": ({"method": "adamw"}, {"weight_decay": L2}),
    "target": ({"method": "target", "target": TUNED_AT}, {"weight_decay": L2}),
    "target, scaled updates": (
        {"method": "target", "target": TUNED_AT, "update_power": 0.5},
        {"weight_decay": L2},
    ),
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
STEERED = ("target", "target, scaled updates", "GMP", "GMP, adaptive rank")
# The methods that decide the main claim run first.
FIRST = ("AdamW, dense", "GMP", "target")

_TARGET = {"method": "target", "target": TUNED_AT, "weight_decay": 0.3}
_DECAY = {"p": 0.8, "lam": 0.03}
# Variations at one setting, each with three seeds: of the target first, then of the fixed decay.
ABLATION: dict[str, Options] = {
    "dense AdamW": {"method": "adamw", "weight_decay": 0.3},
    "target": _TARGET,
    "target, scaled updates": {**_TARGET, "update_power": 0.5},
    "1 % zeros": {**_TARGET, "target": 0.01},
    "1 % zeros, scaled updates": {**_TARGET, "target": 0.01, "update_power": 0.5},
    "target, update power 0.25": {**_TARGET, "update_power": 0.25},
    "target, update power 1": {**_TARGET, "update_power": 1.0},
    "target, rank by magnitude": {**_TARGET, "rank": "magnitude", "pull": 0.0},
    "target, pull 0.3": {**_TARGET, "pull": 0.3},
    "target, pull 1": {**_TARGET, "pull": 1.0},
    "target, rank by magnitude, pull 1": {**_TARGET, "rank": "magnitude", "pull": 1.0},
    "target, L2 0": {**_TARGET, "weight_decay": 0.0},
    "target, L2 0.1": {**_TARGET, "weight_decay": 0.1},
    "target, L2 1": {**_TARGET, "weight_decay": 1.0},
    "target, ramp to 70 %": {**_TARGET, "end": 0.7},
    "GMP": {**_TARGET, "method": "gmp"},
    "GMP, ramp to 70 %": {**_TARGET, "method": "gmp", "end": 0.7},
    "GMP, adaptive rank": {**_TARGET, "method": "gmp", "rank": "adaptive"},
    "PAdam": {"method": "padam", **_DECAY},
    "PAdam, adaptive metric": {"method": "padam", **_DECAY, "metric": "adaptive"},
    "PAdam, L2 0.1": {"method": "elastic", **_DECAY, "l2": 0.1},
    "s every 10 steps": {"method": "every", **_DECAY, "n": 10},
    "s every 100 steps": {"method": "every", **_DECAY, "n": 100},
    "slow s, rate 0.1": {"method": "slow", **_DECAY, "rate": 0.1},
    "p from 2 to 0.8": {"method": "pschedule", **_DECAY},
    "p restarted 3 times": {"method": "pschedule", **_DECAY, "cycles": 4},
    "proximal step": {"method": "prox", **_DECAY},
    "zeros frozen at 70 %": {"method": "freeze", **_DECAY},
    "PAdam and MP": {"method": "padam-mp", **_DECAY, "threshold": 0.03},
    "PAdam and GMP": {"method": "padam-gmp", **_DECAY, "target": TUNED_AT},
}
CONTOUR_P = (0.5, 0.8, 1.2)
CONTOUR_LAM = (0.003, 0.01, 0.03, 0.1, 0.3)
CONTOUR_LR = (0.25, 0.5, 1.0, 2.0)  # relative to the task's
# The final runs that `check` repeats if they have records: 13 minutes for all.
CHECKED = [(task, name, 0.95) for task in ("shakespeare", "fashion") for name in FIRST]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stage", choices=("tune", "final", "ablation", "contours", "check"))
    parser.add_argument("--task", choices=TASKS, action="append", help="default: all")
    parser.add_argument("--scale", default="cpu", choices=("quick", "cpu"))
    parser.add_argument("--only", choices=METHODS, action="append", help="default: all methods")
    parser.add_argument("--first", action="store_true", help="only the methods of the main claim")
    parser.add_argument("--level", type=float, choices=LEVELS, action="append", help="default: all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="unfinished runs")
    args = parser.parse_args()
    if args.stage == "check":
        sys.exit(check(args))
    methods = args.only or (FIRST if args.first else tuple(METHODS))
    for task in args.task or TASKS:
        study = Study(task, args.scale)
        if args.stage == "ablation":
            run(study, "ablation", study.ablation_grids(), args)
        elif args.stage == "contours":
            run(study, "contours", study.contour_grids(), args)
        else:
            for name in methods:
                if args.stage == "tune":
                    run(study, "tune", study.tuning_grids(name), args)
                    run(study, "tune", study.candidates(name), args)
                else:
                    grids = study.final_grids(name, args.level or LEVELS)
                    run(study, "final", list(grids.values()), args)


def run(study: Study, stage: str, grids: list[Options], args: Any) -> None:
    """Run the cells of a stage that have no records yet, and add their records."""
    grids = study.unfinished(grids)
    if not grids:
        return
    plan = study.plan(grids)
    folder = args.runs / f"{study.task}-{study.scale}-{stage}-{plan.identity}"
    resume = (folder / "study.log").exists()
    outcome = sweep(plan, folder, workers=args.workers, threads=1, resume=resume, console=Console())
    study.add(stage, [{**record, "command": command()} for record in outcome.records])


class Study:
    """The runs of a task at a scale, as grids for a sweep, and their records."""

    def __init__(self, task: str, scale: str) -> None:
        self.task, self.scale = task, scale
        self.recipe = get_task(task, scale)

    def path(self, stage: str) -> Path:
        """Return the file of a stage's records."""
        return RESULTS / f"{self.task}-{self.scale}-{stage}.jsonl"

    @functools.cached_property
    def found(self) -> dict[str, Record]:
        """The records of all stages by id."""
        stages = ("tune", "final", "ablation", "contours")
        return {key: r for stage in stages for key, r in _by_id(self.path(stage)).items()}

    def add(self, stage: str, new: Iterable[Record]) -> None:
        """Add records to the file of a stage."""
        path = self.path(stage)
        known = _by_id(path) | {record["id"]: record for record in new}
        path.parent.mkdir(parents=True, exist_ok=True)
        records.write(path, [known[key] for key in sorted(known)])
        self.found |= known

    def plan(self, grids: list[Options]) -> Grid:
        """Return the grids as a plan for a sweep."""
        return Grid(task=self.task, scale=self.scale, grids=grids)

    def runs(self, *grids: Options) -> list[Record]:
        """Return the finished runs of grids."""
        cells = self.plan(list(grids)).cells
        return [self.found[key] for key in cells if key in self.found]

    def unfinished(self, grids: list[Options]) -> list[Options]:
        """Return a grid of one cell for each run that has no record."""
        if not grids:
            return []
        cells = self.plan(grids).cells
        left = cells.keys() - self.found.keys()
        return [_cell(settings.to_dict()) for key, settings in cells.items() if key in left]

    def tuning_grids(self, name: str) -> list[Options]:
        """Return the five trials of a method: three learning rates, and two other strengths."""
        options, axis = METHODS[name]
        (setting, (low, middle, high)), lr = *axis.items(), self.recipe.lr
        return [
            _axes({**options, setting: middle, "lr": [lr / 2, lr, lr * 2], "seed": 0}),
            _axes({**options, setting: [low, high], "lr": lr, "seed": 0}),
        ]

    def candidates(self, name: str, levels: Iterable[float] = (0.0, *LEVELS)) -> list[Options]:
        """Return the two best trials above any of the levels, with three seeds."""
        trials = sorted(self.runs(*self.tuning_grids(name)), key=_accuracy, reverse=True)
        best = []
        for level in levels:
            above = [r for r in trials if r["result"]["sparsity"] >= level - 1e-3]
            best += [r for r in (trials if name in STEERED else above)[:2] if r not in best]
        return [{**_cell(record["settings"]), "seed": list(SEEDS)} for record in best]

    def final_grids(self, name: str, levels: Iterable[float] = LEVELS) -> dict[float, Options]:
        """Return the final runs of a method for each level; level 0 asks for no zeros."""
        grids: dict[float, Options] = {}
        for level in (0.0, *levels) if name not in STEERED else levels:
            candidates = self.candidates(name, [level])
            if not candidates:
                continue
            best = max(
                candidates, key=lambda grid: statistics.mean(map(_accuracy, self.runs(grid)))
            )
            grids[level] = {**best, **({"target": [level]} if name in STEERED else {})}
        return grids

    def ablation_grids(self) -> list[Options]:
        """Return the variations, three seeds each."""
        return [_axes({**options, "seed": SEEDS}) for options in ABLATION.values()]

    def contour_grids(self) -> list[Options]:
        """Return the grid over learning rate and lam for three p."""
        rates = [self.recipe.lr * factor for factor in CONTOUR_LR]
        return [_axes({"method": "padam", "p": CONTOUR_P, "lam": CONTOUR_LAM, "lr": rates})]


def check(args: argparse.Namespace) -> int:
    """Repeat some final runs with seed 0; return 1 if one is outside the spread of the seeds."""
    console, failed = Console(), 0
    for task, name, level in CHECKED:
        study = Study(task, "cpu")
        grids = study.final_grids(name)
        grid = grids.get(level, grids.get(0.0))
        if grid is None or len(study.runs(grid)) < 2:
            console.print(f"{task}, {name}: no committed runs")
            continue
        known = accuracies_on_test(study.runs(grid))
        folder = args.runs / f"check-{task}-{name.split(',')[0]}"
        plan = study.plan([{**grid, "seed": [0]}])
        resume = (folder / "study.log").exists()
        outcome = sweep(plan, folder, workers=1, threads=1, resume=resume, console=console)
        (value,) = accuracies_on_test(outcome.records)
        mean, spread = statistics.mean(known), max(0.2, 3 * statistics.stdev(known))
        passed = abs(value - mean) <= spread
        failed += not passed
        console.print(
            f"{task}, {name}: {value:.2f}, committed {mean:.2f} ± {spread:.2f}: "
            f"{'repeated' if passed else 'NOT REPEATED'}"
        )
    return int(failed > 0)


def accuracies_on_test(runs: Iterable[Record]) -> list[float]:
    """Return the test accuracies of runs."""
    return [float(record["result"]["test_accuracy"]) for record in runs]


def _accuracy(record: Record) -> float:
    return float(record["result"]["accuracy"])


def _by_id(path: Path) -> dict[str, Record]:
    return {record["id"]: record for record in records.read(path)} if path.exists() else {}


def _cell(settings: Mapping[str, Any]) -> Options:
    """Return the grid with only the run of these settings."""
    options = {key: value for key, value in settings["options"].items() if value is not None}
    shared = {key: settings[key] for key in ("method", "lr", "seed", "steps")}
    return _axes({**shared, **options})


def _axes(options: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return each option as a list of values."""
    return {
        key: list(value) if isinstance(value, tuple | list) else [value]
        for key, value in options.items()
    }


if __name__ == "__main__":
    main()
