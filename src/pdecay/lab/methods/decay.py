"""Methods that shrink the weights at every step: L2, p-norm weight decay, L1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import pdecay
from pdecay import Lp, PAdam, SparsityTarget, prox
from pdecay._core.penalty import Penalty
from pdecay._core.validation import check_number
from pdecay.lab.methods.base import Method, Run, adamw, check_share, decayed_weights
from pdecay.lab.tasks import Task


def _padam(model: nn.Module, lr: float, decay: Penalty, l2: float = 0.0) -> PAdam:
    decayed, others = pdecay.param_groups(model, decay)
    return PAdam([decayed, {**others, "weight_decay": 0.0}], lr=lr, weight_decay=l2)


@dataclass(frozen=True)
class AdamWMethod(Method):
    """AdamW with decoupled L2 decay: the dense baseline."""

    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        check_number("weight_decay", self.weight_decay)

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        return Run(adamw(model, lr, self.weight_decay))


@dataclass(frozen=True)
class PAdamMethod(Method):
    """The paper's method: Adam with decoupled p-norm weight decay and a fixed lam."""

    p: float = 0.8
    lam: float = 0.01

    def __post_init__(self) -> None:
        Lp(self.p, self.lam)

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        return Run(_padam(model, lr, Lp(self.p, self.lam)))


@dataclass(frozen=True)
class ElasticMethod(Method):
    """The paper's elastic decay: PAdam with AdamW's L2 decay in addition to the p-norm."""

    p: float = 0.8
    lam: float = 0.01
    l2: float = 2e-3  # the paper's

    def __post_init__(self) -> None:
        Lp(self.p, self.lam)
        check_number("l2", self.l2)

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        return Run(_padam(model, lr, Lp(self.p, self.lam), self.l2))


@dataclass(frozen=True)
class TargetMethod(Method):
    """PAdam with a controlled lam, so that a given share of the weights is zero at the end."""

    p: float = 0.8
    target: float = 0.9

    def __post_init__(self) -> None:
        if not Lp(self.p, 1.0).absorbs:
            raise ValueError(f"p must be below 2, where zeros stay zero, got {self.p!r}")
        if not check_share("target", self.target):
            raise ValueError(f"target must be above 0, got {self.target!r}")

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        optimizer = _padam(model, lr, Lp(self.p, 1.0))
        SparsityTarget(optimizer, self.target, steps)  # acts in the optimizer's step
        return Run(optimizer)


@dataclass(frozen=True)
class L1Method(Method):
    """Adam followed by the proximal step of ``lam * |w|``: a soft threshold at ``lr * lam``."""

    lam: float = 0.01

    def __post_init__(self) -> None:
        check_number("lam", self.lam)

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        return _SoftThreshold(adamw(model, lr, weight_decay=0.0), self.lam)


class _SoftThreshold(Run):
    def __init__(self, optimizer: Optimizer, lam: float) -> None:
        super().__init__(optimizer)
        self._lam = lam

    @torch.no_grad()
    def after_step(self) -> None:
        lr = self.optimizer.param_groups[0]["lr"]
        for weight in decayed_weights(self.optimizer):
            shrunk: Tensor = prox.lp(weight, 1, lr * self._lam)
            weight.copy_(shrunk)
