"""The decay scale with which a sparsity target shrinks the weights that it removes next.

``tau`` is the quantile of |w| at the sparsity that the ramp asks for now. ``decay_scale`` is set so
that a weight at tau shrinks at a given speed, the `pull`. For p < 1 all weights below tau then
shrink faster and all above it slower. Weights are set to zero only after they have had time to
shrink.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from pdecay._core.group_settings import HOLD, Group
from pdecay._core.penalty import as_penalty
from pdecay._optim.attachment import attachment_of
from pdecay._optim.engine import decay_rate
from pdecay._optim.hooks import local_optimizer
from pdecay._sparsity.freezing import zero_keeping_groups
from pdecay._sparsity.pools import Pool
from pdecay._sparsity.ranking import kth_magnitude

# From p = 1 on, larger weights are pulled at least as hard as those at tau, and the full pull would
# remove them too.
_SHARE_FROM_1_ON = 0.3


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
    attachment = attachment_of(optimizer)
    rate = float(attachment.rate(group) if attachment else decay_rate(group, optimizer))
    if not tau or not math.isfinite(tau) or not rate or penalty is None:
        return HOLD  # there are more zeros than the ramp asks for, or the learning rate is 0
    lowest = min(p for p, lam in penalty.pairs() if lam)
    share = pull * (1.0 if lowest < 1 else _SHARE_FROM_1_ON)
    # Above p = 1 the decay grows with the weight. It is set at the typical weight that remains:
    # set at tau, it would grow without bound on these as tau falls to zero.
    large = max(tau, group["target_magnitude"])
    speed: float = sum(lam * (large if p > 1 else tau) ** (p - 1) for p, lam in penalty.pairs())
    return float(share * group["target_update"] / (rate * speed))
