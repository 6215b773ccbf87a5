"""``pdecay report``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pdecay.cli.common import Command, UsageError, add_out, check_writable


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUNS",
        help="files of records, or output folders of pdecay train or pdecay sweep",
    )
    add_out(parser, "pdecay-report", "the page, figures and tables")


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
