"""``pdecay train``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pdecay.cli.common import Command, UsageError, check_writable, natural_number, option

# The options of the methods in pdecay.lab, which is not imported for the help alone.
OPTIONS: dict[str, tuple[type, str]] = {
    "p": (float, "the norm (padam, elastic, target)"),
    "lam": (float, "the strength of the decay (padam, elastic, l1, dwf)"),
    "l2": (float, "the strength of the L2 decay beside it (elastic)"),
    "target": (float, "the share to be zero: of weights (target, gmp) or units (oto)"),
    "threshold": (float, "weights below it are pruned (mp)"),
    "depth": (int, "how many factors a weight has (dwf)"),
    "eps": (float, "how early a unit is set to zero, 0 to 1 (oto)"),
    "weight_decay": (float, "AdamW's L2 decay (adamw, mp, gmp, oto)"),
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", metavar="TASK", help="digits, fashion, cifar10 or shakespeare")
    parser.add_argument(
        "--method",
        default="padam",
        metavar="NAME",
        help="adamw, padam, elastic, target, mp, gmp, oto, dwf, l1, or my_module:MyMethod "
        "(default: padam)",
    )
    parser.add_argument(
        "--scale", default="cpu", metavar="NAME", help="quick, cpu or paper (default: cpu)"
    )
    parser.add_argument(
        "--seed", type=natural_number, default=0, metavar="N", help="equal seeds, equal results"
    )
    parser.add_argument("--lr", type=float, metavar="X", help="the highest (default: the task's)")
    parser.add_argument("--steps", type=int, metavar="N", help="how many (default: the task's)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, ... (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch (default: its own)")
    parser.add_argument(
        "--checkpoint-every",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how often to save what a killed run goes on from (default: 30)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the run lives (default: runs/TASK-METHOD-ID)",
    )
    options = parser.add_argument_group("options of the methods")
    for name, (kind, text) in OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        options.add_argument(flag, dest=name, type=kind, metavar="X", help=text)
    options.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any option, for a method of your own",
    )


def chosen_options(args: argparse.Namespace) -> dict[str, Any]:
    """The methods' options that were given."""
    chosen = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    for text in args.option:
        name, value = option(text)
        if name in ("scale", "seed", "lr", "steps"):
            raise UsageError(f"--option is for the method's own options; use --{name} {value}")
        chosen[name] = value
    return chosen


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from pdecay.lab.data.sources import DataError
    from pdecay.lab.train import console as train_report
    from pdecay.lab.train.records import RecordError
    from pdecay.lab.train.training import RunError, Settings

    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads must be at least 1, got {args.threads}")
    if not args.checkpoint_every >= 0:
        raise UsageError(f"--checkpoint-every must be >= 0, got {args.checkpoint_every}")
    try:
        settings = Settings.of(
            args.task,
            args.method,
            scale=args.scale,
            seed=args.seed,
            lr=args.lr,
            steps=args.steps,
            **chosen_options(args),
        )
    except (TypeError, ValueError) as error:
        raise UsageError(" ".join(str(error).split())) from None
    method = settings.method.rpartition(":")[2]
    out = args.out or Path("runs") / f"{settings.task}-{method}-{settings.id}"
    check_writable(out)
    try:
        return train_report.run(
            settings,
            out,
            Console(),
            device=args.device,
            threads=args.threads,
            checkpoint_every=args.checkpoint_every,
        )
    except (DataError, RecordError, RunError, ValueError) as error:
        raise UsageError(str(error)) from None


COMMAND = Command(
    "train",
    "train one network for sparsity with one method; a killed run goes on where it was",
    "pdecay train shakespeare --method padam --p 0.8 --lam 0.02 --lr 1e-2 --out runs/my-run",
    _arguments,
    _run,
)
