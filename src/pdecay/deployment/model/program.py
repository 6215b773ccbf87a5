"""A model as a program of ``torch.export``, which runs without the code of the model's class."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_map

from pdecay._utils.errors import one_line
from pdecay.deployment.model.errors import ExportError
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.state import evaluating, without_attention_fast_path

# Axes of the inputs that may have any size: all that the code allows, the first, or none.
Free = Literal["all", "batch", "none"]


@dataclass(frozen=True)
class Program:
    """An exported model.

    Args:
        exported: the program.
        free_batch: whether the first axis of the inputs may have any size.
    """

    exported: ExportedProgram
    free_batch: bool


def exported(model: nn.Module, inputs: Inputs, free: Free | None = None) -> Program:
    """Export a model in eval mode.

    Args:
        model: the model.
        inputs: the example.
        free: the axes that may have any size; None for the batch if the code allows that.

    Raises:
        ExportError: if torch.export fails.
    """
    if free is None:
        with contextlib.suppress(ExportError):
            return exported(model, inputs, "batch")
        return exported(model, inputs, "none")
    with evaluating(model), quiet():
        try:
            if free != "none" and inputs.has_batch:
                # torch.export specializes on an axis of size 1: give the example two rows or more.
                inputs = inputs.repeated()
            elif free == "batch":
                raise ValueError("its inputs have no common first axis")
            program = _export(model, inputs.distinct(), free)
        except Exception as error:
            raise ExportError(
                f"torch.export failed on {type(model).__name__}: {one_line(error)[:200]}"
            ) from error
    axes = [shape[0] for shape in input_shapes(program) if len(shape)]
    return Program(program, bool(axes) and not any(isinstance(size, int) for size in axes))


def input_shapes(program: ExportedProgram) -> list[list[int | torch.SymInt]]:
    """Return the shapes of the inputs; a free size is a ``torch.SymInt``."""
    return [[_plain(size) for size in value.shape] for value in _input_tensors(program)]


def input_dtypes(program: ExportedProgram) -> list[torch.dtype]:
    """Return the dtypes of the inputs."""
    return [value.dtype for value in _input_tensors(program)]


def _input_tensors(program: ExportedProgram) -> list[Tensor]:
    names = program.graph_signature.user_inputs
    nodes = {node.name: node for node in program.graph.nodes}
    values = (nodes[name].meta["val"] for name in names if isinstance(name, str) and name in nodes)
    return [value for value in values if isinstance(value, Tensor)]


def size_conditions(program: ExportedProgram) -> list[Any]:
    """Return the conditions on free sizes, as expressions of sympy, that a program relies on.

    torch.export records the branch that the model's code takes for the example. The program does
    not check by itself that another size would take the same branch.
    """
    sizes = [size for shape in input_shapes(program) for size in shape]
    for size in sizes:
        if isinstance(size, torch.SymInt):
            env = size.node.shape_env
            # Sizes that torch.export found to be fixed or equal are replaced.
            found = dict.fromkeys(env.replace(guard.expr) for guard in env.guards)
            return [expression for expression in found if expression.free_symbols]
    return []


def _plain(size: int | torch.SymInt) -> int | torch.SymInt:
    """Return a size that torch.export found to be fixed as an integer."""
    return size if isinstance(size, int) or size.node.expr.free_symbols else int(size)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings and log lines of torch's exporters."""
    loggers = [
        logging.getLogger(name) for name in ("torch.onnx", "torch._export", "onnxscript", "onnx_ir")
    ]
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


def _export(model: nn.Module, inputs: Inputs, free: Free) -> ExportedProgram:
    def axes(leaf: object) -> dict[int, Any] | None:
        if not isinstance(leaf, Tensor):
            return None
        return dict.fromkeys(range(leaf.dim()), Dim.AUTO) if free == "all" else {0: Dim.DYNAMIC}

    shapes: Any = None
    if free != "none":
        named = inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs).arguments
        shapes = tree_map(axes, dict(named))
    with torch.no_grad(), without_attention_fast_path():
        program = torch.export.export(
            model, inputs.args, inputs.kwargs, dynamic_shapes=shapes, strict=False
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names paths on this machine
    return program
