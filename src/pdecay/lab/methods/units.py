"""The units of a network: the weights that compute each output of a layer, and their readers.

Units are found by running the network once with module hooks.
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
        name: the name of the layer.
        parts: the tensors with one row for each unit: the weight and bias of the layer and of the
            following norm. A unit whose rows are all zero outputs zero for every input.
        last: the module that outputs the units: the layer or the norm.
    """

    name: str
    parts: tuple[Tensor, ...]
    last: nn.Module

    def __len__(self) -> int:
        return len(self.parts[0])

    @torch.no_grad()
    def matrix(self) -> Tensor:
        """Return a copy of the units' parts as a matrix with one row for each unit."""
        return torch.cat(
            [part.flatten(1) if part.ndim > 1 else part[:, None] for part in self.parts], 1
        )

    @torch.no_grad()
    def set_rows(self, rows: Tensor, values: Tensor) -> None:
        """Set the units in the mask `rows` from a matrix with these rows only."""
        sizes = [part[0].numel() for part in self.parts]
        for part, piece in zip(self.parts, values.split(sizes, dim=1), strict=True):
            part[rows] = piece.reshape(-1, *part.shape[1:])

    @torch.no_grad()
    def zero(self, rows: Tensor) -> None:
        """Set the units in the mask `rows` to zero."""
        for part in self.parts:
            part[rows] = 0.0


def find_units(model: nn.Module, inputs: Tensor) -> list[Units]:
    """Return the units of all linear and convolutional layers except the output layer.

    Layers that share their weight, such as a tied head, are excluded too. A norm belongs to a layer
    if its input is the layer's output.
    """
    shared = _shared(model)
    maker: dict[int, nn.Module] = {}
    alive: list[Tensor] = []  # keeps the outputs alive, so that their ids are unique
    norm_after: dict[nn.Module, nn.Module] = {}

    def note_output(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        maker[id(output)] = module
        alive.append(output)

    def note_reader(module: nn.Module, given: tuple[Any, ...]) -> None:
        if id(given[0]) in maker:
            norm_after[maker[id(given[0])]] = module

    hooks = []
    for module in model.modules():
        if isinstance(module, _LAYERS):
            hooks.append(module.register_forward_hook(note_output))
        elif is_norm(module):
            hooks.append(module.register_forward_pre_hook(note_reader))
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
def zero_readers(model: nn.Module, inputs: Tensor, dead: dict[Units, Tensor]) -> None:
    """Zero the weights that multiply the zero outputs of dead units.

    The outputs of the model do not change. An input feature of a layer comes from dead units only
    if it is zero, and becomes NaN when the outputs of the dead units are replaced by NaN. The sum
    of a dead and a live unit is not zero, so its readers are not changed.

    Args:
        model: the model.
        inputs: an example.
        dead: the masks of the dead units by layer.
    """
    shared = _shared(model)
    zero: dict[nn.Module, Tensor] = {}
    tainted: dict[nn.Module, Tensor] = {}

    def find_zeros(module: nn.Module, given: tuple[Any, ...]) -> None:
        zero[module] = _over_features(module, given[0] == 0).all(0)

    def find_nan(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        tainted[module] = _over_features(module, given[0].isnan()).all(0)
        return (given[0].nan_to_num(), *given[1:])

    readers = [
        module
        for module in model.modules()
        if isinstance(module, _LAYERS)
        and module not in shared
        and getattr(module, "groups", 1) == 1
    ]
    _run(model, inputs, [module.register_forward_pre_hook(find_zeros) for module in readers])
    hooks = [units.last.register_forward_hook(_nan_outputs(mask)) for units, mask in dead.items()]
    _run(
        model,
        inputs,
        hooks + [module.register_forward_pre_hook(find_nan) for module in readers],
    )
    for module in readers:
        if module in zero:
            module.weight[:, zero[module] & tainted[module]] = 0.0


def _nan_outputs(mask: Tensor) -> Callable[..., Tensor]:
    def hook(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        changed = output.clone()
        changed.movedim(_feature_dim(module, output), -1)[..., mask] = torch.nan
        return changed

    return hook


def _over_features(module: nn.Module, values: Tensor) -> Tensor:
    """Reshape to a matrix with one column for each input feature of a layer."""
    moved = values.movedim(_feature_dim(module, values), -1)
    return moved.reshape(-1, moved.shape[-1])


def _feature_dim(module: nn.Module, values: Tensor) -> int:
    return values.ndim - 1 if isinstance(module, nn.Linear | nn.LayerNorm | nn.RMSNorm) else 1


def _shared(model: nn.Module) -> set[nn.Module]:
    """Return the modules that share a parameter with another module."""
    shared: set[nn.Module] = set()
    for _, owners in owners_of(model):
        if len({id(module) for _, module in owners}) > 1:
            shared.update(module for _, module in owners)
    return shared


@torch.no_grad()
def _run(model: nn.Module, inputs: Tensor, hooks: list[RemovableHandle]) -> Tensor:
    """Return the output in evaluation mode, and remove the hooks."""
    try:
        with evaluating(model):
            output: Tensor = model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return output
