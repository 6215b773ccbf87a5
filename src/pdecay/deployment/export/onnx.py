"""A model as an ONNX file, checked in ONNX Runtime before the file gets its name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pdecay.deployment.export.programs import target_of
from pdecay.deployment.model.errors import ExportError
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import difference, outputs
from pdecay.deployment.model.program import exported, quiet
from pdecay.deployment.model.state import evaluating

TOLERANCE = 1e-4  # relative to the largest element of an output
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class OnnxFile:
    """What :func:`export` wrote.

    Args:
        path: of the file.
        nbytes: its size, with that of the file of weights beside it where there is one.
        free_batch: whether the first axis of the inputs may have any size.
        difference: of ONNX Runtime's outputs to torch's, relative to the largest.
    """

    path: Path
    nbytes: int
    free_batch: bool
    difference: float

    def __str__(self) -> str:
        batch = "any batch size" if self.free_batch else "the example's batch size only"
        return (
            f"{self.path}: {self.nbytes:,} bytes, {batch}; "
            f"ONNX Runtime differs by {self.difference:.1e}"
        )


def check_installed() -> None:
    """Raise a ModuleNotFoundError if one of the packages of the extra ``onnx`` is missing."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"{package} is not installed: pip install 'pdecay[onnx]'", name=package
            )


def export(model: nn.Module, example_inputs: Any, path: str | os.PathLike[str]) -> OnnxFile:
    """Write a model, in eval mode, to an ONNX file that gives the same outputs.

    The model is exported as it is: :func:`pdecay.compact` it first. ONNX has no sparse layers that
    its runtime would use, so that what makes the file faster is what compact has removed.

    Args:
        model: the model. Its modes are left as they are.
        example_inputs: as for :func:`pdecay.compact`.
        path: of the file, which ends with ``.onnx``; one that is there is replaced when the new
            one has been checked.

    Returns:
        What was written; ``str()`` is a line.

    Raises:
        ModuleNotFoundError: if one of the packages of the extra ``onnx`` is not installed.
        ExportError: if the model cannot be exported, or ONNX Runtime's outputs are not torch's to
            1e-4 of the largest. Nothing is written then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"export needs a torch.nn.Module, got {type(model).__name__}")
    check_installed()
    inputs = Inputs.of(example_inputs)
    target = target_of(path, (".onnx",))
    program = exported(model, inputs)
    with quiet():
        made: Any = torch.onnx.export(program.exported, dynamo=True, verbose=False)
    _tidy(made.model)
    checks = [inputs, *([inputs.repeated()] if program.free_batch else [])]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".onnx-") as folder:
        # A large model is two files, of which one names the other: both get their own names there.
        made.save(Path(folder, target.name))
        with evaluating(model):
            off = max(_difference(model, one, Path(folder, target.name)) for one in checks)
        if off > TOLERANCE:
            raise ExportError(
                f"ONNX Runtime's outputs differ from torch's by {off:.1e} of the largest, more "
                f"than {TOLERANCE:g}: {target} was not written"
            )
        files = sorted(Path(folder).iterdir(), key=lambda file: file.name == target.name)
        nbytes = sum(file.stat().st_size for file in files)
        for file in files:  # the one that names the other last
            os.replace(file, target.with_name(file.name))
    return OnnxFile(target, nbytes, program.free_batch, off)


def _tidy(model: Any) -> None:
    """Take out the notes on the code that it comes from and where that lies; name the batch."""
    graph = model.graph
    symbols = {dim for value in graph.inputs for dim in value.shape if not isinstance(dim, int)}
    values = [*graph.inputs, *graph.initializers.values()]
    for node in graph.all_nodes():
        values += node.outputs
        node.metadata_props.clear()
    for value in values:
        value.metadata_props.clear()
        for axis, dim in enumerate(value.shape or ()):
            if {dim} == symbols:
                value.shape[axis] = "batch"
    graph.metadata_props.clear()
    model.metadata_props.clear()


def _difference(model: nn.Module, inputs: Inputs, path: Path) -> float:
    """How far ONNX Runtime is off, running a file."""
    runtime: Any = importlib.import_module("onnxruntime")  # which has no types
    expected = outputs(model, inputs)
    given = inputs.tensors
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    if len(names) != len(given):
        raise ExportError(
            f"the ONNX model has {len(names)} inputs, and the example {len(given)} tensors: "
            "leave out of the example what the model does not use"
        )
    feed = {name: tensor.cpu().numpy() for name, tensor in zip(names, given, strict=True)}
    got = [torch.from_numpy(array) for array in session.run(None, feed)]
    if len(got) != len(expected):
        raise ExportError(
            f"the ONNX model returns {len(got)} tensors, and the model {len(expected)}: let it "
            "return tensors only (for transformers: use_cache=False)"
        )
    return difference([tensor.cpu() for tensor in expected], got)
