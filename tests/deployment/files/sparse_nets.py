"""A small sparse network with buffers and tied weights."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("scratch", torch.rand(3), persistent=False)


def sparse_net(seed=0):
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        model.embedding.weight[torch.rand(50, 16) < 0.9] = 0
    return model
