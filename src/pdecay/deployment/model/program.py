"""A model as a program of ``torch.export``, which runs without the code of the model's class."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_map

from pdecay._utils.errors import one_line
from pdecay.deployment.model.errors import ExportError
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.state import evaluating, without_attention_fast_path


@dataclass(frozen=True)
class Program:
    """An exported model.

    Args:
        exported: the program.
        free_batch: whether the first axis of the inputs may have any size.
    """

    exported: ExportedProgram
    free_batch: bool


def exported(model: nn.Module, inputs: Inputs) -> Program:
    """Export a model in eval mode, for any batch size if its code allows that.

    Raises:
        ExportError: if torch.export fails.
    """
    with evaluating(model), quiet():
        if inputs.has_batch:
            # torch.export specializes on an axis of size 1, so the example gets at least two rows.
            with contextlib.suppress(Exception):
                program = _export(model, inputs.repeated(), free_batch=True)
                return Program(program, free_batch=True)
        try:
            return Program(_export(model, inputs, free_batch=False), free_batch=False)
        except Exception as error:
            raise ExportError(
                f"torch.export failed on {type(model).__name__}: {one_line(error)[:200]}"
            ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings and log lines of torch's exporters."""
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


def _export(model: nn.Module, inputs: Inputs, *, free_batch: bool) -> ExportedProgram:
    shapes: Any = None
    if free_batch:
        named = inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs).arguments
        shapes = tree_map(
            lambda leaf: {0: Dim.DYNAMIC} if isinstance(leaf, Tensor) else None, dict(named)
        )
    with torch.no_grad(), without_attention_fast_path():
        program = torch.export.export(
            model, inputs.args, inputs.kwargs, dynamic_shapes=shapes, strict=False
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names paths on this machine
    return program
