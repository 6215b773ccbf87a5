"""A recorded run of a model, as a list of PyTorch operations with the tensors they read and made.

The model runs once, in eval mode, under a `TorchDispatchMode`. It sees the ATen operations below
the modules and functions, so that loops, branches and masks in Python code need no interpretation.
The other tracers of the package cannot replace it: `runtime.usage` sees the torch functions that a
module calls, but not the operations inside them, and `runtime.fusion` needs a symbolic graph
(``torch.fx``), which many models do not have.
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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pdecay.deployment.compact.units import Labels
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import attribute_tensors, tensors_of
from pdecay.deployment.model.state import without_attention_fast_path

# Operations whose arguments may bring the inputs' sizes into a tensor made from parameters.
_SIZED = {"expand", "repeat", "new_zeros", "new_ones", "new_full", "new_empty"}
_CONVERSIONS = {"tolist", "numpy", "__array__", "__dlpack__"}
# The mask of a new value. A mask that is made during a recorded run may be wrapped and unusable.
_NOTHING = torch.zeros((), dtype=torch.bool, device="cpu")


@dataclass(eq=False)
class Value:
    """A tensor of the trace with the results of the analysis.

    Args:
        tensor: its value on the example.
        name: the name of the parameter or buffer that it is; None for all other tensors.
        weight: the name of the parameter that it equals up to the order of axes and the length of
            the rows; None for all other tensors.
        static: whether it comes from parameters and buffers alone. The shape of any other tensor
            may follow the shape of the model's inputs.
        sized: whether it comes from numbers as well, such as ``torch.zeros``, but not from inputs.
        labels: for each axis, the labels of its positions.
        varies: mask of the elements that depend on the model's inputs. The others are constant.
        live: mask of the elements that the model's outputs depend on.
        changed: mask of the elements that differ in a run with other numbers.
    """

    tensor: Tensor
    name: str | None = None
    weight: str | None = None
    static: bool = False
    sized: bool = False
    labels: list[Labels] = field(default_factory=list)
    varies: Tensor = _NOTHING
    live: Tensor = _NOTHING
    changed: Tensor = _NOTHING

    @property
    def nonzero(self) -> Tensor:
        """Mask of the elements that are not zero for every input."""
        return self.varies | (self.tensor != 0)

    def mark_live(self, mask: Tensor | bool) -> None:
        """Add elements to the live ones."""
        self.live = self.live | mask


@dataclass(eq=False)
class Call:
    """One operation.

    Args:
        op: the operation.
        args, kwargs: its arguments, with a `Value` for each tensor.
        outs: the tensors that it returned, or changed if it works in place.
        modules: the names of the modules that were running, outermost first.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Value]
    modules: tuple[str, ...]

    @cached_property
    def ins(self) -> list[Value]:
        """The tensors among the arguments."""
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Value)]

    @property
    def in_place(self) -> bool:
        """Whether the operation writes to one of its arguments."""
        return bool(self.op._schema.is_mutable)

    @property
    def name(self) -> str:
        """The name of the operation without namespace and overload."""
        return str(self.op.overloadpacket).removeprefix("aten.")

    @property
    def uninitialized(self) -> bool:
        """Whether the operation returns uninitialized memory, like ``torch.empty``."""
        return self.name.removeprefix("new_").startswith("empty")

    def __str__(self) -> str:
        module = next((name for name in reversed(self.modules) if name), "")
        return f"{module} ({self.name})" if module else self.name

    def run(self, replace: Callable[[Value], Any]) -> Any:
        """Run the operation again with each tensor replaced."""
        args, kwargs = tree_map(
            lambda leaf: replace(leaf) if isinstance(leaf, Value) else leaf,
            (self.args, self.kwargs),
        )
        return self.op(*args, **kwargs)


