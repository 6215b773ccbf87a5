"""A small model and its training."""

import torch
from torch import nn

from pdecay import Lp, PAdam, attach, param_groups

STEPS = 60


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


def loss_of(model, seed):
    torch.manual_seed(seed)
    x = torch.randn(32, 16)
    return nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))


def train(model, optimizer, steps=STEPS, start=0):
    for step in range(start, steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def weights(model):
    return [param for param in model.parameters() if param.ndim >= 2]


def zeros(params):
    return sum(int((w == 0).sum()) for w in params)


def size(params):
    return sum(w.numel() for w in params)


def assert_equal(model, other):
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def padam(model, decay=Lp(0.8, 1)):  # noqa: B008
    return PAdam(param_groups(model), lr=1e-2, decay=decay)


def attached(model, decay=Lp(0.8, 1)):  # noqa: B008
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    attach(optimizer, decay)
    return optimizer


def attached_groups(model):
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2, weight_decay=0)
    attach(optimizer, Lp(0.8, 1))
    return optimizer
