"""A small task, and the plain PyTorch loop that every framework must reproduce to the last bit."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pdecay import Lp, PAdam, SparsityTarget, param_groups

EPOCHS = 5
BATCHES = 8
TARGET = 0.9
DECAY = Lp(0.8, 1.0)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES * 16, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(1))


def loader():
    return DataLoader(data(), batch_size=16)


def padam(model):
    return PAdam(param_groups(model), lr=1e-2, decay=DECAY)


def zeros(model):
    weights = [param for param in model.parameters() if param.ndim >= 2]
    return sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)


def plain_loop(accumulate=1, clip=None, make=padam, **options):
    """Train without any framework."""
    model = build()
    optimizer = make(model)
    steps = EPOCHS * BATCHES // accumulate
    SparsityTarget(optimizer, TARGET, steps, **options)
    for _ in range(EPOCHS):
        for index, (x, y) in enumerate(loader()):
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / accumulate).backward()
            if (index + 1) % accumulate == 0:
                if clip:  # in the optimizer's order: the sum of the norm depends on it
                    params = [p for group in optimizer.param_groups for p in group["params"]]
                    nn.utils.clip_grad_norm_(params, clip)
                optimizer.step()
                optimizer.zero_grad()
    return model


def assert_equal(model, other):
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