@dataclass(eq=False)
class Trace:
    """A recorded run.

    Args:
        calls: the operations in order.
        values: all tensors; parameters and buffers come first.
        outputs: the tensors that the code converted to lists or arrays, those that the model
            returned or stored in attributes or arguments, and those that its forward hooks see.
        error: the exception that ended the run early.
    """

    calls: list[Call]
    values: list[Value]
    outputs: list[Value]
    error: Exception | None = None

    @property
    def named(self) -> dict[str, Value]:
        """Parameters and buffers by name."""
        return {value.name: value for value in self.values if value.name is not None}

    @property
    def reads_numbers(self) -> bool:
        """Whether the code takes a number out of a tensor, by ``item()`` or ``int()``."""
        return any(call.name == "_local_scalar_dense" for call in self.calls)

    def mark_changed(self, other: Trace) -> None:
        """Mark the elements that differ in another run, as far as it has the same operations."""
        for call, theirs in zip(self.calls, other.calls, strict=False):
            if call.op is not theirs.op or call.modules != theirs.modules:
                break  # a number chooses another layer
            for value, got in zip(call.outs, theirs.outs, strict=True):
                if value.tensor.shape == got.tensor.shape:
                    value.changed = value.changed | (value.tensor != got.tensor)


def record(model: nn.Module, inputs: Inputs) -> Trace:
    """Run a model on its example and record the operations.

    Functionalization turns in-place operations into ones that return new tensors. Models with
    functions that do not support it are recorded without. A run that fails is recorded up to the
    failure, so that the first operation with a wrong shape can be found.
    """
    trace = _record(model, inputs, torch.func.functionalize)
    # Such as tensor.tolist(), and writing to a buffer.
    unsupported = ("functorch", "unallocated storage", "mutating a non-functional tensor")
    if trace.error is not None and any(text in str(trace.error) for text in unsupported):
        trace = _record(model, inputs, lambda run: run)
    return trace


