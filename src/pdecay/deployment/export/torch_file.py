"""Export to ``.pt2``, a program of torch.export, or ``.pt``, a pickled module."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from pdecay._utils.errors import one_line
from pdecay._utils.files import check_output_file, replacing
from pdecay.deployment.model.errors import ExportError
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import agree, outputs_of_two_calls
from pdecay.deployment.model.program import Free, exported, quiet
from pdecay.deployment.model.state import evaluating, keeping_buffers

HOW_TO_LOAD = {
    ".pt2": "torch.export.load(path).module()",
    ".pt": "torch.load(path, weights_only=False)",
}


@dataclass(frozen=True)
class TorchFile:
    """A file written by :func:`export_torch`."""

    path: Path
    nbytes: int
    how_to_load: str

    def __str__(self) -> str:
        return f"{self.path} ({self.nbytes:,} bytes); load it with {self.how_to_load}"


def export_torch(model: nn.Module, path: str | os.PathLike[str], example_inputs: Any) -> TorchFile:
    """Write a model together with its layer sizes, which compaction may have changed.

    Args:
        model: the model.
        path: the file to write. ``.pt2`` is a program of torch.export in eval mode. It runs
            without the model's code, for any batch size if the model allows it. ``.pt`` is the
            module pickled by ``torch.save``.
        example_inputs: as for :func:`pdecay.compact`.

    Raises:
        ExportError: if the model cannot be exported. Nothing is written then.
    """
    target = check_output_file(path, HOW_TO_LOAD)
    inputs = Inputs.of(example_inputs)
    with replacing(target) as file, keeping_buffers(model):
        if target.suffix == ".pt2":
            _write_program(model, inputs, file)
        else:
            _pickle(model, file)
    return TorchFile(target, target.stat().st_size, HOW_TO_LOAD[target.suffix])


def _write_program(model: nn.Module, inputs: Inputs, file: BinaryIO) -> None:
    """Write a program for any batch size; if its code depends on that, for the example's only."""
    try:
        _write_and_compare(model, inputs, file, "batch")
    except ExportError:
        file.seek(0)
        file.truncate()
        _write_and_compare(model, inputs, file, "none")


def _write_and_compare(model: nn.Module, inputs: Inputs, file: BinaryIO, free: Free) -> None:
    """Write a program, load it again, and compare its outputs, also with other batch sizes."""
    with quiet():
        exported_program = exported(model, inputs, free).exported
        try:
            torch.export.save(exported_program, file)
            file.flush()
            with open(file.name, "rb") as written:
                program = torch.export.load(written).module()
        except Exception as error:  # for example, outputs of a class that it does not know
            raise ExportError(f"torch.export.save failed: {one_line(error)[:200]}") from error
        with evaluating(model):
            for given in (inputs, *(inputs.other_batches() if free != "none" else ())):
                try:
                    expected, got = (outputs_of_two_calls(one, given) for one in (model, program))
                except Exception as error:
                    if given is not inputs:  # a size that the model or the program refuses
                        continue
                    raise ExportError(f"the program does not run: {one_line(error)}") from error
                if not agree(expected, got):
                    raise ExportError("the exported program's outputs differ from the model's")


def _pickle(model: nn.Module, file: BinaryIO) -> None:
    try:
        torch.save(model, file)
    except Exception as error:
        raise ExportError(f"the model cannot be pickled ({error}): write a .pt2 instead") from error
