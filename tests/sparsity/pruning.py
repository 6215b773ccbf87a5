"""Optimizers of a small model, and its training and counts, for the tests of pruning."""

import pytest
import torch
from torch import nn

from pdecay import PSGD, Lp, PAdam, attach
from pdecay._sparsity.ranking import count_zeros


def weight_of(values):
    return nn.Parameter(torch.tensor([values]))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def train(model, optimizer, steps, *, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 6, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()


def zeros_of(model):
    return count_zeros([param for param in model.parameters() if param.ndim >= 2])


def weights_of(model):
    return sum(param.numel() for param in model.parameters() if param.ndim >= 2)


def unmoved(values):
    """Return a parameter with zero gradient, so that only the pruning changes it."""
    param = weight_of(values)
    param.grad = torch.zeros_like(param)
    return param, torch.optim.SGD([param], lr=1.0)


OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02, fused=True),
    "PAdam": lambda model: PAdam(model.parameters(), lr=0.02, decay=Lp(0.8, 1e-3)),
    "PSGD": lambda model: PSGD(model.parameters(), lr=0.5, decay=Lp(1, 1e-4)),
    "attached": lambda model: attached(torch.optim.Adam(model.parameters(), lr=0.02)),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def attached(optimizer):
    attach(optimizer, Lp(0.8, 1e-3))
    return optimizer
