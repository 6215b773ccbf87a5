"""Small networks for the tests of deployment, and helpers to make them sparse and compare them."""

from __future__ import annotations

import torch
from torch import nn

from pdecay.lab.models import CNN, GPT, MLP, ResNet

# A model and an input for each.
NETWORKS = {
    "MLP": lambda: (MLP(64, (32, 16), 10), torch.randn(3, 64)),
    "CNN": lambda: (CNN(1, 16, (4, 8), 16, 10), torch.randn(3, 1, 16, 16)),
    "ResNet": lambda: (ResNet(4, (1, 2)), torch.randn(3, 3, 16, 16)),
    "GPT": lambda: (GPT(20, 16, 2, 2, 16), torch.randint(20, (3, 16))),
    "a layer": lambda: (nn.Linear(32, 16), torch.randn(3, 32)),
}


def mostly_zero(model, sparsity=0.9):
    """Set random weights to zero but leave no dead unit, so that compact removes nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.rand(parameter.shape) >= sparsity)
                flat = parameter.view(len(parameter), -1)
                for o in range(len(flat)):
                    flat[o, o % flat.shape[1]] = 0.5
                for i in range(flat.shape[1]):
                    flat[i % len(flat), i] = 0.5
    return model


def with_batch_statistics(model, *inputs):
    """Give batch norms running statistics and random affine parameters."""
    model.train()
    for _ in range(3):
        model(*inputs)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.normal_(module.bias)
    return model


def assert_same(deployed, model, *inputs):
    model.eval()
    with torch.no_grad():
        for given in (inputs, tuple(one.flip(0) for one in inputs)):
            torch.testing.assert_close(deployed(*given), model(*given), rtol=1e-4, atol=1e-5)


class Windows(nn.Module):
    """A network over windows of a sequence, which shrink for a short one and stay small.

    The Swin of transformers does so.
    """

    def __init__(self):
        super().__init__()
        self.size = 4
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        length = x.shape[1]
        if length <= self.size:
            self.size = length
        x = nn.functional.pad(self.first(x).relu(), (0, 0, 0, -length % self.size))
        return self.second(x.unflatten(1, (-1, self.size)).amax(2)).mean(1)
