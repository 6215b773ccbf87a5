"""How a model uses its layers: seen by running it on an example, without a change to it.

What a layer is called with is seen by global hooks; the model runs as it always does. Whether a
layer's weight is used by anyone but the layer, and whether all that a layer makes goes into one
other module, is seen in a second run, through each torch function that is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import tensors_of

LAYERS = (nn.Linear, nn.Conv2d)
_MAKERS = (*LAYERS, batchnorm._BatchNorm, nn.ReLU)  # whose outputs are followed
# Functions that ask a tensor for its form and leave its numbers alone.
_FORM = {"size", "dim", "stride", "numel", "is_contiguous", "is_floating_point", "is_complex"}
_FORM |= {"ndimension", "nelement", "element_size", "storage_offset", "get_device", "__len__"}


@dataclass(frozen=True)
class Input:
    """The form of a tensor that a layer was called with."""

    shape: torch.Size
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, x: Tensor) -> Input:
        last = x.dim() == 4 and not x.is_contiguous()
        last = last and x.is_contiguous(memory_format=torch.channels_last)
        return cls(x.shape, x.dtype, last)

    def random(self) -> Tensor:
        """A tensor of this form."""
        x = torch.randn(self.shape, dtype=self.dtype, device="cpu")
        return x.to(memory_format=torch.channels_last) if self.channels_last else x


@dataclass
class Wiring:
    """What was seen.

    Args:
        calls: as of :func:`calls`.
        readers: for each layer, the names of the modules that use its weight directly.
        next_of: for each layer, batch norm or ReLU, the module that is called with all of its
            outputs, if there is one, and if it is called with nothing else.
    """

    calls: dict[nn.Module, list[Input | None]]
    readers: dict[nn.Module, set[str]]
    next_of: dict[nn.Module, nn.Module]


@torch.inference_mode()
def wiring(model: nn.Module, inputs: Inputs) -> Wiring:
    """Run the model on the inputs, and tell how it uses its layers."""
    uses = _Uses(model)
    with _each_call(model, uses.enter, uses.leave), uses:
        uses.finish(inputs.call(model))
    return Wiring(calls(model, inputs), uses.readers, uses.next_of())


@torch.inference_mode()
def calls(model: nn.Module, inputs: Inputs) -> dict[nn.Module, list[Input | None]]:
    """The calls of each module: the form of its input, or None where that is not one tensor."""
    seen: dict[nn.Module, list[Input | None]] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        alone = len(args) == 1 and isinstance(args[0], Tensor)
        seen.setdefault(module, []).append(Input.of(args[0]) if alone else None)

    with _each_call(model, note):
        inputs.call(model)
    return seen


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


@dataclass
class _Product:
    """An output of a module, and the modules in which it was used; None is the model's caller."""

    tensor: Tensor
    maker: nn.Module
    users: list[nn.Module | None] = field(default_factory=list)


class _Uses(TorchFunctionMode):
    """Follows weights and outputs through a run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.owners = {
            id(parameter): module
            for module in model.modules()
            if isinstance(module, LAYERS)
            for parameter in module.parameters(recurse=False)
        }
        self.readers: dict[nn.Module, set[str]] = {}
        self.products: list[_Product] = []  # holds the tensors, so that no other gets their id
        self.latest: dict[int, _Product] = {}
        self.counts: dict[nn.Module, int] = {}
        self.inside: list[nn.Module] = []

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.inside.append(module)
        self.counts[module] = self.counts.get(module, 0) + 1

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.inside.pop()
        if isinstance(module, _MAKERS) and isinstance(output, Tensor):
            product = _Product(output, module)
            self.products.append(product)
            self.latest[id(output)] = product  # done in place, it takes the input's place

    def finish(self, output: Any) -> None:
        self._note(list(tensors_of(output)), None)

    def next_of(self) -> dict[nn.Module, nn.Module]:
        users: dict[nn.Module, list[nn.Module | None]] = {}
        for product in self.products:
            users.setdefault(product.maker, []).extend(product.users or [None])
        found = {}
        for maker, used in users.items():
            (user, *others) = used
            alone = all(other is user for other in others)
            if user is not None and alone and self.counts[maker] == self.counts[user] == len(used):
                found[maker] = user
        return found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        asks = name in _FORM or (name == "__get__" and not isinstance(result, Tensor))
        if not asks:
            self._note(tree_leaves((args, kwargs)), self.inside[-1] if self.inside else None)
        return result

    def _note(self, leaves: list[Any], user: nn.Module | None) -> None:
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                continue
            owner = self.owners.get(id(leaf))
            if owner is not None and owner is not user:
                reader = "the model" if user is None else self.names.get(user, "") or "the model"
                self.readers.setdefault(owner, set()).add(reader)
            if id(leaf) in self.latest:
                self.latest[id(leaf)].users.append(user)


@contextmanager
def _each_call(model: nn.Module, enter: Any, leave: Any = None) -> Iterator[None]:
    """Call `enter` before and `leave` after each call of a module of the model.

    What else is called is no layer of it: a module that a forward makes or keeps in a plain list,
    or one that another thread runs.
    """
    ours = set(model.modules())

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module in ours:
            enter(module, args)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if leave is not None and module in ours:
            leave(module, args, output)

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
