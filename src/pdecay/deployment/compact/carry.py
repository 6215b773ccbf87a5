"""Taking an optimizer along, so that training goes on where it was."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdecay._optim.attachment import attachment_of
from pdecay.deployment.compact.surgery import Kept, cut
from pdecay.deployment.model.errors import CompactError


def check(optimizer: object, model: nn.Module) -> None:
    """Before anything is done: that the optimizer is this model's, and can be taken along."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    shapes = {id(param): tuple(param.shape) for param in model.parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in shapes:
                raise CompactError(
                    f"the optimizer has a parameter of shape {tuple(param.shape)} that is not this "
                    "model's: give the optimizer that trains this model"
                )
            for key, state in optimizer.state.get(param, {}).items():
                if isinstance(state, Tensor) and state.ndim and state.shape != param.shape:
                    raise CompactError(
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(state.shape)} "
                        f"for a parameter of shape {tuple(param.shape)}: it is not known which of "
                        "it belongs to which unit. Make a new optimizer for the smaller model"
                    )


@torch.no_grad()
def carried(optimizer: Optimizer, model: nn.Module, smaller: nn.Module, kept: Kept) -> Optimizer:
    """A copy of an optimizer for the smaller model: same groups, same settings, less state."""
    counterparts = dict(smaller.named_parameters())
    names = {id(param): name for name, param in model.named_parameters()}
    # Where the copy meets a parameter of the model, it takes the smaller model's.
    memo: dict[int, Any] = {
        id(param): counterparts[name] for name, param in model.named_parameters()
    }
    made = copy.deepcopy(optimizer, memo)
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = names[id(param)]
            state = made.state.get(counterparts[name], {})
            for key, value in state.items():
                if name in kept and isinstance(value, Tensor) and value.ndim:
                    state[key] = cut(value, kept[name])
    attached = attachment_of(optimizer)
    if attached is not None:  # a copy has lost its hooks
        attached.copy_to(made)
    return made
