"""Methods that shrink the weights at every step: L2, p-norm weight decay, L1."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

import pdecay
from pdecay import Lp, PAdam, SparsityTarget
from pdecay._core.auxiliary import Auxiliary
from pdecay._core.group_settings import Metric, check_metric
from pdecay._core.penalty import Penalty
from pdecay._core.validation import check_number, check_share
from pdecay._sparsity.metric import Rank, check_rank
from pdecay.lab.methods.base import Method, Run, adamw
from pdecay.lab.tasks import Task


def padam(
    model: nn.Module,
    lr: float,
    decay: Penalty,
    weight_decay: float = 0.0,
    auxiliary: Auxiliary | None = None,
    metric: Metric = "magnitude",
) -> PAdam:
    """Return a PAdam; biases, norms and zero-initialised tensors do not decay."""
    decayed, others = pdecay.param_groups(model, decay)
    groups = [decayed, {**others, "weight_decay": 0.0}]
    return PAdam(groups, lr=lr, weight_decay=weight_decay, auxiliary=auxiliary, metric=metric)


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
    metric: Metric = field(default="magnitude", metadata={"unrecorded_default": True})

    def __post_init__(self) -> None:
        Lp(self.p, self.lam)
        check_metric(self.metric)

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        return Run(padam(model, lr, Lp(self.p, self.lam), metric=self.metric))


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
        return Run(padam(model, lr, Lp(self.p, self.lam), self.l2))


@dataclass(frozen=True)
class TargetMethod(Method):
    """PAdam with a SparsityTarget, so that a given share of the weights is zero at the end."""

    p: float = 0.8
    target: float = 0.9
    weight_decay: float = 0.1  # AdamW's L2
    rank: Rank = "adaptive"
    pull: float | None = None
    end: float = 0.85  # end of the ramp, as a share of the training
    update_power: float = field(default=0.0, metadata={"unrecorded_default": True})

    def __post_init__(self) -> None:
        if not Lp(self.p, 1.0).absorbs:
            raise ValueError(f"p must be below 2, where zeros stay zero, got {self.p!r}")
        if not check_share("target", self.target):
            raise ValueError(f"target must be above 0, got {self.target!r}")
        check_number("weight_decay", self.weight_decay)
        check_rank(self.rank)
        check_number("update_power", self.update_power)

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        optimizer = padam(model, lr, Lp(self.p, 1.0), self.weight_decay)
        SparsityTarget(  # acts in the optimizer's step
            optimizer,
            self.target,
            steps,
            end=self.end,
            rank=self.rank,
            pull=self.pull,
            update_power=self.update_power,
        )
        return Run(optimizer)


@dataclass(frozen=True)
class L1Method(Method):
    """Adam followed by the proximal step of ``lam * |w|``: a soft threshold at ``lr * lam``."""

    lam: float = 0.01

    def __post_init__(self) -> None:
        check_number("lam", self.lam)

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        optimizer = adamw(model, lr, weight_decay=0.0)
        pdecay.attach(optimizer, Lp(1, self.lam), step="prox")
        return Run(optimizer)
