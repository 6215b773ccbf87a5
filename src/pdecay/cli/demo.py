"""``pdecay demo``."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdecay.cli.common import add, check_writable, natural_number

SUMMARY = "train AdamW and PAdam on handwritten digits; draw accuracy against sparsity"
EXAMPLE = "pdecay demo --out pdecay-demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folder for the figures and records"
    add(parser, "--out", text, Path, Path("pdecay-demo"), metavar="DIR")
    add(parser, "--seed", "the first seed; equal seeds give equal results", natural_number, 0)
    add(parser, "--quick", "a few short runs, to check that everything works", bool)


def run(args: argparse.Namespace) -> int:
    from pdecay.lab.demo import demo

    check_writable(args.out)
    demo.run(args.out, seed=args.seed, quick=args.quick)
    return 0
