"""``pdecay export``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pdecay.cli import models
from pdecay.cli.common import UsageError, add

SUMMARY = "write a model as ONNX, or its weights as a sparse or dense file"
EXAMPLE = "pdecay export my_project.training:build --onnx model.onnx --sparse model.safetensors"

_SUFFIXES = {"onnx": ".onnx", "sparse": ".safetensors", "dense": ".safetensors"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    add(parser, "--onnx", "write the compacted model as ONNX and compare its outputs", Path)
    add(parser, "--sparse", "write the weights without zeros, for pdecay.load", Path)
    add(parser, "--dense", "write the weights as an ordinary safetensors file", Path)


def run(args: argparse.Namespace) -> int:
    from pdecay.deployment.compact import CompactReport, compact
    from pdecay.deployment.export import onnx
    from pdecay.deployment.files import save
    from pdecay.deployment.model.errors import DeploymentError

    if args.onnx is None and args.sparse is None and args.dense is None:
        raise UsageError("there is nothing to write: give --onnx, --sparse or --dense")
    for name, suffix in _SUFFIXES.items():
        if (file := getattr(args, name)) is not None:
            models.check_output(f"--{name}", file, [suffix])
    files = [os.path.realpath(file) for file in (args.sparse, args.dense) if file is not None]
    if len(set(files)) < len(files):
        raise UsageError(
            f"--sparse and --dense must be different files, got {str(args.dense)!r} for both"
        )
    if args.onnx is not None:
        onnx.check_installed()
    model, example = models.model_of(args)
    try:
        if args.onnx is not None:
            smaller = compact(model, example)
            before, after = CompactReport.of(smaller).parameters
            sys.stdout.write(f"compacted: {before:,} parameters -> {after:,}\n")
            sys.stdout.write(f"{onnx.export_onnx(smaller, args.onnx, example)}\n")
        for file, dense in ((args.sparse, False), (args.dense, True)):
            if file is not None:
                written = save(model, file, dense=dense)
                sys.stdout.write(f"{file}: {written.nbytes:,} bytes\n")
    except (DeploymentError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    return 0
