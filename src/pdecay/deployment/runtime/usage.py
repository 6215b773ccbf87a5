"""How a model uses its layers, observed by running it on an example without changing it.

The inputs of each layer are recorded by global module hooks in an ordinary run. A second run
intercepts every torch function. It finds weights that other modules read, and modules whose output
is only used by one other module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pdecay._core.parameters import has_transposed_weight
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import tensors_of

LAYERS = (nn.Linear, nn.Conv2d)
_FOLLOWERS = (batchnorm._BatchNorm, nn.ReLU)  # modules that may become part of a layer
# Functions that read only a tensor's shape, dtype or layout, not its values.
_METADATA = {"size", "dim", "stride", "numel", "is_contiguous", "is_floating_point", "is_complex"}
_METADATA |= {"ndimension", "nelement", "element_size", "storage_offset", "get_device", "__len__"}
_WRITES = {"__setitem__", "__set__"}
_WRITES |= {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
_WRITES |= {f"__i{name}__" for name in ("matmul", "and", "or", "xor", "lshift", "rshift")}


@dataclass(frozen=True)
class InputSpec:
    """The shape, dtype and memory format of a layer's input."""

    shape: torch.Size
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, x: Tensor) -> InputSpec:
        last = x.dim() == 4 and not x.is_contiguous()
        last = last and x.is_contiguous(memory_format=torch.channels_last)
        return cls(x.shape, x.dtype, last)

    def random(self) -> Tensor:
        """Return a random tensor with this specification."""
        x = torch.randn(self.shape, dtype=self.dtype, device="cpu")
        return x.to(memory_format=torch.channels_last) if self.channels_last else x


@dataclass
class Usage:
    """The observed use of a model's modules.

    Args:
        calls: see :func:`record_calls`.
        readers: for each layer, the names of other modules that use its weight directly.
        next_of: for each layer, batch norm or ReLU: the module that receives all its outputs and
            nothing else, if there is one.
    """

    calls: dict[nn.Module, list[InputSpec | None]]
    readers: dict[nn.Module, set[str]]
    next_of: dict[nn.Module, nn.Module]


