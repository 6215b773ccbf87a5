"""Export to ONNX, verified in ONNX Runtime before the file is put in place."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pdecay._utils.errors import one_line, root_cause
from pdecay._utils.files import check_folder_of, check_output_file, replacing
from pdecay.deployment.model.errors import ExportError
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import difference, outputs_of_two_calls
from pdecay.deployment.model.program import Free, Program, exported, quiet
from pdecay.deployment.model.state import evaluating, keeping_buffers
from pdecay.deployment.program.sizes import takes_any_size

TOLERANCE = 1e-4  # relative to the largest element of an output
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class OnnxFile:
    """A file written by :func:`export_onnx`.

    Args:
        path: the file.
        nbytes: its size, including a separate weight file of large models.
        free_batch: whether the first axis of the inputs may have any size.
        difference: the largest difference between the outputs of ONNX Runtime and torch, relative
            to the largest element.
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


def export_onnx(model: nn.Module, path: str | os.PathLike[str], example_inputs: Any) -> OnnxFile:
    """Write a model in eval mode to an ONNX file and verify its outputs in ONNX Runtime.

    The model is exported as it is. Call :func:`pdecay.compact` first to remove dead units: ONNX
    Runtime has no sparse layers, so only smaller layers make the file faster.

    Args:
        model: the model; its training modes are restored.
        path: the file to write, with the suffix ``.onnx``. An existing file is replaced after the
            new one has been verified.
        example_inputs: as for :func:`pdecay.compact`.

    Returns:
        The file's size and accuracy; ``str()`` formats them as one line.

    Raises:
        FileNotFoundError: if the folder does not exist.
        ModuleNotFoundError: if a package of the extra ``onnx`` is not installed.
        ExportError: if the export fails, or if outputs differ by more than 1e-4 of the largest
            element, or by more than eight rounding errors in half precision. Nothing is written
            then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"export_onnx needs a torch.nn.Module, got {type(model).__name__}")
    check_installed()
    inputs = Inputs.of(example_inputs)
    target = check_output_file(path, (".onnx",))
    check_folder_of(target)
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".onnx-") as folder,
        keeping_buffers(model),
    ):
        # A large model is written as two files, and the first refers to the second by name. The
        # temporary files therefore have their final names.
        temporary = Path(folder, target.name)
        try:
            program, error = _write(model, temporary, inputs, "batch")
        except ExportError:  # an ONNX file cannot check its sizes: only the example's is allowed
            program, error = _write(model, temporary, inputs, "none")
        files = sorted(Path(folder).iterdir(), key=lambda file: file.name == target.name)
        nbytes = sum(file.stat().st_size for file in files)
        for file in files:  # the weight file first, so that the model never refers to a missing one
            with replacing(target.with_name(file.name)) as copy, open(file, "rb") as written:
                shutil.copyfileobj(written, copy)
    return OnnxFile(target, nbytes, program.free_batch, error)


class _ModelError(ExportError):
    """The model itself does not take the inputs."""


def _write(model: nn.Module, path: Path, inputs: Inputs, free: Free) -> tuple[Program, float]:
    """Write a file; return the program, and the difference of the outputs of ONNX Runtime.

    Raises:
        ExportError: if the export fails or outputs differ. With a free batch, also if the model's
            code takes another branch for some batch sizes.
    """
    program = exported(model, inputs, free)
    if free != "none" and not takes_any_size(program.exported):
        raise ExportError("the code of the model depends on the batch size")
    try:
        with quiet():
            onnx_program: Any = torch.onnx.export(program.exported, dynamo=True, verbose=False)
    except Exception as error:
        raise ExportError(f"torch.onnx.export failed: {root_cause(error)[:200]}") from error
    _clean(onnx_program.model)
    onnx_program.save(path)
    with evaluating(model):
        worst = _difference(model, inputs, path)
        for other in inputs.other_batches() if program.free_batch else ():
            with contextlib.suppress(_ModelError):
                worst = max(worst, _difference(model, other, path))
    tolerance = max(TOLERANCE, 8 * _rounding(model))
    if worst > tolerance:
        raise ExportError(
            f"the outputs of ONNX Runtime and torch differ by {worst:.1e} of the largest "
            f"element, more than {tolerance:g}, in two calls: nothing was written. An ONNX file "
            "remembers nothing between calls"
        )
    return program, worst


def _rounding(model: nn.Module) -> float:
    """Return the rounding error of the model's least precise parameters."""
    dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def check_installed() -> None:
    """Raise ModuleNotFoundError if a package of the extra ``onnx`` is missing."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"{package} is not installed: pip install 'pdecay[onnx]'", name=package
            )


def _clean(model: Any) -> None:
    """Remove metadata about source code, which includes local paths; name the batch axis."""
    graph = model.graph
    symbols = {dim for value in graph.inputs for dim in value.shape if not isinstance(dim, int)}
    values = [*graph.inputs, *graph.initializers.values()]
    for node in graph.all_nodes():
        values += node.outputs
        node.metadata_props.clear()
    for value in values:
        value.metadata_props.clear()
        if value.shape is not None and symbols & set(value.shape):
            shape = value.shape.copy()  # some shapes are frozen
            for axis, dim in enumerate(shape):
                if {dim} == symbols:
                    shape[axis] = "batch"
            value.shape = shape
    graph.metadata_props.clear()
    model.metadata_props.clear()


def _difference(model: nn.Module, inputs: Inputs, path: Path) -> float:
    """Run a file in ONNX Runtime and return its difference from the model's outputs."""
    runtime: Any = importlib.import_module("onnxruntime")  # it has no type annotations
    try:
        expected = outputs_of_two_calls(model, inputs)
    except Exception as error:
        raise _ModelError(f"the model fails: {one_line(error)[:200]}") from error
    given = inputs.tensors
    try:
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"ONNX Runtime cannot load the model: {one_line(error)[:200]}") from error
    names = [one.name for one in session.get_inputs()]
    if len(names) != len(given):
        raise ExportError(
            f"the ONNX model has {len(names)} inputs, but the example has {len(given)} tensors: "
            "remove unused tensors from the example"
        )
    feed = {name: tensor.cpu().numpy() for name, tensor in zip(names, given, strict=True)}
    try:
        got = 2 * [torch.from_numpy(array) for array in session.run(None, feed)]
    except Exception as error:
        raise ExportError(f"ONNX Runtime cannot run the model: {one_line(error)[:200]}") from error
    if len(got) != len(expected):
        raise ExportError(
            f"the ONNX model returns {len(got) // 2} tensors, but the model returns "
            f"{len(expected) // 2}: "
            "return only tensors (for transformers: use_cache=False)"
        )
    return difference([tensor.cpu() for tensor in expected], got)
