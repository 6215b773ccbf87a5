"""The transfer of an optimizer to the smaller model, so that training can continue."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pdecay._optim.attachment import attachment_of
from pdecay.deployment.compact.shrink import KeptPositions, cut_state
from pdecay.deployment.model.errors import CompactError
from pdecay.deployment.model.outputs import tensors_of


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Check that an optimizer trains this model and that its state can be cut."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    known = {id(param) for param in model.parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in known:
                raise CompactError(
                    f"the optimizer has a parameter of shape {tuple(param.shape)} that is not in "
                    "this model: give the optimizer that trains this model"
                )
            for key, state in optimizer.state.get(param, {}).items():
                for tensor in tensors_of(state):
                    # Tensors in a list, such as the factors of Shampoo, are not cut.
                    if tensor.ndim and (tensor is not state or tensor.shape != param.shape):
                        raise CompactError(
                            f"{type(optimizer).__name__} keeps {key!r} of shape "
                            f"{tuple(tensor.shape)} for a parameter of shape "
                            f"{tuple(param.shape)}, which cannot be split by units: create a new "
                            "optimizer for the smaller model"
                        )


@torch.no_grad()
def copy_optimizer(
    optimizer: Optimizer, model: nn.Module, smaller: nn.Module, kept: KeptPositions
) -> Optimizer:
    """Return a copy of an optimizer for the smaller model: same groups and settings, less state."""
    counterparts = dict(smaller.named_parameters())
    names = {id(param): name for name, param in model.named_parameters()}
    # deepcopy replaces each parameter of the model by its counterpart.
    memo: dict[int, Any] = {key: counterparts[name] for key, name in names.items()}
    copied = copy.deepcopy(optimizer, memo)
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = names[id(param)]
            if name in kept:
                cut_state(copied.state.get(counterparts[name], {}), param.shape, kept[name])
    attached = attachment_of(optimizer)
    if attached is not None:  # the copy has lost its hooks
        attached.copy_to(copied)
    return copied
