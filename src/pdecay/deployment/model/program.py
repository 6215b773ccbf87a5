"""A model as a program of torch.export: it runs without the code of the model's class."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_map

from pdecay.deployment.model.errors import CompactError
from pdecay.deployment.model.inputs import Inputs


@dataclass(frozen=True)
class Program:
    """An exported model.

    Args:
        exported: torch's own form of it.
        free_batch: whether the first axis of the inputs may have any size.
    """

    exported: ExportedProgram
    free_batch: bool


def exported(model: nn.Module, inputs: Inputs) -> Program:
    """Export a model in eval mode, for batches of any size if its code allows it.

    Raises:
        CompactError: if torch.export does not take the model.
    """
    with evaluating(model), quiet():
        if has_batch(inputs):
            # What torch sees once only, it takes for a size that is always one.
            example = twice(inputs)
            with contextlib.suppress(Exception):
                return Program(_export(model, example, free=True), free_batch=True)
        try:
            return Program(_export(model, inputs, free=False), free_batch=False)
        except Exception as error:
            raise CompactError(
                f"torch.export does not take {type(model).__name__}: {_first_line(error)}"
            ) from error


def has_batch(inputs: Inputs) -> bool:
    """Whether all tensors have a first axis of one and the same size."""
    sizes = {tensor.shape[:1] for tensor in inputs.tensors}
    return len(sizes) == 1 and sizes != {torch.Size([])}


def twice(inputs: Inputs) -> Inputs:
    """Every tensor followed by itself."""
    args, kwargs = tree_map(
        lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) else leaf,
        (inputs.args, inputs.kwargs),
    )
    return Inputs(args, kwargs)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode, and then in the modes that the modules were in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch's exporters say about their own code."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _export(model: nn.Module, inputs: Inputs, *, free: bool) -> ExportedProgram:
    shapes: Any = None
    if free:
        args, kwargs = tree_map(
            lambda leaf: {0: Dim.DYNAMIC} if isinstance(leaf, Tensor) else None,
            (inputs.args, inputs.kwargs),
        )
        shapes = kwargs if kwargs else args
    with torch.no_grad():
        program = torch.export.export(
            model, inputs.args, inputs.kwargs, dynamic_shapes=shapes, strict=False
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # a file is not to tell where the user's code lies
    return program


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
