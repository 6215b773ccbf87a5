"""Optimizer updates that are scaled by a power of the weight.

The optimizer's update of a weight, from ``w_old`` to ``w``, is multiplied by

    min(4, |w_old|^power / mean),

where the mean of ``|w|^power`` is over the nonzero weights of the tensor. Large weights learn
faster and small weights more slowly, while the typical update stays as it is. Weights that are
small when they are removed then matter less, and those that remain have learned more.

This is a step of mirror descent with the potential ``|w|^(2 - power)``. In terms of the paper, the
update is divided by the auxiliary variable ``s = |w|^(p - 2)`` with p = 2 - power. Training
``theta`` in ``w = theta * |theta|`` (powerpropagation, Schwarz et al., 2021) has a similar effect.

The means are in ``group["target_means"]``, so that a resumed training continues exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from pdecay._core.validation import check_number
from pdecay._optim.engine import Copies
from pdecay._optim.kernels.old_weights import OldWeights
from pdecay._optim.kernels.selection import may_use_c
from pdecay._sparsity.pools import steered
from pdecay._sparsity.probing import sample_rows
from pdecay._sparsity.shards import local_part, sum_over_ranks_

_LARGEST = 4.0  # bounds the update of the largest weights
_ROWS = 128  # rows of each tensor that the mean is computed from
# The weights on this rank, their values before the update, and the means of their tensors.
_Before = tuple[list[Tensor], "OldWeights | list[Tensor]", list[float]]


class ScaledUpdates:
    """Scales the updates of the steered weights of several optimizers.

    Args:
        power: from 0 to 1; with 0 the updates stay as they are.
    """

    def __init__(self, power: float) -> None:
        if check_number("update_power", power) > 1:
            raise ValueError(f"update_power must be from 0 to 1, got {power!r}")
        self.power = power
        self._old: dict[Optimizer, OldWeights] = {}
        self._copies: dict[Optimizer, Copies] = {}  # where C cannot copy
        self._before: dict[Optimizer, _Before] = {}

    def clear(self) -> None:
        """Free the copies of the weights."""
        self._old.clear()
        self._copies.clear()
        self._before.clear()

    def before_step(self, optimizer: Optimizer, *, refresh: bool) -> None:
        """Copy the weights; compute all means again with `refresh`, else only unknown ones."""
        if not self.power:
            return
        params, means = [], []
        for group in optimizer.param_groups:
            known = list(group.get("target_means") or [0.0] * len(group["params"]))
            for i, param in steered(group):
                if refresh or not known[i]:
                    known[i] = mean_power(param, self.power)
                params.append(param)
                means.append(known[i])
            group["target_means"] = known  # a new list: state_dict() shares the old one
        local = [local_part(param) for param in params]
        old = self._old.setdefault(optimizer, OldWeights())
        if may_use_c(None) and old.copy(local):
            self._before[optimizer] = (local, old, means)
        else:
            copies = self._copies.setdefault(optimizer, Copies()).of(params)
            self._before[optimizer] = (local, [local_part(copy) for copy in copies], means)

    def skip_step(self, optimizer: Optimizer) -> None:
        """Forget that the weights were copied."""
        self._before.pop(optimizer, None)

    def after_step(self, optimizer: Optimizer) -> None:
        """Scale the update, if the weights were copied before it."""
        params, old, means = self._before.pop(optimizer, ([], [], []))
        if isinstance(old, OldWeights):
            if old.scale_updates_(means, self.power, _LARGEST):
                return
            old = old.tensors()
        for weight, copy, mean in zip(params, old, means, strict=True):
            if mean:
                scale_update_(weight, copy, self.power, mean)


@torch.no_grad()
def scale_update_(weight: Tensor, old: Tensor, power: float, mean: float) -> None:
    """Scale the update from `old` to `weight` by ``|old|^power / mean``; zeros stay zero.

    Example:
        >>> w = torch.tensor([1.5, 0.5, 0.0])
        >>> scale_update_(w, torch.tensor([1.0, 0.25, 0.1]), power=0.5, mean=1.0)
        >>> w
        tensor([1.5000, 0.3750, 0.0000])
    """
    magnitude = old.abs()
    if magnitude.dtype != torch.float64:
        magnitude = magnitude.float()  # half precision is rounded once, at the end
    scale = magnitude.pow_(power).div_(mean).clamp_(max=_LARGEST)
    scaled = old + scale * (weight - old)
    weight.copy_(torch.where(weight == 0, weight, scaled.to(weight.dtype)))


def mean_power(param: Tensor, power: float) -> float:
    """Return the mean of ``|w|^power`` over the nonzero weights of a tensor; 0 if there is none.

    Large tensors are sampled.
    """
    ((rows, groups),) = sample_rows([param], _ROWS)
    sums = torch.stack([rows.abs().double().pow_(power).sum(), rows.count_nonzero().double()])
    total, count = sum_over_ranks_(sums, groups).tolist()
    return total / count if count and math.isfinite(total) else 0.0
