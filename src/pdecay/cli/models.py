"""Code that ``pdecay compact``, ``deploy`` and ``export`` share: the model and the output files."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdecay._utils.files import check_output_file
from pdecay.cli.common import UsageError, add, call, check_writable, kind

if TYPE_CHECKING:
    from torch import nn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a model and its weights."""
    text = (
        "MODULE:FUNCTION, a function without arguments that returns (model, example_inputs), or "
        "the output folder of pdecay train"
    )
    add(parser, "model", text, metavar="MODEL")
    text = "load these weights first: a file written by pdecay.save, safetensors or torch.save"
    add(parser, "--weights", text, Path)
    add(parser, "--key", "the key of the state dict in a file of torch.save with several")
    text = "set weights with |w| < T to zero first; only exact zeros count"
    add(parser, "--prune", text, float, metavar="T")


def check_output(option: str, path: Path, suffixes: Iterable[str]) -> None:
    """Check, before any work, that a file has a known suffix and can be written."""
    try:
        check_output_file(path, suffixes)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    check_writable(path.parent)


def model_of(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Return the model with its weights, and its example inputs."""
    from torch import nn

    folder = Path(args.model)
    built = _of_run(folder) if folder.is_dir() else call(args.model)
    if not (isinstance(built, tuple | list) and len(built) == 2):
        raise UsageError(f"{args.model} must return (model, example_inputs), got {kind(built)}")
    model, example = built
    if not isinstance(model, nn.Module):
        raise UsageError(f"{args.model} must return a torch.nn.Module first, got {kind(model)}")
    if args.key is not None and args.weights is None:
        raise UsageError("--key needs --weights")
    if args.weights is not None:
        load_weights(model, args.weights, args.key)
    if args.prune is not None:
        import pdecay

        try:
            pdecay.prune_(model, args.prune)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--prune: {error}") from None
    return model, example


def load_weights(model: nn.Module, path: Path, key: str | None = None) -> None:
    """Load a weight file of any kind into a model."""
    from pdecay.deployment.files import FileFormatError, load
    from pdecay.deployment.inspect.sources import read_loadable_state
    from pdecay.deployment.inspect.torch_files import is_torch_file

    try:
        if is_torch_file(path):
            model.load_state_dict(read_loadable_state(path, key))
        elif key is not None:
            raise UsageError(f"--key is for files of torch.save, which {path} is not")
        else:
            load(path, model)
    except FileFormatError as error:
        raise UsageError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"{path} does not fit the model: {error}") from None


def _of_run(folder: Path) -> tuple[nn.Module, Any]:
    """Return the trained model of a run and two inputs of its task."""
    from pdecay.lab.tasks import get_task
    from pdecay.lab.train import records
    from pdecay.lab.train.training import RECORD, WEIGHTS

    if not (folder / RECORD).is_file():
        raise UsageError(f"{folder} has no finished run of pdecay train: {RECORD} is missing")
    try:
        record = records.read_one(folder / RECORD)
        settings = record["settings"]
        job = get_task(settings["task"], settings["scale"])
        model = job.model(settings["seed"])
    except (records.RecordError, ValueError) as error:  # such as a task of another version
        raise UsageError(f"{folder}: {error}") from None
    load_weights(model, folder / WEIGHTS)
    inputs, _ = job.batch(settings["seed"], 0)
    return model, inputs[:2]
