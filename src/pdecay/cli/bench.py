"""``pdecay bench``."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdecay.cli.common import add, check_writable

SUMMARY = "time optimizer steps and sparse models, relative to torch"
EXAMPLE = "pdecay bench step --out pdecay-bench"

_PARTS = ("step", "avx2", "growth", "target", "train", "start")
_DEPLOY = "deploy"  # trains networks the first time, so it is not a default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "parts",
        nargs="*",
        type=_part,
        default=[],
        metavar="PART",
        help=f"any of {', '.join(_PARTS)} (default: these), or {_DEPLOY}: sparse layers and models",
    )
    text = "folder for the numbers and the plot"
    add(parser, "--out", text, Path, Path("pdecay-bench"), metavar="DIR")
    add(parser, "--quick", "few small rounds, to check that everything works", bool)


def _part(text: str) -> str:
    # Not `choices`: argparse would list the empty default among them.
    if text not in (*_PARTS, _DEPLOY):
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join((*_PARTS, _DEPLOY))}, got {text!r}"
        )
    return text


def run(args: argparse.Namespace) -> int:
    from pdecay.lab.bench import deploy_report as bench_deploy_report
    from pdecay.lab.bench import steps_report as bench_report

    check_writable(args.out)
    parts = [part for part in args.parts or _PARTS if part != _DEPLOY]
    if parts:
        bench_report.run(args.out, parts, quick=args.quick)
    if _DEPLOY in args.parts:
        bench_deploy_report.run(args.out, quick=args.quick)
    return 0
