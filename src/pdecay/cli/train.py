"""``pdecay train``, and the arguments that it shares with ``pdecay sweep``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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

SUMMARY = "train one sparse network; the same command resumes a killed run"
EXAMPLE = "pdecay train shakespeare --method target --target 0.9 --lr 1e-2 --out runs/my-run"

METHODS = (
    "adamw, padam, elastic, target, mp, gmp, oto, dwf, l1, every, slow, pschedule, prox, freeze, "
    "padam-mp, padam-gmp or my_module:MyMethod"
)

# The options of the methods in pdecay.lab, which --help does not import because it is slow. The
# documentation ("Experiments") lists the options of each method.
OPTIONS: dict[str, tuple[type, str]] = {
    "p": (float, "the exponent of the p-norm"),
    "lam": (float, "the strength of the p-norm decay"),
    "l2": (float, "elastic: the strength of the additional L2 decay"),
    "metric": (str, "padam: how the decay measures weights: magnitude or adaptive"),
    "target": (float, "target, gmp: the share of zero weights; oto: of zero units"),
    "rank": (str, "target, gmp: the order of removal: adaptive or magnitude"),
    "pull": (float, "target: how fast the decay shrinks the weights that are removed next"),
    "update_power": (
        float,
        "target: the power of the weights that scales the updates, from 0 to 1",
    ),
    "end": (float, "target, gmp: the end of the ramp, as a share of the training"),
    "threshold": (float, "mp: weights below it are pruned"),
    "depth": (int, "dwf: the number of factors of a weight"),
    "eps": (float, "oto: how early a unit is set to zero, from 0 to 1"),
    "n": (int, "every: the number of steps between two updates of the auxiliary variable s"),
    "rate": (float, "slow: how fast s follows the weights, from 0 to 1"),
    "cycles": (int, "pschedule: how often p falls from 2"),
    "share": (float, "pschedule: the share of a cycle in which p falls"),
    "after": (float, "freeze: the share of the training after which nothing decays"),
    "weight_decay": (float, "AdamW's L2 decay"),
}


def add_task(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a task."""
    add(parser, "task", "digits, fashion, cifar10 or shakespeare", metavar="TASK")
    add(parser, "--scale", "quick, cpu or paper", default="cpu")


def add_running(parser: Any, *, threads: str, out: str) -> None:
    """Add the arguments that say how runs are executed, to a parser or a group."""
    add(parser, "--device", "cpu, cuda, ... (default: cpu)")
    add(parser, "--threads", threads, count)
    add(parser, "--checkpoint-every", "the time between two checkpoints of a run", seconds, 30.0)
    add(parser, "--out", f"output folder (default: {out})", Path, metavar="DIR")


def add_option(parser: Any, text: str) -> None:
    """Add the argument ``--option NAME=VALUE`` for custom methods."""
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"any other option{text}",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_task(parser)
    add(parser, "--method", METHODS, default="padam")
    add(parser, "--seed", "random seed", natural_number, 0)
    add(parser, "--lr", "the peak learning rate (default: the task's)", float)
    add(parser, "--steps", "the number of steps (default: the task's)", int)
    add_running(parser, threads="torch threads (default: torch's)", out="runs/TASK-METHOD-ID")
    add(parser, "--json", "print the record as JSON, and progress to standard error", bool)
    options = parser.add_argument_group("options of the methods")
    for name, (kind, text) in OPTIONS.items():
        add(options, flag(name), text, kind, dest=name, metavar="X")
    add_option(options, ", for a custom method")


def _chosen_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the method options that were given."""
    chosen = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    for text in args.option:
        name, value = option(text)
        if name in ("scale", "seed", "lr", "steps"):
            raise UsageError(f"--option is for the method's options; use --{name} {value}")
        chosen[name] = value
    return chosen


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from pdecay.lab.train import command
    from pdecay.lab.train.training import Settings

    try:
        settings = Settings.of(
            args.task,
            args.method,
            scale=args.scale,
            seed=args.seed,
            lr=args.lr,
            steps=args.steps,
            **_chosen_options(args),
        )
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    method = settings.method.rpartition(":")[2]
    out = args.out or Path("runs") / f"{settings.task}-{method}-{settings.id}"
    check_writable(out)
    try:
        return command.train_and_show(
            settings,
            out,
            Console(stderr=args.json),
            as_json=args.json,
            device=args.device,
            threads=args.threads,
            checkpoint_every=args.checkpoint_every,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