def _record(
    model: nn.Module, inputs: Inputs, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Trace:
    # Use a copy, since tensors that a model caches during a recorded run are wrapped and unusable.
    model = copy.deepcopy(model, {id(param): param for param in model.parameters()})
    inputs = inputs.copy()  # the model may change its arguments in place
    recorder = _Recorder(model)
    leaves, spec = tree_flatten((inputs.args, inputs.kwargs))
    distinct = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
    outputs: list[Value] = []
    stored = attribute_tensors(model)

    def add_output(tensor: Tensor) -> None:
        tensor.clone()  # the recorded clone identifies the output's value
        outputs.extend(recorder.calls[-1].outs)

    def add_attribute(tensor: Tensor) -> None:
        tensor.clone()
        # A weight that is computed from others, as torch's prune does, is not read elsewhere.
        outputs.extend(value for value in recorder.calls[-1].outs if not value.static)

    def refuse(tensor: Tensor) -> None:
        raise NotImplementedError("functorch has no values for lists and arrays")

    def run(*tensors: Tensor) -> None:
        # A tensor that is given twice stays one tensor.
        by_id = {id(one): tensor for one, tensor in zip(distinct, tensors, strict=True)}
        args, kwargs = tree_unflatten([by_id.get(id(leaf), leaf) for leaf in leaves], spec)
        with _OnConversion(refuse if wrap is torch.func.functionalize else add_output):
            returned = model(*args, **kwargs)
        for tensor in tensors_of(returned):
            add_output(tensor)
        given = set(map(id, tensors))
        for tensor in tensors_of((args, kwargs)):  # the model may add results to a list or dict
            if id(tensor) not in given:
                add_output(tensor)
        for key, tensor in attribute_tensors(model).items():
            if key not in stored:
                add_attribute(tensor)
        for tensor in tensors_of(recorder.shown):
            add_output(tensor)

    error: Exception | None = None
    with (
        torch.no_grad(),
        without_attention_fast_path(),
        sdpa_kernel(SDPBackend.MATH),  # matrix products and softmax: a fused kernel hides heads
        recorder.track_modules(),
        recorder,
    ):
        try:
            wrap(run)(*distinct)
        except Exception as raised:
            error = raised
    return Trace(recorder.calls, recorder.values, outputs, error)


class _OnConversion(TorchFunctionMode):
    """Calls a function with each tensor that code converts to lists or arrays.

    The recorder does not see these conversions, which are no operations. Like an output, such a
    tensor may be used anywhere.
    """

    def __init__(self, call: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _CONVERSIONS:
            self._call(args[0])
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self._model = model
        self.shown: list[Any] = []  # what the model's own hooks see
        self._running: list[str] = []  # names of modules
        # By id. The values keep their tensors alive, so that no id is used twice.
        self._value_of: dict[int, Value] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._add(Value(tensor.detach(), name=name, weight=name, static=True), tensor)

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        values, named = tree_map(self._lookup, (args, kwargs))
        if torch.Tag.inplace_view in op.tags:
            # Such as transpose_ in torch's GRU: record it as transpose, which returns a new value.
            values[0].tensor = values[0].tensor.detach()  # keeps its shape
            result = op(*args, **kwargs)
            made = [self._add(Value(result), result)]
            self.calls.append(Call(_out_of_place(op), values, named, made, tuple(self._running)))
            return result
        result = op(*args, **kwargs)
        outs = [out for out in tree_flatten(result)[0] if isinstance(out, Tensor)]
        if op._schema.is_mutable:
            made = self._written(op, values, named)
        else:
            made = [self._add(Value(out), out) for out in outs]
        call = Call(op, values, named, made, tuple(self._running))
        if not op._schema.is_mutable:
            is_static = bool(call.ins) and all(value.static for value in call.ins)
            is_static = is_static and call.name not in _SIZED
            # new_zeros and zeros_like do not read the tensor they are given.
            is_new = call.name.startswith("new_") or call.name.endswith("_like")
            is_sized = is_new or all(value.static or value.sized for value in call.ins)
            for value in made:
                value.static = is_static
                value.sized = is_sized and not is_static
        self.calls.append(call)
        return result

    @contextlib.contextmanager
    def track_modules(self) -> Iterator[None]:
        """Record which modules are running."""
        hooks = []
        for name, module in self._model.named_modules():
            if module._forward_hooks:
                show: Any = self._show
                hooks.append(module.register_forward_hook(show, prepend=True, with_kwargs=True))
            if any(map(_is_user_hook, module._forward_pre_hooks.values())):
                show = self._show
                hooks.append(module.register_forward_pre_hook(show, with_kwargs=True))
            hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._running.append(name)

    def _show(self, module: nn.Module, *seen: Any) -> None:
        self.shown.append(seen)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()

    def _lookup(self, leaf: Any) -> Any:
        """Return a tensor's value. An unknown tensor is an input and gets a new value."""
        if not isinstance(leaf, Tensor):
            return leaf
        return self._value_of.get(id(leaf)) or self._add(Value(leaf), leaf)

    def _written(self, op: OpOverload, args: Any, kwargs: Any) -> list[Value]:
        """Return all values that share storage with the arguments an in-place operation writes."""
        written = []
        for i, argument in enumerate(op._schema.arguments):
            if argument.is_write:
                written.append(args[i] if i < len(args) else kwargs.get(argument.name))
        storages = {_storage(leaf) for leaf in tree_flatten(written)[0] if isinstance(leaf, Value)}
        return [value for value in self.values if _storage(value) in storages]

    def _add(self, value: Value, tensor: Tensor) -> Value:
        self.values.append(value)
        self._value_of[id(tensor)] = value
        return value


def _is_user_hook(hook: Any) -> bool:
    """Return whether a hook may read a layer's input; hooks of torch.nn.utils only set weights."""
    kinds = type(hook).__mro__
    return not any(kind.__module__.startswith("torch.nn.utils.") for kind in kinds)


def _out_of_place(op: OpOverload) -> OpOverload:
    """Return the operation that returns a view instead of changing its argument."""
    packet = getattr(torch.ops.aten, op.overloadpacket.__name__.removesuffix("_"))
    found = (getattr(packet, name) for name in packet.overloads())
    kinds = [str(argument.type) for argument in op._schema.arguments]
    same = (one for one in found if [str(a.type) for a in one._schema.arguments] == kinds)
    return next(same, op)


def _storage(value: Value) -> int:
    return value.tensor.untyped_storage().data_ptr()
