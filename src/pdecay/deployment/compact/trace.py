"""What a model does with its example, as a list of PyTorch's own operations.

The model runs once, in eval mode, and every operation below its modules is written down with the
tensors that it read and made. Nothing of its Python code is interpreted: a loop, a branch or a
mask that is built on the way are seen as what they did with this example.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pdecay.deployment.compact.units import Places
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import tensors_of


@dataclass(eq=False)
class Value:
    """A tensor of the trace, and what is found out about it.

    Args:
        tensor: as it was on the example.
        name: of the parameter or buffer that it is; else None.
        weight: the name of the parameter that it is up to the order of axes and the length of its
            rows; else None.
        places: for each axis, which units its positions belong to.
        varies: which elements depend on the model's inputs. The others are constants.
        live: of which elements the model's outputs depend.
    """

    tensor: Tensor
    name: str | None = None
    weight: str | None = None
    places: list[Places] = field(default_factory=list)
    varies: Tensor = field(default_factory=lambda: torch.zeros(()))
    live: Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def counts(self) -> Tensor:
        """Which elements can be anything but a constant zero."""
        return self.varies | (self.tensor != 0)


@dataclass(eq=False)
class Call:
    """One operation: its arguments with the tensors as values, and what it made or changed."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Value]
    modules: tuple[str, ...]  # that were at work, outermost first

    @cached_property
    def ins(self) -> list[Value]:
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Value)]

    @property
    def in_place(self) -> bool:
        return bool(self.op._schema.is_mutable)

    @property
    def name(self) -> str:
        return str(self.op.overloadpacket).removeprefix("aten.")

    @property
    def unfilled(self) -> bool:
        """Whether it makes a tensor that holds whatever its memory held before."""
        return self.name.removeprefix("new_").startswith("empty")

    def run(self, change: Callable[[Value], Any]) -> Any:
        """The operation on something else in place of its tensors."""
        args, kwargs = tree_map(
            lambda leaf: change(leaf) if isinstance(leaf, Value) else leaf, (self.args, self.kwargs)
        )
        return self.op(*args, **kwargs)


@dataclass(eq=False)
class Trace:
    """A run of a model."""

    calls: list[Call]
    values: list[Value]  # parameters and buffers first
    outputs: list[Value]
    error: Exception | None = None  # that ended it early

    @property
    def named(self) -> dict[str, Value]:
        return {value.name: value for value in self.values if value.name is not None}


def record(model: nn.Module, inputs: Inputs) -> Trace:
    """Run a model on its example and write down what it does.

    In-place operations are seen as ones that make new tensors, where the model's own functions
    allow it. A run that fails is kept up to the failure: so a shape that does not fit is found.
    """
    trace = _record(model, inputs, torch.func.functionalize)
    if trace.error is not None and "functorch" in str(trace.error):
        trace = _record(model, inputs, lambda run: run)
    return trace


def _record(
    model: nn.Module, inputs: Inputs, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Trace:
    # Of a copy, since what a model keeps of a recorded run is no good afterwards.
    model = copy.deepcopy(model, {id(param): param for param in model.parameters()})
    recorder = _Recorder(model)
    leaves, spec = tree_flatten((inputs.args, inputs.kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    outputs: list[Value] = []

    def run(*tensors: Tensor) -> None:
        given = list(leaves)
        for i, tensor in zip(where, tensors, strict=True):
            given[i] = tensor
        args, kwargs = tree_unflatten(given, spec)
        for tensor in tensors_of(model(*args, **kwargs)):
            tensor.clone()  # an operation that shows which value it is
            outputs.extend(recorder.calls[-1].outs)

    error: Exception | None = None
    with torch.no_grad(), plain_operations(), recorder.modules_named(), recorder:
        try:
            wrapped(run)(*(leaves[i] for i in where))
        except Exception as raised:
            error = raised
    return Trace(recorder.calls, recorder.values, outputs, error)


@contextlib.contextmanager
def plain_operations() -> Iterator[None]:
    """Attention as matrix products and a softmax, not as one kernel that hides its heads."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self._model = model
        self._at_work: list[str] = []
        # By identity. The values keep their tensors alive, so that no identity is used again.
        self._value_of: dict[int, Value] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._add(Value(tensor.detach(), name=name, weight=name), tensor)

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        values, named = tree_map(self._known, (args, kwargs))
        result = op(*args, **kwargs)
        outs = [out for out in tree_flatten(result)[0] if isinstance(out, Tensor)]
        if op._schema.is_mutable:
            made = self._changed(op, values, named)
        else:
            made = [self._new(out) for out in outs]
        self.calls.append(Call(op, values, named, made, tuple(self._at_work)))
        return result

    @contextlib.contextmanager
    def modules_named(self) -> Iterator[None]:
        """Know which module is at work."""
        hooks = []
        for name, module in self._model.named_modules():
            hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._at_work.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._at_work:
            self._at_work.pop()

    def _known(self, leaf: Any) -> Any:
        """A tensor's value; one that was never seen comes from outside, as the inputs do."""
        if not isinstance(leaf, Tensor):
            return leaf
        return self._value_of.get(id(leaf)) or self._new(leaf)

    def _changed(self, op: OpOverload, args: Any, kwargs: Any) -> list[Value]:
        """What an operation in place may have changed: all that lies in the same memory."""
        written = []
        for i, argument in enumerate(op._schema.arguments):
            if argument.is_write:
                written.append(args[i] if i < len(args) else kwargs.get(argument.name))
        memory = {_memory(leaf) for leaf in tree_flatten(written)[0] if isinstance(leaf, Value)}
        return [value for value in self.values if _memory(value) in memory]

    def _new(self, tensor: Tensor) -> Value:
        return self._add(Value(tensor), tensor)

    def _add(self, value: Value, tensor: Tensor) -> Value:
        self.values.append(value)
        self._value_of[id(tensor)] = value
        return value


def _memory(value: Value) -> int:
    return value.tensor.untyped_storage().data_ptr()
