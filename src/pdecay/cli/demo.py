"""``pdecay demo``."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdecay.cli.common import Command, add, check_writable, natural_number


def _arguments(parser: argparse.ArgumentParser) -> None:
    text = "folder for the figures and numbers"
    add(parser, "--out", text, Path, Path("pdecay-demo"), metavar="DIR")
    add(parser, "--seed", "the first seed; equal seeds give equal results", natural_number, 0)
    parser.add_argument(
        "--quick", action="store_true", help="a few short runs, to check that everything works"
    )


def _run(args: argparse.Namespace) -> int:
    from pdecay.lab.demo import demo

    check_writable(args.out)
    demo.run(args.out, seed=args.seed, quick=args.quick)
    return 0


COMMAND = Command(
    "demo",
    "train AdamW and PAdam on handwritten digits; draw accuracy against sparsity",
    "pdecay demo --out pdecay-demo",
    _arguments,
    _run,
)
