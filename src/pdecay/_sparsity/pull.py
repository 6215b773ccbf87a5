"""The decay scale with which a sparsity target shrinks the weights that it removes next.

``tau`` is the quantile of |w| at the sparsity that the ramp asks for now. ``decay_scale`` is set so
that a weight at tau shrinks at a given speed, the `pull`. For p < 1 all weights below tau then
shrink faster and all above it slower. Weights are set to zero only after they have had time to
shrink.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from pdecay._core.group_settings import HOLD, Group
from pdecay._core.penalty import as_penalty
from pdecay._core.pull import pull_scale
from pdecay._optim.attachment import attachment_of
from pdecay._optim.engine import decay_rate
from pdecay._optim.hooks import local_optimizer
from pdecay._sparsity.freezing import zero_keeping_groups
from pdecay._sparsity.pools import Pool
from pdecay._sparsity.ranking import kth_magnitude


def set_scales(
    optimizers: Sequence[Optimizer],
    pools: Iterable[Pool],
    progress: float,
    *,
    floor: float,
    pull: float,
    by_param: bool,
) -> None:
    """Set each ``decay_scale`` so that weights at the tau of their pool shrink at a given speed.

    Args:
        optimizers: the steered optimizers.
        pools: the weights that are ranked now; other weights are held.
        progress: the progress along the ramp, from 0 to 1.
        floor, pull: as in :class:`pdecay.SparsityTarget`.
        by_param: give each parameter a scale of its own. Otherwise a group has one for all.
    """
    taus = _taus(pools, progress, floor)
    for optimizer in optimizers:
        for group in zero_keeping_groups(optimizer, "SparsityTarget"):
            scales = [
                _scale_at(taus[param], pull, group, optimizer) if param in taus else HOLD
                for param in group["params"]
            ]
            group["decay_scale"] = scales if by_param else max(scales)


def list_scales(groups: Iterable[Group]) -> None:
    """Replace a scale for all parameters of a group by a list, so that all checkpoints have lists.

    A full state dict of torch.distributed.checkpoint cannot turn one number into a list.
    """
    for group in groups:
        scale = group["decay_scale"]
        if group.get("decay") and not isinstance(scale, list):
            group["decay_scale"] = [scale] * len(group["params"])


def check_list_of_scales(optimizers: Iterable[Optimizer]) -> None:
    """Raise ValueError if an optimizer cannot have a list of scales."""
    if any(one is not local_optimizer(one) for one in optimizers):
        raise ValueError(
            "per_layer or floor with a pull gives each parameter its own decay_scale, which "
            "ZeroRedundancyOptimizer cannot pass on; use pull=0"
        )


def _taus(pools: Iterable[Pool], progress: float, floor: float) -> dict[Tensor, float]:
    """Return the tau of each tensor at a progress along the ramp."""
    taus: dict[Tensor, float] = {}
    for pool in pools:
        for params, count in pool.split(progress, floor, torch.detach):
            taus |= dict.fromkeys(params, kth_magnitude(params, count) if count else 0.0)
    return taus


def _scale_at(tau: float, pull: float, group: Group, optimizer: Optimizer) -> float:
    """Return the ``decay_scale`` of a group whose weights at `tau` shrink by `pull` updates."""
    penalty = as_penalty(group["decay"])
    if penalty is None:
        return HOLD
    attachment = attachment_of(optimizer)
    scale = pull_scale(
        penalty.pairs(),
        tau=tau,  # 0 if there are more zeros than the ramp asks for
        typical=group["target_magnitude"],
        update=group["target_update"],
        pull=pull,
        rate=float(attachment.rate(group) if attachment else decay_rate(group, optimizer)),
    )
    return max(scale, HOLD)
