"""Ask for a sparsity, get it.

    target = pdecay.SparsityTarget(optimizer, 0.9, total_steps=1000)
    for batch in batches:
        ...
        optimizer.step()
        target.step()

With a fixed lam the sparsity comes out as it will. Here it is asked for along a cubic ramp, and
lam is set from the weights themselves. ``tau`` is the magnitude of the weight whose turn it is: the
quantile of |w| at the sparsity that the ramp asks for now. ``decay_scale`` is chosen so that a
weight at tau shrinks at a set speed, which for p < 1 means that all below it shrink faster and all
above it slower. Weights whose turn was a while ago are set to exactly zero, where the decay holds
them; at the ramp's end the count is made exact. From then on the scale is next to nothing, which
still holds zeros (zero is a fixed point for any lam > 0), and the rest trains on undecayed.

A controller that follows the error of the count instead oscillates: weights that are small but not
zero come back as soon as lam falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pdecay._core.group_settings import Group, decayed_params
from pdecay._core.penalty import as_penalty
from pdecay._core.validation import check_count, check_number
from pdecay._optim.attachment import attachment_of, is_decaying
from pdecay._optim.step import decay_rate
from pdecay._sparsity.ranking import (
    count_zeros,
    group_of,
    kth_magnitude,
    local_part,
    zero_smallest_,
)

# Small enough to leave every weight alone and large enough to stay above 0 in single precision.
HOLD = 1e-30

_STAGES = 200  # how often the ramp is looked at: ranking all weights at each step would cost
_LAG = 0.1  # of the ramp: how long a weight has to get to zero by itself before it is set
# The decay's speed at tau, in units of the optimizer's typical update. From p = 1 on the weights
# that are to stay are pulled at least as hard as those at tau, and a full update would end them.
_SHARE_OF_UPDATE = {"below 1": 1.0, "from 1 on": 0.3}
_PROBED_ROWS = 8  # of each tensor, to see how far a step moves the weights


def freeze_zeros(optimizer: Optimizer) -> None:
    """From now on zeros stay zero and all other weights train on undecayed. No mask is kept.

    The decay's scale is set to next to nothing: its factor is then 1 for every weight but 0 for
    zeros. Set ``group["decay_scale"]`` back to decay again.
    """
    for group in _absorbing_groups(optimizer, "freeze_zeros"):
        group["decay_scale"] = HOLD


@dataclass
class _Pool:
    """Weights that are ranked together, and the share of them that has to be zero at the end."""

    params: list[Tensor]
    target: float
    size: int
    initial: float = 0.0  # the share that was zero when the ramp began


class SparsityTarget:
    """Steers the decay so that the decayed weights end at the asked sparsity.

    Args:
        optimizer: a PAdam, a PSGD, or any optimizer that ``pdecay.attach`` was called on, with
            some p < 2. Its lam only sets the terms of a sum in proportion to each other.
        target: the share of the decayed weights that are to be exactly zero, in (0, 1).
        total_steps: how many steps the training has.
        start, end: when the ramp begins and ends, as shares of `total_steps`. After its end the
            weights that are left train on undecayed.
        per_layer: True ranks each tensor by itself, so that each ends at the target; a mapping
            from tensors to targets does so for those, and the rest is ranked together.
        floor: the share of each tensor that stays, whatever the ranking says, so that no layer
            dies.

    Call :meth:`step` after each ``optimizer.step()``. Under DDP every rank comes to the same
    numbers; shards of FSDP2 are counted over all ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        target: float,
        total_steps: int,
        *,
        start: float = 0.1,
        end: float = 0.7,
        per_layer: bool | Mapping[Tensor, float] = False,
        floor: float = 0.0,
    ) -> None:
        groups = _absorbing_groups(optimizer, "SparsityTarget")
        check_count("total_steps", total_steps)
        if not 0 <= check_number("start", start) < check_number("end", end) <= 1:
            raise ValueError(f"0 <= start < end <= 1 must hold, got start={start!r}, end={end!r}")
        self.optimizer = optimizer
        self.total_steps = total_steps
        self.floor = check_number("floor", floor)
        self.last_step = 0
        self._begin = int(start * total_steps)
        self._end = max(self._begin + 1, round(end * total_steps))
        self._every = max(1, (self._end - self._begin) // _STAGES)
        self._update = 0.0  # the typical size of the optimizer's update of one weight
        self._typical = 0.0  # the mean magnitude of the weights that are not zero
        self._before: list[Tensor] = []
        params = [param for group in groups for param in _decayed(group)]
        self._by_layer = bool(per_layer) or bool(floor)
        self._pools = list(self._make_pools(params, _check_target("target", target), per_layer))
        for pool in self._pools:
            self._check_possible(pool)
        for group in groups:
            group["decay_scale"] = 0.0
        optimizer.register_step_pre_hook(self._remember)

    @property
    def sparsity(self) -> float:
        """The share of the decayed weights that are exactly zero now."""
        zeros = sum(self._zeros(pool) for pool in self._pools)
        return zeros / sum(pool.size for pool in self._pools)

    def asked(self, step: int) -> float:
        """How far along the ramp a step is, between 0 and 1: fast at first, then slower."""
        x = (step - self._begin) / (self._end - self._begin)
        return 1 - (1 - min(max(x, 0.0), 1.0)) ** 3

    def step(self) -> None:
        """Set the decay for the next step; call it after ``optimizer.step()``."""
        self.last_step += 1
        if self.last_step > self._end or self.last_step < self._begin:
            return
        if self.last_step == max(1, self._begin):
            for pool in self._pools:
                pool.initial = self._zeros(pool) / pool.size
        self._measure_update()
        if self.last_step == self._end:
            self._zero_smallest(1.0)
            freeze_zeros(self.optimizer)
        elif (self.last_step - self._begin) % self._every == 0:
            lag = _LAG * (self._end - self._begin)
            self._zero_smallest(self.asked(int(self.last_step - lag)))
            self._set_scales()

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_step": self.last_step,
            "update": self._update,
            "initial": [pool.initial for pool in self._pools],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if len(state_dict["initial"]) != len(self._pools):
            raise ValueError(
                f"the checkpoint ranks the weights in {len(state_dict['initial'])} pools, this "
                f"target in {len(self._pools)}: per_layer differs"
            )
        self.last_step = state_dict["last_step"]
        self._update = state_dict["update"]
        for pool, initial in zip(self._pools, state_dict["initial"], strict=True):
            pool.initial = initial

    def _make_pools(
        self, params: list[Tensor], target: float, per_layer: bool | Mapping[Tensor, float]
    ) -> Iterator[_Pool]:
        own: dict[Tensor, float] = {}
        if isinstance(per_layer, Mapping):
            own = {param: _check_target("a layer's target", t) for param, t in per_layer.items()}
            strangers = [tuple(param.shape) for param in own if not _among(param, params)]
            if strangers:
                raise ValueError(f"per_layer has tensors that do not decay, of shapes {strangers}")
        elif per_layer:
            own = dict.fromkeys(params, target)
        for param, layer_target in own.items():
            yield _Pool([param], layer_target, param.numel())
        rest = [param for param in params if param not in own]
        if rest:
            yield _Pool(rest, target, sum(param.numel() for param in rest))

    def _check_possible(self, pool: _Pool) -> None:
        if pool.target > 1 - self.floor:
            raise ValueError(
                f"target {pool.target:g} leaves less than the floor of {self.floor:g} that each "
                "layer is to keep"
            )
        zero = self._zeros(pool) / pool.size
        if zero > pool.target:
            raise ValueError(
                f"target {pool.target:g} is below the {zero:.4f} of the weights that are zero "
                "already, and zeros stay"
            )

    def _zeros(self, pool: _Pool) -> int:
        return count_zeros(pool.params)

    def _zero_smallest(self, along: float) -> None:
        """Set to zero what should be by now, at this point of the ramp."""
        for pool in self._pools:
            for params, count in self._with_floor(pool, along):
                zero_smallest_(params, count)

    def _with_floor(self, pool: _Pool, along: float) -> Iterator[tuple[list[Tensor], int]]:
        """Which tensors to rank together, and how many zeros they get at a point of the ramp.

        A tensor that the common ranking would take below its floor gets as many zeros as the
        floor allows, and the rest of the zeros is found among the others.
        """
        share = pool.initial + along * (pool.target - pool.initial)
        count, free = round(share * pool.size), list(pool.params)
        while self.floor and count:
            tau = kth_magnitude(free, count)
            most = {param: int((1 - self.floor) * param.numel()) for param in free}
            full = [param for param in free if self._below(param, tau) > most[param]]
            if not full or len(full) == len(free):
                break
            for param in full:
                yield [param], most[param]
                count -= most[param]
            free = [param for param in free if not _among(param, full)]
        yield free, count

    def _below(self, param: Tensor, tau: float) -> int:
        below = (param.detach().abs() <= tau).sum()
        return int(below.full_tensor() if hasattr(below, "full_tensor") else below)

    def _set_scales(self) -> None:
        """For each pool the scale at which a weight at its tau shrinks at the set speed."""
        taus: dict[Tensor, float] = {}
        for pool in self._pools:
            for params, count in self._with_floor(pool, self.asked(self.last_step)):
                tau = kth_magnitude(params, count) if count else 0.0
                taus.update(dict.fromkeys(params, tau))
        for group in _absorbing_groups(self.optimizer, "SparsityTarget"):
            scales = [
                self._scale_for(group, taus[param]) if param in taus else HOLD
                for param in group["params"]
            ]
            group["decay_scale"] = scales if self._by_layer else max(scales)

    def _scale_for(self, group: Group, tau: float) -> float:
        penalty = as_penalty(group["decay"])
        rate = self._rate(group)
        if not tau or not rate or penalty is None:
            return HOLD  # more weights are zero than the ramp asks for, or nothing moves at all
        lowest = min(p for p, lam in penalty.pairs() if lam)
        speed = _SHARE_OF_UPDATE["below 1" if lowest < 1 else "from 1 on"] * self._update
        # Above p = 1 the pull grows with the weight: it is set where the weights are that stay,
        # or it would grow without bound on them as tau goes to zero.
        large = max(tau, self._typical)
        pull: float = sum(lam * (large if p > 1 else tau) ** (p - 1) for p, lam in penalty.pairs())
        return speed / (rate * pull)

    def _rate(self, group: Group) -> float:
        attachment = attachment_of(self.optimizer)
        if attachment is not None:
            return float(attachment.rate(group))
        return float(decay_rate(group, self.optimizer))

    def _remember(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before each step: a few weights of each tensor, to see how far the step moves them."""
        if self._begin <= self.last_step + 1 <= self._end:
            self._before = [probe.clone() for probe in self._probes()]

    def _measure_update(self) -> None:
        if not self._before:
            return
        moved = torch.zeros(3, dtype=torch.float64)
        for before, now in zip(self._before, self._probes(), strict=True):
            alive = now != 0
            moved[0] += (now - before)[alive].abs().double().square().sum().cpu()
            moved[1] += alive.sum().cpu()
            moved[2] += now.abs().double().sum().cpu()
        self._before = []
        group = group_of(self._pools[0].params)
        if group is not None:
            torch.distributed.all_reduce(moved, group=group)
        if moved[1]:
            update = math.sqrt(float(moved[0] / moved[1]))
            self._update = update if not self._update else 0.9 * self._update + 0.1 * update
            self._typical = float(moved[2] / moved[1])

    def _probes(self) -> Iterator[Tensor]:
        for pool in self._pools:
            for param in pool.params:
                tensor = local_part(param).detach()
                yield tensor[:: max(1, len(tensor) // _PROBED_ROWS)]


def _absorbing_groups(optimizer: Optimizer, what: str) -> list[Group]:
    """The groups that decay weights and hold zeros, or an error that says what is missing."""
    if not isinstance(optimizer, Optimizer) or not is_decaying(optimizer):
        raise TypeError(
            f"{what} needs an optimizer that decays (PAdam, PSGD, or one that pdecay.attach was "
            f"called on), got {type(optimizer).__name__}"
        )
    groups = [group for group in optimizer.param_groups if _decayed(group)]
    if not groups:
        raise ValueError(f"{what}: the optimizer has no decayed weights")
    for group in groups:
        penalty = as_penalty(group["decay"])
        if penalty is None or not penalty.absorbs:
            raise ValueError(
                f"{what}: zero is a fixed point only for some p < 2 with lam > 0, "
                f"got {group['decay']}"
            )
        if group["decay_auxiliary"]:
            raise ValueError(
                f"{what} needs zeros that stay, and with auxiliary=Every(n) or Slow(rate) weights "
                "can leave zero; use Instant()"
            )
    return groups


def _decayed(group: Group) -> list[Tensor]:
    return [param for param in decayed_params(group) if param.numel()]


def _check_target(name: str, target: object) -> float:
    share = check_number(name, target)
    if not 0 < share < 1:
        raise ValueError(f"{name} must be above 0 and below 1, got {target!r}")
    return share


def _among(param: Tensor, params: Sequence[Tensor]) -> bool:
    return any(param is other for other in params)
