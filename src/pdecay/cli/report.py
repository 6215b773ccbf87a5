"""``pdecay report``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pdecay.cli.common import Command, UsageError, add, check_writable


def _arguments(parser: argparse.ArgumentParser) -> None:
    text = "files of records, or output folders of pdecay train or pdecay sweep"
    add(parser, "runs", text, Path, nargs="+", metavar="RUNS")
    text = "folder for the page, figures and tables"
    add(parser, "--out", text, Path, Path("pdecay-report"), metavar="DIR")


def _run(args: argparse.Namespace) -> int:
    from pdecay.lab.report.experiments import load
    from pdecay.lab.report.folder import write
    from pdecay.lab.train.records import RecordError

    try:
        experiments = load(args.runs)
    except RecordError as error:
        raise UsageError(str(error)) from None
    check_writable(args.out)
    page, *others = write(experiments, args.out)
    for experiment in experiments:
        sys.stdout.write(f"{experiment.describe()}\n")
    sys.stdout.write(f"wrote {page} and {len(others)} figures and tables\n")
    return 0


COMMAND = Command(
    "report",
    "write an HTML page, figures and tables of trained runs",
    "pdecay report runs/my-sweep --out report",
    _arguments,
    _run,
)
