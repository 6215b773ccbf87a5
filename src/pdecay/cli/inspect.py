"""``pdecay inspect``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pdecay.cli.common import UsageError, add, check_writable, number

SUMMARY = "describe a weight file: zeros, dead units, bytes and the sizes of the weights"
EXAMPLE = "pdecay inspect model.safetensors --plot weights.png"

_PICTURES = (".png", ".svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(
        parser,
        "file",
        "a file written by pdecay.save, safetensors or torch.save",
        Path,
        metavar="FILE",
    )
    text = "write a .png or .svg with the histogram of log10|w|, in total and by layer"
    add(parser, "--plot", text, Path, metavar="PICTURE")
    add(parser, "--json", "print all numbers as JSON instead of a table", bool)
    text = "weights with |w| < T count as zero"
    add(parser, "--threshold", text, number(float, 0), 1e-13, metavar="T")
    add(parser, "--key", "the key of the state dict in a checkpoint with several, such as model")


def run(args: argparse.Namespace) -> int:
    from pdecay.deployment.files import FileFormatError
    from pdecay.deployment.inspect import inspect

    if args.plot is not None:
        if args.plot.suffix not in _PICTURES:
            raise UsageError(f"--plot writes {' or '.join(_PICTURES)}, got {str(args.plot)!r}")
        check_writable(args.plot.parent)
        from pdecay.lab import weight_figure
    try:
        inspection = inspect(args.file, threshold=args.threshold, key=args.key)
    except FileFormatError as error:
        raise UsageError(str(error)) from None
    if args.plot is not None:
        weight_figure.draw(inspection, args.plot)
    if args.json:
        sys.stdout.write(json.dumps(inspection.to_dict(), indent=2) + "\n")
    else:
        sys.stdout.write(f"{inspection}\n")
        if args.plot is not None:
            sys.stdout.write(f"written: {args.plot}\n")
    return 0