@dataclass(frozen=True)
class Operation:
    """A call of a torch function.

    Args:
        function: the function.
        constants: its arguments that are numbers or strings.
        in_place: whether it may change a tensor in place.
    """

    function: Any
    constants: tuple[Any, ...]
    in_place: bool

    @classmethod
    def of(cls, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        leaves = tree_leaves((args, kwargs))
        constants = tuple(one for one in leaves if isinstance(one, bool | int | float | str))
        name = getattr(function, "__name__", "")
        in_place = (
            (name.endswith("_") and not name.endswith("__"))
            or name in _WRITES
            or kwargs.get("out") is not None
            or any(value is True for value in (*args, kwargs.get("inplace")))
        )
        return cls(function, constants, in_place)


@torch.inference_mode()
def observe_usage(model: nn.Module, inputs: Inputs) -> Usage:
    """Run the model on the inputs and return how it uses its modules."""
    tracker = _Tracker(model)
    hook = model.register_forward_pre_hook(tracker.begin, with_kwargs=True)
    try:
        with _on_each_call(model, tracker.enter, tracker.leave), tracker:
            tracker.finish(inputs.call(model))
    finally:
        hook.remove()
    return Usage(record_calls(model, inputs), tracker.readers, tracker.next_of())


@torch.inference_mode()
def record_calls(model: nn.Module, inputs: Inputs) -> dict[nn.Module, list[InputSpec | None]]:
    """Return the inputs of each module's calls; None if an input is not a single plain tensor."""
    calls: dict[nn.Module, list[InputSpec | None]] = {}

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        # nn.TransformerEncoder makes a nested tensor of a padded one, which has no shape.
        single = len(args) == 1 and isinstance(args[0], Tensor) and not args[0].is_nested
        calls.setdefault(module, []).append(InputSpec.of(args[0]) if single else None)

    with _on_each_call(model, record):
        inputs.call(model)
    return calls


@torch.inference_mode()
def count_tensor_calls(model: nn.Module, inputs: Inputs) -> dict[nn.Module, int]:
    """Return the number of calls of each module whose positional arguments are always tensors."""
    calls: dict[nn.Module, list[bool]] = {}

    def count(module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.setdefault(module, []).append(all(isinstance(one, Tensor) for one in args))

    with _on_each_call(model, count):
        inputs.call(model)
    return {module: len(kinds) for module, kinds in calls.items() if all(kinds)}


@torch.inference_mode()
def record_operations(model: nn.Module, inputs: Inputs) -> dict[nn.Module, list[Operation]]:
    """Return the torch functions that the forward of each module calls, without its submodules."""
    recorder = _Recorder()
    with _on_each_call(model, recorder.enter, recorder.leave), recorder:
        inputs.call(model)
    return recorder.operations


def is_layer(module: nn.Module) -> TypeGuard[nn.Linear | nn.Conv2d]:
    """Return whether a module is a layer that may have a sparse form.

    A ``Conv1D`` of transformers counts as an ``nn.Linear``; its weight is transposed.
    """
    return isinstance(module, LAYERS) or has_transposed_weight(module)


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module has forward hooks, or a forward of its own instead of its class."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


@dataclass
class _Product:
    """An output of a module and the modules that use it; None is the model's caller."""

    tensor: Tensor
    maker: nn.Module
    users: list[nn.Module | None] = field(default_factory=list)


class _Recorder(TorchFunctionMode):
    """A recorder of the torch functions that the forward of each module calls."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[nn.Module, list[Operation]] = {}
        self.active: list[nn.Module] = []

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.active.append(module)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.active.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.active:
            called = self.operations.setdefault(self.active[-1], [])
            called.append(Operation.of(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Tracker(TorchFunctionMode):
    """A recorder of the uses of weights and module outputs during a run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.owners = {
            id(parameter): module
            for module in model.modules()
            if is_layer(module)
            for parameter in module.parameters(recurse=False)
        }
        self.readers: dict[nn.Module, set[str]] = {}
        self.products: list[_Product] = []  # keeps tensors alive, so that ids stay unique
        self.latest: dict[int, _Product] = {}
        self.counts: dict[nn.Module, int] = {}
        self.active: list[nn.Module] = []
        self.given: list[Any] = []  # the arguments of the model

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given.append((args, kwargs))

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.active.append(module)
        self.counts[module] = self.counts.get(module, 0) + 1
        if module._forward_pre_hooks:  # they may keep what they see, for the caller
            self._record_uses(list(tensors_of(args)), None)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.active.pop()
        tracked = is_layer(module) or isinstance(module, _FOLLOWERS)
        if tracked and isinstance(output, Tensor):
            product = _Product(output, module)
            self.products.append(product)
            self.latest[id(output)] = product  # an in-place module replaces its input's product
        if module._forward_hooks:
            self._record_uses(list(tensors_of((args, output))), None)

    def finish(self, output: Any) -> None:
        # The model may add results to a list or dict among its arguments.
        self._record_uses(list(tensors_of((output, self.given))), None)
        for tensor in tensors_of([vars(module) for module in self.names]):
            if id(tensor) in self.latest:  # stored in an attribute, which the caller may read
                self.latest[id(tensor)].users.append(None)

    def next_of(self) -> dict[nn.Module, nn.Module]:
        users: dict[nn.Module, list[nn.Module | None]] = {}
        for product in self.products:
            users.setdefault(product.maker, []).extend(product.users or [None])
        found = {}
        for maker, used in users.items():
            (user, *others) = used
            only = all(other is user for other in others)
            if user is not None and only and self.counts[maker] == self.counts[user] == len(used):
                found[maker] = user
        return found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        reads_metadata = name in _METADATA or (name == "__get__" and not isinstance(result, Tensor))
        if not reads_metadata:
            user = self.active[-1] if self.active else None
            self._record_uses(tree_leaves((args, kwargs)), user)
        return result

    def _record_uses(self, leaves: list[Any], user: nn.Module | None) -> None:
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                continue
            owner = self.owners.get(id(leaf))
            # A module that shares the weight does not read it from the layer.
            shares = user is not None and any(leaf is own for own in user._parameters.values())
            if owner is not None and not shares:
                reader = "the model" if user is None else self.names.get(user, "") or "the model"
                self.readers.setdefault(owner, set()).add(reader)
            if id(leaf) in self.latest:
                self.latest[id(leaf)].users.append(user)


@contextmanager
def _on_each_call(
    model: nn.Module, enter: Callable[..., None], leave: Callable[..., None] | None = None
) -> Iterator[None]:
    """Call `enter` before and `leave` after each call of a submodule.

    Calls of other modules are ignored: modules that a forward creates or keeps in a plain list,
    and modules that other threads run.
    """
    modules = set(model.modules())

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module in modules:
            enter(module, args)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if leave is not None and module in modules:
            leave(module, args, output)

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
