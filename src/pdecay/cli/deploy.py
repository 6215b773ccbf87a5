"""``pdecay deploy``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pdecay._utils.files import replacing
from pdecay.cli import models
from pdecay.cli.common import UsageError, add, count, seconds

SUMMARY = "make a sparse model fast on this machine and save it, ready to serve"
EXAMPLE = (
    "pdecay deploy my_project.training:build --weights model.safetensors --out fast.safetensors"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    text = "write the deployed model: pdecay.load(FILE, trusted=True) runs it without its code"
    add(parser, "--out", text, Path)
    add(parser, "--seconds", "the time for the whole call", seconds, 30.0)
    text = "measured: the faster form of each layer; sparse: all that can be; dense: none"
    add(
        parser,
        "--choose",
        text,
        default="measured",
        choices=("measured", "sparse", "dense"),
        metavar="KIND",
    )
    add(parser, "--plan", "repeat the choices of this file instead", Path)
    add(parser, "--save-plan", "write the choices to this file", Path)
    add(parser, "--threads", "torch's number of threads", count)


def run(args: argparse.Namespace) -> int:
    import torch

    from pdecay.deployment.files import save
    from pdecay.deployment.model.errors import DeploymentError
    from pdecay.deployment.runtime.pipeline import deploy

    if args.out is not None:
        models.check_output("--out", args.out, [".safetensors"])
    if args.save_plan is not None:
        models.check_output("--save-plan", args.save_plan, [args.save_plan.suffix])
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    choose = args.choose if args.plan is None else _read_plan(args.plan)
    model, example = models.model_of(args)
    try:
        deployed = deploy(model, example, seconds=args.seconds, choose=choose)
        report: Any = deployed.report
        sys.stdout.write(f"{report}\n")
        if args.save_plan is not None:
            with replacing(args.save_plan) as file:
                file.write(f"{json.dumps(report.plan, indent=1)}\n".encode())
            sys.stdout.write(f"\nwritten: {args.save_plan}\n")
        if args.out is not None:
            written = save(deployed, args.out)
            sys.stdout.write(
                f"\nwritten: {args.out} ({written.nbytes:,} bytes); load it with "
                "pdecay.load(path, trusted=True)\n"
            )
    except (DeploymentError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    return 0


def _read_plan(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # a device may have no end
        raise UsageError(f"--plan: {path} is not a regular file")
    try:
        plan = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--plan: {path} is not a JSON file: {error}") from None
    if not isinstance(plan, dict):
        raise UsageError(f"--plan: {path} was not written by --save-plan")
    return plan
