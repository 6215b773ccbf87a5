"""``pdecay bench``."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdecay.cli.common import Command, check_writable

_PARTS = ("step", "growth", "train", "start")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "parts",
        nargs="*",
        choices=[*_PARTS, []],
        default=[],
        metavar="PART",
        help=f"any of {', '.join(_PARTS)} (default: all)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("pdecay-bench"),
        metavar="DIR",
        help="where the numbers and the plot go (default: ./pdecay-bench)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small and few rounds, to see that everything works"
    )


def _run(args: argparse.Namespace) -> int:
    from pdecay.lab import bench_report

    check_writable(args.out)
    bench_report.run(args.out, args.parts or _PARTS, quick=args.quick)
    return 0


COMMAND = Command(
    "bench",
    "measure what a step costs against torch's own optimizers, in time and memory",
    "pdecay bench step --out pdecay-bench",
    _arguments,
    _run,
)
