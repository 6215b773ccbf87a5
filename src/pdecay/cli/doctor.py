"""``pdecay doctor``."""

from __future__ import annotations

import argparse
import sys

import pdecay
from pdecay.cli.common import UsageError, add, call, kind

SUMMARY = "check a model and its optimizer for mistakes before training"
EXAMPLE = "pdecay doctor my_project.training:model_and_optimizer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a function without arguments that returns (model, optimizer)"
    add(parser, "build", text, metavar="MODULE:FUNCTION")


def run(args: argparse.Namespace) -> int:
    built = call(args.build)
    if not (isinstance(built, tuple | list) and len(built) == 2):
        raise UsageError(f"{args.build} must return (model, optimizer), got {kind(built)}")
    try:
        findings = pdecay.doctor(*built)
    except TypeError as error:
        raise UsageError(f"{args.build} must return (model, optimizer): {error}") from None
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    if not findings:
        sys.stdout.write("nothing found: the model and its optimizer look right\n")
    return int(any(finding.level == "error" for finding in findings))
