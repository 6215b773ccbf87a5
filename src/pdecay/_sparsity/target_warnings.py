"""Warnings of a sparsity target: lost state, non-finite weights, unexpected numbers of steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from pdecay._core.group_settings import HOLD
from pdecay._optim.hooks import local_optimizer
from pdecay._optim.state_precision import FLOAT16_CAUSE, FLOAT16_REMEDY
from pdecay._utils.user_warnings import warn_user


def warn_of_lost_state(optimizers: Iterable[Optimizer]) -> None:
    """Warn about optimizers that decay as under a target, but have no state of one."""
    used = [one for one in optimizers if local_optimizer(one).state]
    decayed = [group for one in used for group in one.param_groups if group.get("decay")]
    if any("target_sparsity" in group for group in decayed):
        return
    scales = [group["decay_scale"] for group in decayed if group["decay_scale"] != 1]
    if scales:
        moves = "" if scales[0] == HOLD else ", and zeros may move until it begins"
        warn_user(
            f"the optimizer has taken steps with decay_scale={scales[0]}, as under a "
            f"SparsityTarget, but has no state of one: the ramp starts at step 0{moves}. To "
            "resume a run with torch.distributed.checkpoint, create the target before "
            "get_optimizer_state_dict"
        )


def warn_of_non_finite_weights(params: Iterable[Tensor], step: int) -> None:
    """Warn that weights are not finite, and name the probable cause."""
    half = any(param.dtype == torch.float16 for param in params)
    cause = (
        f"{FLOAT16_CAUSE}: {FLOAT16_REMEDY}"
        if half
        else "Load the last good checkpoint; lower lr, clip the gradients, or run pdecay.doctor"
    )
    warn_user(f"SparsityTarget: weights are infinite or NaN after step {step}. {cause}")


def warn_of_too_few_steps(step: int, total_steps: int, end: int) -> None:
    """Warn that the training is much longer than the number of steps that was given."""
    warn_user(
        f"SparsityTarget: the optimizer took {step} steps, twice total_steps = {total_steps}, and "
        f"the ramp ended after step {end}. If {total_steps} is a number of epochs, multiply it by "
        "the steps of an epoch"
    )


def warn_of_missed_target(zeros: int, asked: float, size: int, *, step: int, end: int) -> None:
    """Warn that a checkpoint from after the end of the ramp has too few zeros."""
    warn_user(
        f"SparsityTarget: the checkpoint is from step {step}, after the end of this ramp, step "
        f"{end}, but only {zeros} of its {size} weights are zero instead of {asked:.0f}: its ramp "
        "was longer. The target is not met; use at least the total_steps of the first run"
    )
