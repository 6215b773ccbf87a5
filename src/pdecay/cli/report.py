"""``pdecay report``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pdecay.cli.common import Command, UsageError, check_writable


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUNS",
        help="files of records, or folders that pdecay train or pdecay sweep wrote to",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("pdecay-report"),
        metavar="DIR",
        help="where the page, figures and tables go (default: ./pdecay-report)",
    )


def _run(args: argparse.Namespace) -> int:
    from pdecay.lab import report
    from pdecay.lab.report.payload import about
    from pdecay.lab.train.records import RecordError

    try:
        studies = report.load(args.runs)
    except RecordError as error:
        raise UsageError(str(error)) from None
    check_writable(args.out)
    page, *others = report.write(studies, args.out)
    for study in studies:
        sys.stdout.write(f"{about(study)}\n")
    sys.stdout.write(f"written: {page}, and {len(others)} figures and tables beside it\n")
    return 0


COMMAND = Command(
    "report",
    "make a page, figures and tables of what was trained",
    "pdecay report runs/my-sweep --out report",
    _arguments,
    _run,
)
