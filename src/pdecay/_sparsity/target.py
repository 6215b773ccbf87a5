"""A decay that is steered to a given sparsity.

    pdecay.SparsityTarget(optimizer, 0.9, total_steps=1000)
    for batch in batches:
        ...
        optimizer.step()

With a fixed lam the final sparsity is unknown in advance. :class:`SparsityTarget` instead follows a
cubic ramp of sparsities. At each stage it ranks all decayed weights, by their length in Adam's
metric (see ``metric.py``) or by magnitude, and sets as many of the lowest to zero as the ramp asks
for. The decay keeps them there. At the end of the ramp the count of zeros is exact. After that,
:func:`pdecay.freeze_zeros` keeps the zeros, and the other weights train without decay.

A feedback controller on the count of zeros would oscillate: weights that are small but not zero
grow again as soon as lam falls.

With an `update_power`, large weights learn faster than small ones (see ``scaled_updates.py``). With
a `pull`, the decay also shrinks the weights that are still to be removed (see ``pull.py``).

The target acts in the optimizer's step hooks. Its state lives in ``optimizer.param_groups`` (see
``target_state.py``), so every checkpoint of the optimizer is also a checkpoint of the target.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pdecay._core.group_settings import Group
from pdecay._core.ramp import check_ramp, check_target, cubic_ramp, ramp_steps
from pdecay._core.validation import check_count, check_number
from pdecay._optim.attachment import attachment_of, complete_groups, is_decaying
from pdecay._optim.hooks import (
    StepHooks,
    check_not_local,
    find_hooks,
    is_skipped,
    only_creates_state,
)
from pdecay._sparsity.freezing import decaying_list, hold_zeros, zero_keeping_groups
from pdecay._sparsity.lost_zeros import ZeroWatch
from pdecay._sparsity.metric import (
    Rank,
    check_rank,
    create_squares,
    update_squares,
)
from pdecay._sparsity.pools import PerLayer, check_per_layer, steered
from pdecay._sparsity.probing import Probes
from pdecay._sparsity.pull import check_list_of_scales, list_scales, set_scales
from pdecay._sparsity.ranking import count_zeros
from pdecay._sparsity.scaled_updates import ScaledUpdates
from pdecay._sparsity.steering import Steering, groups_of
from pdecay._sparsity.target_state import (
    check_not_released,
    complete_state,
    count_initial_zeros,
    remove_state,
    result_of_ramp,
    save_in,
    update_means,
)
from pdecay._sparsity.target_warnings import (
    warn_of_lost_state,
    warn_of_missed_target,
    warn_of_non_finite_weights,
    warn_of_too_few_steps,
)
from pdecay._utils.user_warnings import warn_user

_TOLERANCE = 0.01  # a share of zeros that is lower by more than this misses the target
_LAG = 0.1  # share of the ramp that a pulled weight has to shrink before it is set to zero
_PULL: dict[Rank, float] = {"adaptive": 0.0, "magnitude": 1.0}


class SparsityTarget:
    """Steer the decay so that a given share of the decayed weights is zero at the end.

    Create it once. It then acts after each real step of the optimizer: with gradient accumulation
    nothing changes, and steps that a gradient scaler skips do not count. Its state is part of the
    optimizer's, so ``optimizer.state_dict()`` is all that a checkpoint needs. Create the target
    before or after ``optimizer.load_state_dict``; the run continues exactly.

    Args:
        optimizer: a PAdam, a PSGD, or any optimizer that ``pdecay.attach`` was called on, with
            some p < 2. Its lam only sets the relative strength of the terms of a sum. A list of
            optimizers, for instance one for each parameter, is steered as one. If they step at
            different frequencies, a run with a `pull` that resumes between two of their steps
            differs slightly: a measurement is lost.
        target: the share of the decayed weights that must be exactly zero, above 0 and below 1.
            Weights that do not require a gradient at the step of their optimizer are neither pruned
            nor counted.
        total_steps: the number of optimizer steps of the training; for a list, those of the
            optimizer that steps most often.
        start, end: the start and the end of the ramp, as shares of `total_steps`. After the end,
            the nonzero weights train without decay.
        per_layer: True ranks each tensor by itself, so that each ends at the target. A mapping
            from tensors to targets does so for these tensors, and ranks the rest together.
        floor: the share of each tensor that is kept regardless of the ranking, so that no layer
            is removed. The target is met in any case: where both do not fit, less is kept.
        rank: the order in which weights are removed. "adaptive" ranks by ``|w| * v^(1/4)``, the
            length of a weight in Adam's own metric; v is the optimizer's running mean of squared
            gradients, or one that the target keeps itself. "magnitude" ranks by ``|w|``.
        pull: how fast the decay shrinks a weight whose turn it is, in units of the optimizer's
            typical update. The default is 0 for "adaptive" and 1 for "magnitude". With 0 the decay
            only keeps zeros at zero, and all zeros are set by rank.
        update_power: until the end of the ramp, scale the optimizer's update of a weight by
            ``|w|^update_power``, relative to the mean over its tensor, so that large weights learn
            faster. From 0 (the update stays as it is) to 1; 0.5 suits transformers. It takes the
            memory of a copy of the weights.

    Parameters that are added or unfrozen during the ramp join it. With rank="adaptive", a tensor
    joins it at its first gradient, or at its end. Parameters that are added or unfrozen after the
    end of the ramp are neither decayed nor pruned. Zeros that the model already has may move until
    the ramp begins; to keep them, call :func:`freeze_zeros` first. On many ranks (DDP, FSDP2,
    tensor parallelism, ZeroRedundancyOptimizer) the result is that of one process.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        target: float,
        total_steps: int,
        *,
        start: float = 0.1,
        end: float = 0.85,
        per_layer: PerLayer = False,
        floor: float = 0.0,
        rank: Rank = "adaptive",
        pull: float | None = None,
        update_power: float = 0.0,
    ) -> None:
        self._hooks = [_Hooks(one, self) for one in decaying_list(optimizer, "SparsityTarget")]
        for one in self.optimizers:
            check_not_local(one, "SparsityTarget")
            zero_keeping_groups(one, "SparsityTarget")
            if target_of(one) is not None:
                raise ValueError("the optimizer has a SparsityTarget already; detach() it first")
        self.total_steps = check_count("total_steps", total_steps)
        check_ramp(start, end)
        self.target = check_target("target", target)
        self.start, self.end = start, end
        self.per_layer = per_layer
        self.floor = check_number("floor", floor)
        check_rank(rank)
        self.rank: Rank = rank
        self.pull = _PULL[rank] if pull is None else check_number("pull", pull)
        self.update_power = update_power
        self._updates = ScaledUpdates(update_power)
        self._lists_scales = bool(self.pull and (per_layer or self.floor))
        self._begin, self._end, self._every = ramp_steps(start, end, total_steps)
        if len(self._hooks) > 1:  # the last step is never counted if one of them does not take it
            self._end = max(self._begin + 1, min(self._end, total_steps - 1))
        check_per_layer(per_layer, self._groups())
        self._probes = Probes()
        self._watch = ZeroWatch()
        self._steering = Steering(self.target, per_layer)
        self._warned = self._warned_of_non_finite = self._ended = False
        if self._lists_scales:
            check_list_of_scales(self.optimizers)
        pools = self._steering.pools(self.optimizers)
        if not pools:
            raise ValueError(
                "SparsityTarget: the optimizer has no decayed weights that require a gradient"
            )
        continues = any(group.get("target_sparsity") == self.target for group in self._groups())
        for pool in pools:
            pool.check(self.floor, continues=continues)
        warn_of_lost_state(self.optimizers)
        complete_state(list(self._groups()), self.target, self._end)
        if self._lists_scales:
            list_scales(self._groups())
        if rank == "adaptive":
            for one in self.optimizers:
                create_squares(_steered_params(one), one)
        for hooks in self._hooks:
            hooks.register()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The steered optimizers, unwrapped."""
        return [hooks.optimizer for hooks in self._hooks]

    @property
    def sparsity(self) -> float:
        """The share of the decayed weights that are exactly zero now."""
        pools = self._steering.pools(self.optimizers)
        size = sum(pool.size for pool in pools)
        return sum(count_zeros(pool.params) for pool in pools) / size if size else 0.0

    @property
    def last_step(self) -> int:
        """The number of steps so far."""
        return int(self.optimizers[0].param_groups[0].get("target_step", 0))

    def detach(self) -> None:
        """Stop steering and remove the state; a second call does nothing.

        The weights and ``group["decay_scale"]`` keep their values. To keep the zeros as well, call
        :func:`pdecay.freeze_zeros`.
        """
        if target_of(self.optimizers[0]) is not self:
            return
        for hooks in self._hooks:
            hooks.detach()
        remove_state(self._groups())

    def step(self) -> None:
        """Do nothing. Deprecated: the target acts in the optimizer's step."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                "SparsityTarget.step() does nothing and can be removed: the target acts in "
                "optimizer.step()",
                DeprecationWarning,
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the step, for information: the state is in ``optimizer.state_dict()``."""
        return {"last_step": self.last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: ``optimizer.load_state_dict`` restores the state."""

    def __repr__(self) -> str:
        options = [f"rank={self.rank!r}", f"pull={self.pull:g}"]
        options += [f"update_power={self.update_power:g}"] if self.update_power else []
        options += [f"floor={self.floor:g}"] if self.floor else []
        if self.per_layer:
            options.append("per_layer=" + ("True" if self.per_layer is True else "{...}"))
        try:
            progress = f"last_step={self.last_step}"
        except ReferenceError:
            progress = "deleted optimizer"
        settings = [
            f"{self.target:g}, total_steps={self.total_steps}, start={self.start:g}",
            f"end={self.end:g}",
            *options,
            progress,
        ]
        return f"SparsityTarget({', '.join(settings)})"

    # State

    def _groups(self) -> Iterator[Group]:
        return groups_of(self.optimizers)

    def complete_checkpoint(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of an optimizer's checkpoint that has a state of this target."""
        self._probes.clear()
        self._watch.clear()
        self._steering.clear()
        self._updates.clear()
        groups = [dict(group) for group in state_dict["param_groups"]]
        if self.last_step and not any("target_step" in group for group in groups):
            warn_user(
                f"the checkpoint has no state of this SparsityTarget: its ramp starts over after "
                f"{self.last_step} steps, and zeros may move until it begins"
            )
        complete_state(groups, self.target, self._end)
        return {**state_dict, "param_groups": groups}

    # Steps

    def before_step(self, optimizer: Optimizer) -> bool:
        """Copy weights, to scale their update and to measure how far the step moves them.

        Return whether weights or scales may have changed, because the last step was counted now.
        """
        if not is_decaying(optimizer):
            raise RuntimeError(
                "the decay, which keeps the zeros of this SparsityTarget, was detached from the "
                "optimizer; call detach() of the target as well, or attach the decay again"
            )
        self._steering.begin_step(optimizer, self.optimizers)
        complete_groups(optimizer)
        complete_state(list(self._groups()), self.target, self._end)
        if self.last_step >= self._begin:  # a schedule may have changed p, a user the rate
            zero_keeping_groups(optimizer, "SparsityTarget")
        check_not_released(optimizer.param_groups, ended=self.last_step >= self._end)
        is_late = _has_stepped(optimizer)  # another optimizer of the list skipped the last step
        if is_late:
            self._advance()
        step = self.last_step + 1
        if step <= self._end:
            # The first step after a stage has new means: the stage removed the smallest weights.
            refresh = (self.last_step - self._begin) % self._every == 0
            self._updates.before_step(optimizer, refresh=refresh)
        if (step - self._begin) % self._every == 0:
            self._watch.check(_steered_params(optimizer), step)
        # Without a pull, the measurement only finds out whether the step was finite.
        if self._is_stage(step) or (self.pull and self._begin <= step <= self._end):
            self._probes.before_step(optimizer, _steered_params(optimizer))
        return is_late

    def after_step(self, optimizer: Optimizer) -> None:
        """Measure the step, and advance once all optimizers took theirs."""
        if is_skipped(optimizer):
            self._probes.skip_step(optimizer)
            self._updates.skip_step(optimizer)
            return
        self._updates.after_step(optimizer)
        if self.rank == "adaptive" and self.last_step < self._end:
            update_squares(_steered_params(optimizer), optimizer)
        if only_creates_state(optimizer):
            self._probes.skip_step(optimizer)
            return
        self._probes.after_step(optimizer, _steered_params(optimizer))
        for group in optimizer.param_groups:
            group["target_stepped"] = 1
        if all(map(_has_stepped, self.optimizers)):
            self._advance()

    def _advance(self) -> None:
        """Count a step of all optimizers, and set the decay of the next one."""
        step = self.last_step + 1
        save_in(self._groups(), target_step=step, target_stepped=0)
        if step > self._end and not self._ended:
            self._check_end()
        if step == 2 * self.total_steps:
            warn_of_too_few_steps(step, self.total_steps, self._end)
        if not self._begin <= step <= self._end:
            return
        count_initial_zeros(self._groups(), self._steering.trained(self.optimizers))
        finite = self._measure_update()
        if step == self._end:
            self._ended = True
            self._updates.clear()
            self._zero_lowest(1.0)
            self._hold_zeros()
        elif finite and self._is_stage(step):
            lag = _LAG * (self._end - self._begin) if self.pull else 0
            self._zero_lowest(cubic_ramp(int(step - lag), self._begin, self._end))
            if self.pull:
                self._set_scales(cubic_ramp(step, self._begin, self._end))
            else:
                self._hold_zeros()
        if step == self._end or self._is_stage(step):
            self._watch.count(self._steering.owners(self.optimizers))

    def _hold_zeros(self) -> None:
        """Keep the zeros, without decay of other weights."""
        hold_zeros(self.optimizers, "SparsityTarget")
        if self._lists_scales:
            list_scales(self._groups())

    def _check_end(self) -> None:
        """Warn if a checkpoint is from after the end of the ramp, but misses the target."""
        self._ended = True
        self._watch.count(self._steering.owners(self.optimizers))
        targets = self.per_layer if isinstance(self.per_layer, Mapping) else {}
        zeros, asked, size = result_of_ramp(self._groups(), self.target, targets)
        if size and zeros >= asked - _TOLERANCE * size:
            return
        self._hold_zeros()
        warn_of_missed_target(zeros, asked, size, step=self.last_step - 1, end=self._end)

    def _is_stage(self, step: int) -> bool:
        """Check whether weights are ranked after this step."""
        return self._begin <= step <= self._end and (step - self._begin) % self._every == 0

    def _measure_update(self) -> bool:
        """Update the running measurements; return False and keep them after a non-finite step."""
        squared_changes, nonzeros, magnitudes = self._probes.take()
        if not math.isfinite(squared_changes) or not math.isfinite(magnitudes):
            if not self._warned_of_non_finite:
                self._warned_of_non_finite = True
                warn_of_non_finite_weights(self._steering.owners(self.optimizers), self.last_step)
            return False
        update_means(list(self._groups()), squared_changes, nonzeros, magnitudes)
        return True

    def _zero_lowest(self, progress: float) -> None:
        self._steering.zero_lowest(self.optimizers, self.rank, progress, self.floor)

    def _set_scales(self, progress: float) -> None:
        set_scales(
            self.optimizers,
            self._steering.ranked_pools(self.optimizers, self.rank, progress),
            progress,
            floor=self.floor,
            pull=self.pull,
            by_param=self._lists_scales,
        )


def target_of(optimizer: Optimizer) -> SparsityTarget | None:
    """Return the target that steers this optimizer, if there is one."""
    hooks = find_hooks(optimizer, _Hooks)
    return hooks.target if hooks else None


class _Hooks(StepHooks):
    """The hooks of a target on one of its optimizers."""

    def __init__(self, optimizer: Optimizer, target: SparsityTarget) -> None:
        super().__init__(optimizer)
        self.target = target

    def before_step(self, *, has_closure: bool) -> None:
        changed = self.target.before_step(self.optimizer)
        attachment = attachment_of(self.optimizer)
        if changed and attachment is not None:  # it has copied the weights without the new zeros
            attachment.before_step(has_closure=has_closure)

    def after_step(self) -> None:
        self.target.after_step(self.optimizer)

    def before_load_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return self.target.complete_checkpoint(state_dict)


def _has_stepped(optimizer: Optimizer) -> bool:
    """Return whether an optimizer took the current step, and others of the list did not yet."""
    return any(group.get("target_stepped") for group in optimizer.param_groups)


def _steered_params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for _, param in steered(group))
