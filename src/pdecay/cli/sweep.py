"""``pdecay sweep``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdecay.cli.common import Command, UsageError, check_writable, natural_number, option
from pdecay.cli.train import OPTIONS

if TYPE_CHECKING:
    from rich.console import Console

    from pdecay.lab.sweep import Outcome, Plan


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", metavar="TASK", help="digits, fashion, cifar10 or shakespeare")
    parser.add_argument(
        "--scale", default="cpu", metavar="NAME", help="quick, cpu or paper (default: cpu)"
    )
    _cell_arguments(parser)
    _search_arguments(parser)
    running = parser.add_argument_group("how it is run")
    running.add_argument(
        "--workers", type=_positive, default=1, metavar="N", help="processes here (default: 1)"
    )
    running.add_argument(
        "--threads", type=_positive, metavar="N", help="of each worker (default: cores / workers)"
    )
    running.add_argument("--device", metavar="NAME", help="cpu, cuda, ... (default: cpu)")
    running.add_argument(
        "--checkpoint-every",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how often a run saves what it goes on from (default: 30)",
    )
    running.add_argument(
        "--out", type=Path, metavar="DIR", help="where the runs live (default: runs/TASK-sweep)"
    )
    running.add_argument(
        "--resume",
        action="store_true",
        help="go on with the study that is there, or join others at it; start it if there is none",
    )
    running.add_argument(
        "--retry-failed",
        action="store_true",
        help="with --resume: give runs that were given up another try",
    )
    machines = parser.add_argument_group("many machines")
    machines.add_argument(
        "--storage",
        metavar="URL",
        help="a database that all reach, such as postgresql://me@host/sweeps (default: a journal "
        "file in --out)",
    )
    machines.add_argument(
        "--study", metavar="NAME", help="the study's name there (default: the name of --out)"
    )
    machines.add_argument(
        "--grace",
        type=_seconds,
        default=90.0,
        metavar="SECONDS",
        help="silence after which a worker elsewhere is held for dead (default: 90)",
    )


def _cell_arguments(parser: argparse.ArgumentParser) -> None:
    cells = parser.add_argument_group(
        "what is run: each value of an option with each of the others; a method takes the options "
        "that it has"
    )
    cells.add_argument(
        "--method",
        nargs="+",
        metavar="NAME",
        help="any of adamw, padam, elastic, target, mp, gmp, oto, dwf, l1, my_module:MyMethod "
        "(default: padam)",
    )
    for name, (kind, text) in {
        "lr": (float, "the highest learning rate (default: the task's)"),
        "seed": (int, "equal seeds, equal results (default: 0)"),
        "steps": (int, "how many (default: the task's)"),
        **OPTIONS,
    }.items():
        flag = f"--{name.replace('_', '-')}"
        cells.add_argument(flag, dest=name, nargs="+", type=_value(kind), metavar="X", help=text)
    cells.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any option, for a method of your own; again for another value",
    )
    cells.add_argument(
        "--cells", type=Path, metavar="FILE", help="a TOML file with several grids, instead"
    )


def _search_arguments(parser: argparse.ArgumentParser) -> None:
    search = parser.add_argument_group(
        "searches: Optuna chooses; LOW:HIGH is a range, logarithmic from a factor of 10 on"
    )
    search.add_argument("--sampler", metavar="NAME", help="tpe, nsga2 or random (default: a grid)")
    search.add_argument("--trials", type=_positive, metavar="N", help="how many runs")
    search.add_argument(
        "--sampler-seed", type=natural_number, default=0, metavar="N", help="(default: 0)"
    )
    search.add_argument(
        "--objective",
        default="pareto",
        metavar="NAME",
        help="what is maximised: pareto (accuracy and sparsity), tradeoff (the paper's: accuracy "
        "in %% + sparsity) or accuracy (default: pareto)",
    )


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from pdecay.lab import sweep
    from pdecay.lab.data.sources import DataError

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
    except (DataError, sweep.PlanError, sweep.StorageError, sweep.StudyError) as error:
        raise UsageError(" ".join(str(error).split())) from None
    except sweep.SweepError as error:
        raise UsageError(f"{error}. Nothing is lost: continue with --resume") from None
    except sweep.SweepStoppedError:
        console.print("stopped; to continue, run the same command with --resume", soft_wrap=True)
        return 130
    return _tell(console, outcome, out)


def _plan(args: argparse.Namespace) -> Plan:
    from pdecay.lab.sweep import Grid, Range, Search, read_grids

    common = {"task": args.task, "scale": args.scale, "objective": args.objective}
    axes = {
        name: [Range(*value) if isinstance(value, tuple) else value for value in values]
        for name, values in _axes(args).items()
    }
    if args.cells is not None:
        if axes or args.sampler:
            given = _flag(next(iter(axes))) if axes else "--sampler"
            raise UsageError(f"--cells has all runs in its file: {given} cannot stand beside it")
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
        raise UsageError("--trials needs --sampler: a grid has the runs that it has")
    for name, values in axes.items():
        if any(isinstance(value, Range) for value in values):
            raise UsageError(f"{_flag(name)} has a range, which needs --sampler; a grid has values")
    return Grid(grids=[axes], **common)


def _axes(args: argparse.Namespace) -> dict[str, list[Any]]:
    """The values that were given, by the names of what they are for."""
    names = ("method", *OPTIONS, "lr", "seed", "steps")
    axes = {name: list(getattr(args, name)) for name in names if getattr(args, name) is not None}
    for text in args.option:
        name, value = option(text)
        axes.setdefault(name, []).append(value)
    return axes


def _tell(console: Console, outcome: Outcome, out: Path) -> int:
    from rich.text import Text

    diverged = sum(record["status"] != "ok" for record in outcome.records)
    counts = {
        "done": len(outcome.records) - diverged,
        "diverged": diverged,
        "given up": len(outcome.failed),
    }
    told = [", ".join(f"{count} {what}" for what, count in counts.items() if count)]
    if outcome.records:
        told += [f"records    {out / 'records.jsonl'}", f"next       pdecay report {out}"]
    for name, error in outcome.failed.items():
        told.append(f"given up   {name}: {error.strip().splitlines()[-1]}")
    if outcome.failed:
        told.append(f"in full    {out / 'errors.txt'}; after a cure: --resume --retry-failed")
    for line in told:
        console.print(Text(line), soft_wrap=True)
    return int(bool(outcome.failed))


def _value(kind: type) -> Callable[[str], Any]:
    """For argparse: a number, or LOW:HIGH as a pair."""

    def parse(text: str) -> Any:
        parts = text.split(":")
        try:
            numbers = [kind(part) for part in parts]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2):
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {what} or LOW:HIGH, got {text!r}")
        return tuple(numbers) if len(numbers) == 2 else numbers[0]

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds >= 0, got {text!r}")
    return seconds


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


COMMAND = Command(
    "sweep",
    "train many networks, over all values of some options or where Optuna looks",
    "pdecay sweep shakespeare --method adamw padam --p 0.5 0.8 --lam 0.003 0.01 0.03 "
    "--lr 3e-3 1e-2 --workers 2 --out runs/my-sweep",
    _arguments,
    _run,
)
