"""A smaller model in a file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from pdecay._utils.files import replacing
from pdecay.deployment.model.errors import ExportError
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import agree, outputs
from pdecay.deployment.model.program import exported, quiet
from pdecay.deployment.model.state import evaluating

HOW_TO_LOAD = {
    ".pt2": "torch.export.load(path).module()",
    ".pt": "torch.load(path, weights_only=False)",
}


@dataclass(frozen=True)
class Saved:
    """A file that :func:`save` wrote."""

    path: Path
    nbytes: int
    how_to_load: str

    def __str__(self) -> str:
        return f"{self.path} ({self.nbytes:,} bytes); load it with {self.how_to_load}"


def save(model: nn.Module, example_inputs: Any, path: str | os.PathLike[str]) -> Saved:
    """Write a model with the sizes that it has now, which its class alone would not give it.

    Args:
        model: the model.
        example_inputs: as for :func:`compact`.
        path: of the file. ``.pt2`` is a program of torch.export, in eval mode, which runs without
            the code of the model's class, for batches of any size if that allows it. ``.pt`` is
            the module itself, as ``torch.save`` pickles it.

    Raises:
        ExportError: if the model cannot be written so. Nothing is written then.
    """
    target = target_of(path, HOW_TO_LOAD)
    inputs = Inputs.of(example_inputs)
    with replacing(target) as file:
        if target.suffix == ".pt2":
            with quiet():
                torch.export.save(exported(model, inputs).exported, file)
                file.flush()
                with open(file.name, "rb") as written:
                    _check(model, inputs, torch.export.load(written).module())
        else:
            _pickle(model, file)
    return Saved(target, target.stat().st_size, HOW_TO_LOAD[target.suffix])


def target_of(path: str | os.PathLike[str], suffixes: Iterable[str]) -> Path:
    """A file to write, after a look at its name: the work should not be done in vain."""
    target = Path(path)
    if target.suffix not in suffixes:
        raise ValueError(f"the name must end with {' or '.join(suffixes)}, got {str(target)!r}")
    if target.is_dir():
        raise ValueError(f"{str(target)!r} is a folder: give the name of a file")
    return target


def _pickle(model: nn.Module, file: BinaryIO) -> None:
    try:
        torch.save(model, file)
    except Exception as error:
        raise ExportError(f"the model cannot be pickled ({error}): write a .pt2 instead") from error


def _check(model: nn.Module, inputs: Inputs, program: nn.Module) -> None:
    with evaluating(model):
        if not agree(outputs(model, inputs), outputs(program, inputs)):
            raise ExportError("the exported program's outputs are not the model's")
