"""``pdecay compact``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pdecay.cli import models
from pdecay.cli.common import UsageError, add

SUMMARY = "remove the dead units of a model without changing its outputs"
EXAMPLE = (
    "pdecay compact my_project.models:model_and_example --weights model.safetensors --out small.pt2"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    text = (
        "write the smaller model: .pt2 is a program that torch.export.load runs without the "
        "model's code, .pt is a module pickled by torch.save (default: only print the report)"
    )
    add(parser, "--out", text, Path)
    add(parser, "--no-fold", "keep units with constant output: fold no constants into biases", bool)


def run(args: argparse.Namespace) -> int:
    from pdecay.deployment.compact import CompactReport, compact
    from pdecay.deployment.export.torch_file import HOW_TO_LOAD, export_torch
    from pdecay.deployment.model.errors import DeploymentError

    if args.out is not None:
        models.check_output("--out", args.out, HOW_TO_LOAD)
    model, example = models.model_of(args)
    try:
        smaller = compact(model, example, fold=not args.no_fold)
        report = CompactReport.of(smaller)
        sys.stdout.write(f"{report}\n")
        if not report.units and not report.kept:
            sys.stdout.write("no unit is dead: only exact zeros count (--prune T sets them)\n")
        if args.out is not None:
            sys.stdout.write(f"\nwritten: {export_torch(smaller, args.out, example)}\n")
    except (DeploymentError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    return 0
