"""The decay step on torch tensors: which learning rate it takes, and the multiplication itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.optim import Optimizer

from pdecay._core.group_settings import Group
from pdecay._core.penalty import Penalty
from pdecay._core.tensors import TensorList
from pdecay._core.validation import check_number


def decay_rate(
    group: Group, optimizer: Optimizer, lr: float | Tensor | None = None
) -> float | Tensor:
    """The decay's learning rate; 0 where a gradient scaler skips this step.

    It is the group's "decay_lr", else `lr`, else the group's "lr". It is a number wherever that
    can be had for free; a tensor only where it lies on a device, so that nothing has to wait.
    """
    if group["decay_lr"] is not None:
        lr = group["decay_lr"]
    elif lr is None:
        lr = group["lr"]
    on_device = isinstance(lr, Tensor) and (lr.device.type != "cpu" or is_compiling())
    if not on_device:
        lr = check_number("lr", lr.item() if isinstance(lr, Tensor) else lr)
    rate: float | Tensor = lr
    found_inf = getattr(optimizer, "found_inf", None)  # set by GradScaler around fused steps
    if found_inf is None:
        return rate
    if found_inf.device.type == "cpu":
        return 0.0 if found_inf.item() else rate
    skip: Tensor = found_inf != 0
    return rate * ~skip


def check_rate(lr: float | Tensor) -> float | Tensor:
    """The learning rate, if it is a finite number >= 0; else an error that names it."""
    check_number("lr", lr.item() if isinstance(lr, Tensor) and lr.numel() == 1 else lr)
    return lr


def factors(
    weights: Sequence[Tensor], penalty: Penalty, rate: float | Tensor, *, foreach: bool = False
) -> list[Tensor]:
    """The decay's factor for each tensor, from the weights as they are now."""
    if not foreach:
        return [penalty.factor(weight, rate) for weight in weights]
    by: dict[int, Tensor] = {}
    for alike in _alike(weights):
        listed = penalty.factor(TensorList([weights[i] for i in alike]), rate).tensors
        by.update(zip(alike, listed, strict=True))
    return [by[i] for i in range(len(weights))]


def multiply_(weights: Sequence[Tensor], by: Sequence[Tensor], *, foreach: bool = False) -> None:
    """Multiply weights by their factors; half-precision weights are rounded once, at the end."""
    if foreach and weights:
        torch._foreach_mul_(list(weights), list(by))
    else:
        for weight, factor in zip(weights, by, strict=True):
            weight.mul_(factor)


def _alike(weights: Sequence[Tensor]) -> list[list[int]]:
    """The indices of the tensors, put together where device and dtype are the same."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, weight in enumerate(weights):
        groups.setdefault((weight.device, weight.dtype), []).append(i)
    return list(groups.values())
