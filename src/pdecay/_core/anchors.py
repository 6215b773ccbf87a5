"""The decay step for torch tensors with a slow auxiliary variable; see ``auxiliary.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pdecay._core.auxiliary import first_anchor
from pdecay._core.penalty import Penalty


def decay_at_anchor_(
    param: Tensor,
    state: dict[str, Any],
    plain: Sequence[float],
    penalty: Penalty,
    rate: float | Tensor,
) -> None:
    """Decay a weight by its anchor's factor, then update the anchor.

    The anchor is created here, after the optimizer's first update, because many optimizers
    initialise their state only if it is empty. It is at least in single precision: in half
    precision, small steps of a slow anchor would be lost.
    """
    every, follow, start = plain
    anchor = state.get("anchor")
    if anchor is None:
        dtype = torch.promote_types(param.dtype.to_real(), torch.float32)
        value = first_anchor(start, penalty.pairs(), torch.finfo(dtype))
        anchor = torch.full_like(param, value, dtype=dtype)
        state["anchor"] = anchor
        state["anchor_steps"] = 0
    elif anchor.dtype.itemsize < 4:  # of a checkpoint
        anchor = state["anchor"] = anchor.float()
    # A skipped step, or one with lr = 0 or a scale of 0, changes nothing. It still creates the
    # anchor, because torch.distributed.checkpoint creates the state that it loads into by a step
    # with lr = 0.
    if isinstance(rate, float) and not rate:
        return
    param.mul_(penalty.factor(anchor, rate))
    state["anchor_steps"] += 1
    if state["anchor_steps"] % every == 0:
        # hypot, since the squares of small weights underflow
        size = param.abs().to(anchor.dtype)
        moved = torch.hypot(math.sqrt(1 - follow) * anchor, math.sqrt(follow) * size)
        if isinstance(rate, Tensor):  # on a device; it may be 0
            moved = torch.where(rate > 0, moved, anchor)
        anchor.copy_(moved)
