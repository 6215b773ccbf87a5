"""The training loop: a model, an optimizer, batches in random order, one learning-rate schedule."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the name that torch's users know
from torch.optim import Optimizer

from pdecay.lab.train.schedule import schedule

WARM_UP = 0.05  # the share of all steps that the learning rate rises in


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
    steps = epochs * batches
    scheduler = schedule(optimizer, steps, warmup=round(WARM_UP * steps))
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
