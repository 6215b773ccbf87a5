"""``pdecay sweep``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdecay.cli.common import (
    UsageError,
    add,
    check_writable,
    count,
    flag,
    natural_number,
    option,
    seconds,
)
from pdecay.cli.train import METHODS, OPTIONS, add_option, add_running, add_task

if TYPE_CHECKING:
    from rich.console import Console

    from pdecay.lab.sweep import Outcome, Plan

SUMMARY = "train many networks: a grid of options, or an Optuna search"
EXAMPLE = (
    "pdecay sweep shakespeare --method adamw padam --p 0.5 0.8 --lam 0.003 0.01 0.03 "
    "--lr 3e-3 1e-2 --workers 2 --out runs/my-sweep"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_task(parser)
    _add_cells(parser)
    _add_search(parser)
    running = parser.add_argument_group("execution")
    add(running, "--workers", "worker processes", count, 1)
    threads = "torch threads of each worker (default: cores / workers)"
    add_running(running, threads=threads, out="runs/TASK-sweep")
    add(running, "--resume", "continue or join a study, or start a new one", bool)
    add(running, "--retry-failed", "with --resume: retry runs that were given up", bool)
    machines = parser.add_argument_group("many machines")
    text = "a database that all machines reach, such as postgresql://me@host/sweeps"
    add(machines, "--storage", f"{text} (default: a journal file in --out)", metavar="URL")
    add(machines, "--study", "the study's name in the database (default: the name of --out)")
    text = "the time without a heartbeat after which a run on another machine is started again"
    add(machines, "--grace", text, seconds, 90.0)


def _add_cells(parser: argparse.ArgumentParser) -> None:
    cells = parser.add_argument_group(
        "runs: every combination of the values; a method takes only the options that it has"
    )
    add(cells, "--method", f"{METHODS} (default: padam)", nargs="+")
    for name, (kind, text) in {
        "lr": (float, "the peak learning rate (default: the task's)"),
        "seed": (int, "random seed (default: 0)"),
        "steps": (int, "the number of steps (default: the task's)"),
        **OPTIONS,
    }.items():
        add(cells, flag(name), text, _value_or_range(kind), dest=name, nargs="+")
    add_option(cells, ", for a custom method; repeat it for more values")
    add(cells, "--cells", "a TOML file of grids, instead of the above", Path)


def _add_search(parser: argparse.ArgumentParser) -> None:
    search = parser.add_argument_group(
        "searches: a sampler chooses values; LOW:HIGH is a range, logarithmic if HIGH >= 10 * LOW"
    )
    add(search, "--sampler", "tpe, nsga2 or random (default: a grid)")
    add(search, "--trials", "the number of runs", count)
    add(search, "--sampler-seed", "random seed of the sampler", natural_number, 0)
    text = (
        "the value to maximise: pareto (accuracy and sparsity), tradeoff (the paper's: accuracy "
        "in %% + sparsity) or accuracy"
    )
    add(search, "--objective", text, default="pareto")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from pdecay.lab import sweep

    if args.retry_failed and not args.resume:
        raise UsageError("--retry-failed needs --resume")
    out = args.out or Path("runs") / f"{args.task}-sweep"
    console = Console()
    try:
        plan = _plan(args)
        check_writable(out)
        outcome = sweep.sweep(
            plan,
            out,
            storage=args.storage,
            study=args.study,
            workers=args.workers,
            threads=args.threads,
            device=args.device,
            checkpoint_every=args.checkpoint_every,
            grace=args.grace,
            resume=args.resume,
            retry_failed=args.retry_failed,
            console=console,
        )
    except (sweep.SweepStoppedError, KeyboardInterrupt):
        console.print("stopped; to continue, run the same command with --resume", soft_wrap=True)
        return 130
    return _report(console, outcome, out)


def _plan(args: argparse.Namespace) -> Plan:
    from pdecay.lab.sweep import Grid, Range, Search, read_grids

    common = {"task": args.task, "scale": args.scale, "objective": args.objective}
    axes = {
        name: [Range(*value) if isinstance(value, tuple) else value for value in values]
        for name, values in _axes(args).items()
    }
    if args.cells is not None:
        if axes or args.sampler:
            given = flag(next(iter(axes))) if axes else "--sampler"
            raise UsageError(
                f"--cells cannot be combined with {given}: write all values into the file"
            )
        return Grid(grids=read_grids(args.cells), **common)
    axes.setdefault("method", ["padam"])
    if args.sampler is not None:
        if args.trials is None:
            raise UsageError("--sampler needs --trials, the number of runs")
        seed = args.sampler_seed
        return Search(
            axes=axes, sampler=args.sampler, trials=args.trials, sampler_seed=seed, **common
        )
    if args.trials is not None:
        raise UsageError("--trials needs --sampler: a grid has a fixed number of runs")
    for name, values in axes.items():
        if any(isinstance(value, Range) for value in values):
            raise UsageError(
                f"{flag(name)} has a range, which needs --sampler; a grid needs values"
            )
    return Grid(grids=[axes], **common)


def _axes(args: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the values that were given, by setting."""
    names = ("method", *OPTIONS, "lr", "seed", "steps")
    axes = {name: list(getattr(args, name)) for name in names if getattr(args, name) is not None}
    for text in args.option:
        name, value = option(text)
        axes.setdefault(name, []).append(value)
    return axes


def _report(console: Console, outcome: Outcome, out: Path) -> int:
    from rich.text import Text

    diverged = sum(record["status"] != "ok" for record in outcome.records)
    counts = {
        "done": len(outcome.records) - diverged,
        "diverged": diverged,
        "given up": len(outcome.failed),
    }
    lines = [", ".join(f"{number} {name}" for name, number in counts.items() if number)]
    if outcome.records:
        lines += [f"records    {out / 'records.jsonl'}", f"next       pdecay report {out}"]
    for name, error in outcome.failed.items():
        lines.append(f"given up   {name}: {error.strip().splitlines()[-1]}")
    if outcome.failed:
        lines.append(f"details    {out / 'errors.txt'}; to try again: --resume --retry-failed")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    return int(bool(outcome.failed))


def _value_or_range(kind: type) -> Callable[[str], Any]:
    """Return an argparse type for a number, or for LOW:HIGH as a pair of numbers."""

    def parse(text: str) -> Any:
        try:
            numbers = [kind(part) for part in text.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2):
            noun = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {noun} or LOW:HIGH, got {text!r}")
        return tuple(numbers) if len(numbers) == 2 else numbers[0]

    return parse
