"""Recording of a model as a program."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from pdecay._utils.errors import one_line
from pdecay.deployment.model.errors import ExportError
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.program import Free, exported
from pdecay.deployment.model.state import shared_copy
from pdecay.deployment.program.graph import encode, operator_name
from pdecay.deployment.program.operator import record_sparse_layers
from pdecay.deployment.program.sizes import sizes_of
from pdecay.deployment.program.structure import Structure, assemble, describe

VERSION = 1
_CONSTANTS = "constants."  # prefix of the names of tensors that belong to no module
_MODEL = "model."  # prefix of the names of the model's tensors in the exported wrapper


@dataclass(frozen=True)
class Captured:
    """A recorded model.

    Args:
        content: the graph as plain data.
        tensors: the parameters, buffers and constants that the graph uses, by name. The weight of a
            sparse layer is dense.
    """

    content: dict[str, Any]
    tensors: dict[str, Tensor]

    @cached_property
    def program(self) -> bytes:
        """The graph as compressed JSON, for :func:`restore`."""
        return zlib.compress(self._json, 9)

    @property
    def program_size(self) -> int:
        """The bytes of the JSON."""
        return len(self._json)

    def with_least(self, least: Mapping[str, int]) -> Captured:
        """Return the same program for free sizes of at least these numbers, by name."""
        sizes = self.content["sizes"]
        ranges = {
            name: [max(low, least.get(name, low)), high]
            for name, (low, high) in sizes["ranges"].items()
        }
        content = {**self.content, "sizes": {**sizes, "ranges": ranges}}
        return Captured(content, self.tensors)

    @cached_property
    def _json(self) -> bytes:
        return json.dumps(self.content, separators=(",", ":"), allow_nan=False).encode()


def capture(model: nn.Module, example: Inputs, free: Free = "all") -> Captured:
    """Record a model in eval mode.

    Args:
        model: the model.
        example: its inputs.
        free: the axes of the inputs that may have other sizes, if the model's code allows that.

    Raises:
        ExportError: if the model cannot be recorded.
    """
    flat = _Flat(shared_copy(model))
    tensors: list[Tensor] = []
    try:
        flat.inputs = describe([list(example.args), example.kwargs], tensors, "example_inputs")
        with torch.no_grad():
            # Another copy: a run may set buffers, which the program has with their old values.
            outputs = describe(example.call(shared_copy(model)), [], "the output")
        record_sparse_layers(flat)
        # The graph has the example's strides as numbers, so that inputs must be laid out alike.
        contiguous = tuple(tensor.contiguous() for tensor in tensors)
        program = exported(flat, Inputs(contiguous, {}), free)
        return _encoded(program.exported, flat.inputs, outputs, program.free_batch)
    except TypeError as error:
        raise ExportError(
            f"{type(model).__name__} cannot be saved as a program: {one_line(error)}"
        ) from error


class _Flat(nn.Module):
    """A model whose inputs and outputs are flat lists of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.inputs: Structure = {}

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = assemble(self.inputs, tensors)
        found: list[Tensor] = []
        describe(self.model(*args, **kwargs), found, "the output")
        return tuple(found)


def _encoded(
    program: ExportedProgram, inputs: Structure, outputs: Structure, free_batch: bool
) -> Captured:
    signature = program.graph_signature
    if any(one.kind is not OutputKind.USER_OUTPUT for one in signature.output_specs):
        raise TypeError("its forward changes buffers or inputs")
    tensors: dict[str, Tensor] = {}
    names: list[str | None] = []
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            names.append(None)
            continue
        tensor = program.state_dict.get(spec.target or "", program.constants.get(spec.target or ""))
        if not isinstance(tensor, Tensor):
            raise TypeError(f"it uses an object that is no tensor: {spec.target}")
        target = str(spec.target)
        is_own = spec.kind is not InputKind.CONSTANT_TENSOR and target.startswith(_MODEL)
        name = target.removeprefix(_MODEL) if is_own else _CONSTANTS + target
        tensors[name] = tensor.detach()
        names.append(name)
    graph = _plain_graph(program.graph_module.graph)
    content = {
        "version": VERSION,
        "torch": torch.__version__,
        "free_batch": free_batch,
        "contiguous": True,
        "inputs": inputs,
        "outputs": outputs,
        "sizes": sizes_of(program),
        "names": names,
        **graph,
    }
    return Captured(content, tensors)


def _plain_graph(graph: fx.Graph) -> dict[str, Any]:
    """Return the calls and the numbers of the results of a graph."""
    numbers: dict[fx.Node, int] = {}
    calls = []
    results: Any = []
    for node in graph.nodes:
        if node.op == "output":
            results = encode(node.args[0], numbers)
            continue
        if node.op == "call_function":
            kwargs = {name: encode(value, numbers) for name, value in node.kwargs.items()}
            calls.append([operator_name(node.target), encode(node.args, numbers), kwargs])
        elif node.op != "placeholder":
            raise TypeError("it has a part that torch.export keeps as a separate graph")
        numbers[node] = len(numbers)
    return {"calls": calls, "results": results}
