"""Magnitude pruning: methods that train with AdamW and remove the smallest weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pdecay import GradualMagnitudePruning, MagnitudePruning
from pdecay._core.validation import check_number, check_share
from pdecay._sparsity.metric import Rank, check_rank
from pdecay.lab.methods.base import Method, Run, adamw, decayed_weights
from pdecay.lab.tasks import Task


@dataclass(frozen=True)
class MPMethod(Method):
    """The paper's iterative magnitude pruning: zero the weights below a threshold at intervals.

    The threshold rises from zero between 10 % and 20 % of the training. Weights may regrow between
    two prunings.
    """

    threshold: float = 0.01
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold)
        check_number("weight_decay", self.weight_decay)

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        optimizer = adamw(model, lr, self.weight_decay)
        weights = decayed_weights(optimizer)
        return Run(optimizer, MagnitudePruning(optimizer, self.threshold, steps, params=weights))


@dataclass(frozen=True)
class GMPMethod(Method):
    """Gradual magnitude pruning: remove the smallest weights for good, along a cubic ramp."""

    target: float = 0.9
    weight_decay: float = 0.1
    rank: Rank = "magnitude"
    end: float = 0.85  # end of the ramp, as a share of the training

    def __post_init__(self) -> None:
        check_share("target", self.target)
        check_number("weight_decay", self.weight_decay)
        check_rank(self.rank)

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        optimizer = adamw(model, lr, self.weight_decay)
        weights = decayed_weights(optimizer)
        return Run(
            optimizer,
            GradualMagnitudePruning(
                optimizer, self.target, steps, params=weights, rank=self.rank, end=self.end
            ),
        )
