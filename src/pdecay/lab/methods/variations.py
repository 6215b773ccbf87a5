"""The paper's variations of p-norm weight decay (section 6), each on PAdam with a fixed lam.

s may follow the weights every n steps (`EveryMethod`) or slowly (`SlowMethod`). p may fall from 2
during the training, once or in restarts (`PScheduleMethod`). The decay may be the exact proximal
step (`ProxMethod`), may stop after a share of the training (`FreezeMethod`), or may be combined
with magnitude pruning (`DecayedMPMethod`, `DecayedGMPMethod`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

import pdecay
from pdecay import Every, GradualMagnitudePruning, Lp, MagnitudePruning, PSchedule, Slow
from pdecay._core.validation import check_count, check_number, check_share
from pdecay.lab.methods.base import Method, Run, adamw, decayed_weights
from pdecay.lab.methods.decay import padam
from pdecay.lab.tasks import Task


@dataclass(frozen=True)
class _Variation(Method):
    """The options that all variations share."""

    p: float = 0.8
    lam: float = 0.01
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        Lp(self.p, self.lam)
        check_number("weight_decay", self.weight_decay)


@dataclass(frozen=True)
class EveryMethod(_Variation):
    """PAdam whose s is set every n steps."""

    n: int = 10

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        decay = Lp(self.p, self.lam)
        return Run(padam(model, lr, decay, self.weight_decay, auxiliary=Every(self.n)))


@dataclass(frozen=True)
class SlowMethod(_Variation):
    """PAdam whose s follows the weights at a rate."""

    rate: float = 0.1

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        decay = Lp(self.p, self.lam)
        return Run(padam(model, lr, decay, self.weight_decay, auxiliary=Slow(self.rate)))


@dataclass(frozen=True)
class PScheduleMethod(_Variation):
    """PAdam whose p falls linearly from 2, in one cycle or in several.

    lam is fixed, so that the first phase is L2 decay of strength lam.
    """

    cycles: int = 1
    share: float = 0.5  # share of a cycle in which p falls; then it is constant

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("cycles", self.cycles)
        check_share("share", self.share)

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        optimizer = padam(model, lr, Lp(2.0, self.lam), self.weight_decay)
        cycle = max(2, steps // self.cycles)
        points = [(0, 2.0), (max(1, int(self.share * cycle)), self.p)]
        restart = cycle if self.cycles > 1 else None
        return _Scheduled(optimizer, PSchedule(optimizer, points, restart_every=restart))


class _Scheduled(Run):
    def after_step(self) -> None:
        self.part.step()


@dataclass(frozen=True)
class ProxMethod(_Variation):
    """AdamW followed by the exact proximal step of the penalty."""

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        optimizer = adamw(model, lr, self.weight_decay)
        pdecay.attach(optimizer, Lp(self.p, self.lam), step="prox")
        return Run(optimizer)


@dataclass(frozen=True)
class FreezeMethod(_Variation):
    """PAdam that keeps the zeros after a share of the training and no longer decays the rest."""

    after: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("after", self.after)

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        optimizer = padam(model, lr, Lp(self.p, self.lam), self.weight_decay)
        return _Frozen(optimizer, int(self.after * steps))


class _Frozen(Run):
    def __init__(self, optimizer: Optimizer, after: int) -> None:
        super().__init__(optimizer)
        self._after, self._step = after, 0

    def after_step(self) -> None:
        self._step += 1
        if self._step == self._after:
            pdecay.freeze_zeros(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step = state_dict["step"]


@dataclass(frozen=True)
class DecayedMPMethod(_Variation):
    """PAdam with iterative magnitude pruning."""

    threshold: float = 0.01

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        optimizer = padam(model, lr, Lp(self.p, self.lam), self.weight_decay)
        weights = decayed_weights(optimizer)
        return Run(optimizer, MagnitudePruning(optimizer, self.threshold, steps, params=weights))


@dataclass(frozen=True)
class DecayedGMPMethod(_Variation):
    """PAdam with gradual magnitude pruning."""

    target: float = 0.9

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        optimizer = padam(model, lr, Lp(self.p, self.lam), self.weight_decay)
        weights = decayed_weights(optimizer)
        return Run(
            optimizer, GradualMagnitudePruning(optimizer, self.target, steps, params=weights)
        )
