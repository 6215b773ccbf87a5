"""A network's units: the weights that make each output of a layer, and the layers that read it.

Found by running the network once and watching its modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pdecay._core.parameters import is_norm, owners_of
from pdecay.deployment.model.state import evaluating

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, eq=False)
class Units:
    """The output units of one layer.

    Args:
        name: of the layer.
        parts: all that makes a unit, by rows: the weight, the bias, and those of a norm that
            follows. A unit whose rows are all zero gives zero, whatever its input.
        last: the module that gives the units' values: the layer or the norm.
    """

    name: str
    parts: tuple[Tensor, ...]
    last: nn.Module

    def __len__(self) -> int:
        return len(self.parts[0])

    @torch.no_grad()
    def matrix(self) -> Tensor:
        """A copy of all that makes the units, one row each."""
        return torch.cat(
            [part.flatten(1) if part.ndim > 1 else part[:, None] for part in self.parts], 1
        )

    @torch.no_grad()
    def set_rows(self, rows: Tensor, values: Tensor) -> None:
        """Give the units `rows` (a mask) the values of a matrix that has only these rows."""
        sizes = [part[0].numel() for part in self.parts]
        for part, piece in zip(self.parts, values.split(sizes, dim=1), strict=True):
            part[rows] = piece.reshape(-1, *part.shape[1:])

    @torch.no_grad()
    def zero(self, rows: Tensor) -> None:
        """Set the units `rows` (a mask) to zero."""
        for part in self.parts:
            part[rows] = 0.0


def find_units(model: nn.Module, inputs: Tensor) -> list[Units]:
    """The units of all linear and convolutional layers but those whose output is the model's.

    Left out too are layers that share their weight, as with an embedding: its rows are symbols.
    A norm belongs to a layer if it reads the layer's output itself.
    """
    shared = _shared(model)
    maker: dict[int, nn.Module] = {}
    kept: list[Tensor] = []  # outputs stay alive, so that no other tensor gets their id
    norm_after: dict[nn.Module, nn.Module] = {}

    def made(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        maker[id(output)] = module
        kept.append(output)

    def reads(module: nn.Module, given: tuple[Any, ...]) -> None:
        if id(given[0]) in maker:
            norm_after[maker[id(given[0])]] = module

    hooks = []
    for module in model.modules():
        if isinstance(module, _LAYERS):
            hooks.append(module.register_forward_hook(made))
        elif is_norm(module):
            hooks.append(module.register_forward_pre_hook(reads))
    output = _run(model, inputs, hooks)
    units = []
    for name, module in model.named_modules():
        if not isinstance(module, _LAYERS) or module in shared:
            continue
        if maker.get(id(output)) is module:
            continue
        norm = norm_after.get(module)
        parts = [*module.parameters(), *(norm.parameters() if norm is not None else ())]
        units.append(Units(name, tuple(parts), norm if norm is not None else module))
    return units


@torch.no_grad()
def silence_readers(model: nn.Module, inputs: Tensor, dead: dict[Units, Tensor]) -> None:
    """Zero the weights by which other layers read dead units: they multiply zeros only.

    Args:
        model: the model; what it computes stays as it is.
        inputs: an example.
        dead: for each layer's units a mask of those that are zero.

    A layer's input is a dead unit's if it is zero, and becomes not-a-number when that unit's
    output is made so. A sum of a dead unit and a live one is not zero, and is left alone.
    """
    shared = _shared(model)
    zero: dict[nn.Module, Tensor] = {}
    touched: dict[nn.Module, Tensor] = {}

    def look(module: nn.Module, given: tuple[Any, ...]) -> None:
        zero[module] = _over_features(module, given[0] == 0).all(0)

    def look_and_heal(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        touched[module] = _over_features(module, given[0].isnan()).all(0)
        return (given[0].nan_to_num(), *given[1:])

    readers = [
        module
        for module in model.modules()
        if isinstance(module, _LAYERS)
        and module not in shared
        and getattr(module, "groups", 1) == 1
    ]
    _run(model, inputs, [module.register_forward_pre_hook(look) for module in readers])
    poisons = [units.last.register_forward_hook(_poison(mask)) for units, mask in dead.items()]
    _run(
        model,
        inputs,
        poisons + [module.register_forward_pre_hook(look_and_heal) for module in readers],
    )
    for module in readers:
        if module in zero:
            module.weight[:, zero[module] & touched[module]] = 0.0


def _poison(mask: Tensor) -> Callable[..., Tensor]:
    def hook(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        spoiled = output.clone()
        spoiled.movedim(_feature_dim(module, output), -1)[..., mask] = torch.nan
        return spoiled

    return hook


def _over_features(module: nn.Module, values: Tensor) -> Tensor:
    """As a matrix with one column for each input feature of a layer."""
    moved = values.movedim(_feature_dim(module, values), -1)
    return moved.reshape(-1, moved.shape[-1])


def _feature_dim(module: nn.Module, values: Tensor) -> int:
    return values.ndim - 1 if isinstance(module, nn.Linear | nn.LayerNorm | nn.RMSNorm) else 1


def _shared(model: nn.Module) -> set[nn.Module]:
    """The modules that hold a parameter which another module holds too."""
    shared: set[nn.Module] = set()
    for _, owners in owners_of(model):
        if len({id(module) for _, module in owners}) > 1:
            shared.update(module for _, module in owners)
    return shared


@torch.no_grad()
def _run(model: nn.Module, inputs: Tensor, hooks: list[RemovableHandle]) -> Tensor:
    """The model's output in evaluation mode; takes the hooks off again."""
    try:
        with evaluating(model):
            output: Tensor = model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return output
