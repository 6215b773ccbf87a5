"""Weights, gradients and expected steps of the tests of attach."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim import Optimizer

from pdecay import Lp

DECAY = Lp(0.8, 0.5)
LR = 0.1


def weight(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    values = torch.randn(shape or (3, 4), generator=torch.Generator().manual_seed(seed))
    return nn.Parameter(values.to(dtype))


def with_gradient(*params: nn.Parameter) -> None:
    for i, param in enumerate(params):
        seeded = torch.Generator().manual_seed(100 + i)
        param.grad = torch.randn(param.shape, generator=seeded).to(param.dtype)


def decayed(w_tilde: torch.Tensor, w_old: torch.Tensor, decay=DECAY, lr=LR) -> torch.Tensor:
    return w_tilde.detach() * decay.factor(w_old.detach(), lr)


def sgd_step(param: nn.Parameter, lr: float = LR) -> torch.Tensor:
    """Return a parameter after a step of plain SGD."""
    return param.detach().add(param.grad, alpha=-lr)


def everything(optimizer: Optimizer) -> dict:
    """Return a copy of an optimizer's weights, state, groups and hooks."""
    return copy.deepcopy(
        {
            "groups": [dict(group) for group in optimizer.param_groups],
            "state": list(optimizer.state.values()),
            "hooks": [len(v) for k, v in vars(optimizer).items() if k.endswith("_hooks")],
            "defaults": optimizer.defaults,
        }
    )
