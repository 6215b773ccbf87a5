"""Parameters of several shapes, and steps on given gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pdecay import PSGD, Lp, PAdam

DECAY = Lp(0.8, 0.3)
SHAPES = ((4, 3), (3,), (2, 3, 2), (5, 1))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    seeded = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=seeded).to(dtype)) for s in SHAPES]
    with torch.no_grad():
        params[0][0] = 0.0
    return params


def set_gradients(params: list[nn.Parameter], t: int) -> None:
    seeded = torch.Generator().manual_seed(100 + t)
    for param in params:
        noise = torch.randn(param.shape, generator=seeded)
        param.grad = (param.detach() + noise).to(param.dtype)


def steps(optimizer: torch.optim.Optimizer, n: int, start: int = 0) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for t in range(start, start + n):
        set_gradients(params, t)
        optimizer.step()


def everything(optimizer: torch.optim.Optimizer) -> dict:
    groups = [dict(group) for group in optimizer.param_groups]
    return copy.deepcopy({"groups": groups, "state": list(optimizer.state.values())})


BOTH = pytest.mark.parametrize("cls", [PAdam, PSGD])
PATHS = pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
