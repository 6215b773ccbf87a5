"""``pdecay report``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pdecay.cli.common import add, check_writable

SUMMARY = "write an HTML page, figures and tables of trained runs"
EXAMPLE = "pdecay report runs/my-sweep --out report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "files of records, or output folders of pdecay train or pdecay sweep"
    add(parser, "runs", text, Path, nargs="+", metavar="RUNS")
    text = "folder for the page, figures and tables"
    add(parser, "--out", text, Path, Path("pdecay-report"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    from pdecay.lab.report.experiments import load
    from pdecay.lab.report.folder import write

    experiments = load(args.runs)
    check_writable(args.out)
    page, *others = write(experiments, args.out)
    for experiment in experiments:
        sys.stdout.write(f"{experiment.describe()}\n")
    sys.stdout.write(f"wrote {page} and {len(others)} figures and tables\n")
    return 0
