"""The training loop: a model, an optimizer, batches in random order, one learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the name that torch's users know
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

WARM_UP = 0.05  # the share of all steps that the learning rate rises in
FLOOR = 0.01  # where the cosine ends, as a share of the maximum: the paper's


def warmup_cosine(steps: int) -> Callable[[int], float]:
    """The paper's schedule as a multiplier of lr: linear from 0, then a cosine down to 1 %.

    Example:
        >>> schedule = warmup_cosine(steps=101)
        >>> [round(schedule(step), 3) for step in (0, 1, 5, 100)]
        [0.0, 0.2, 1.0, 0.01]
    """
    rise = max(1, round(WARM_UP * steps))
    fall = max(1, steps - 1 - rise)

    def multiplier(step: int) -> float:
        if step < rise:
            return step / rise
        done = min(1.0, (step - rise) / fall)
        return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2

    return multiplier


def train(
    model: nn.Module,
    optimizer: Optimizer,
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    batch: int,
    seed: int,
) -> None:
    """Train in place. The order of the images follows `seed` alone; an odd last batch is left out.

    Nothing here knows of the decay: it is the optimizer's.
    """
    order = torch.Generator().manual_seed(seed)
    batches = len(images) // batch
    scheduler = LambdaLR(optimizer, warmup_cosine(epochs * batches))
    for _ in range(epochs):
        shuffled = torch.randperm(len(images), generator=order)
        for chosen in shuffled[: batches * batch].split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            scheduler.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images that the model names rightly."""
    right = model(images).argmax(dim=1) == labels
    return float(right.double().mean())
