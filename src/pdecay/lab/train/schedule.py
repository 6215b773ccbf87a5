"""The learning rate's course in all experiments: the paper's warm-up and cosine."""

from __future__ import annotations

import functools
import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

_FLOOR = 0.01  # the last learning rate, in parts of the highest


def schedule(optimizer: Optimizer, steps: int, warmup: int = 0, floor: float = _FLOOR) -> LambdaLR:
    """The learning rate's course: linear warm-up, then a cosine down to `floor` of the highest.

    The highest is the optimizer's own `lr`; call ``.step()`` after each optimizer step.
    """
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup must be >= 0 and < steps, got {warmup} of {steps}")
    if not 0 <= floor <= 1:
        raise ValueError(f"floor must be from 0 to 1, got {floor}")
    factor = functools.partial(lr_factor, steps=steps, warmup=warmup, floor=floor)
    return LambdaLR(optimizer, factor)


def lr_factor(step: int, steps: int, warmup: int, floor: float = _FLOOR) -> float:
    """The learning rate of a step (from 0) in parts of the highest.

    Step ``warmup - 1`` has the highest and step ``steps - 1`` the lowest. The first is above
    zero, so that no step is without effect.

    Example:
        >>> [round(lr_factor(step, 10, 2), 2) for step in (0, 1, 5, 9)]
        [0.5, 1.0, 0.51, 0.01]
    """
    done = step + 1
    if done <= warmup:
        return done / warmup
    progress = min(1.0, (done - warmup) / (steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
