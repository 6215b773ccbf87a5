"""One way to train the digits' network, and what it gave over several seeds."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import pdecay
from pdecay._core.penalty import Penalty
from pdecay._sparsity.counting import SparsityReport
from pdecay.lab.data import digits
from pdecay.lab.demo import loop
from pdecay.lab.train.threads import threads_of

LR = 3e-2  # AdamW is as accurate from 1e-2 to 3e-2; weights reach zero in the fewest epochs at 3e-2
BATCH = 64


@dataclass(frozen=True)
class Setting:
    """A way to train: PAdam with a decay, or AdamW where there is none.

    Args:
        decay: the p-norm penalty; None for AdamW.
        weight_decay: AdamW's own L2 decay.
    """

    decay: Penalty | None = None
    weight_decay: float = 0.0

    @property
    def optimizer_name(self) -> str:
        return "PAdam" if self.decay else "AdamW"

    @property
    def decay_name(self) -> str:
        """The decay as one would write it in Python."""
        if self.decay is None:
            return f"weight_decay={self.weight_decay:g}"
        return " + ".join(f"Lp({p:g}, {lam:g})" for p, lam in self.decay.pairs())

    @property
    def name(self) -> str:
        return f"{self.optimizer_name}, {self.decay_name}"

    @property
    def series(self) -> str:
        """What belongs on one curve: AdamW, one p, or a sum of several."""
        if self.decay is None:
            return "AdamW"
        powers = [p for p, _ in self.decay.pairs()]
        name = "elastic, p = " if len(powers) > 1 else "p = "
        return name + " and ".join(f"{p:g}" for p in powers)

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """The optimizer for a model; biases decay under neither AdamW nor PAdam."""
        if self.decay is None:
            weights, spared = pdecay.param_groups(model)
            groups = [weights, {**spared, "weight_decay": 0.0}]
            return AdamW(groups, lr=lr, weight_decay=self.weight_decay)
        return pdecay.PAdam(pdecay.param_groups(model, self.decay), lr=lr)


@dataclass(frozen=True)
class Run:
    """One trained network: its accuracy on the validation images and its zeros."""

    seed: int
    accuracy: float
    report: SparsityReport

    @property
    def sparsity(self) -> float:
        return self.report.total


@dataclass(frozen=True)
class Summary:
    """One setting over its seeds."""

    setting: Setting
    runs: tuple[Run, ...]

    @property
    def accuracy(self) -> float:
        return statistics.fmean(run.accuracy for run in self.runs)

    @property
    def spread(self) -> float:
        """The standard deviation of the accuracy over the seeds; 0 for a single one."""
        values = [run.accuracy for run in self.runs]
        return statistics.stdev(values) if len(values) > 1 else 0.0

    @property
    def sparsity(self) -> float:
        return statistics.fmean(run.sparsity for run in self.runs)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        decay = self.setting.decay
        return {
            "optimizer": self.setting.optimizer_name,
            "decay": decay.pairs() if decay else [],
            "weight_decay": self.setting.weight_decay,
            "accuracy": self.accuracy,
            "accuracy_sd": self.spread,
            "sparsity": self.sparsity,
            "runs": [
                {"seed": run.seed, "accuracy": run.accuracy, "sparsity": run.sparsity}
                for run in self.runs
            ],
        }


def train(setting: Setting, data: digits.Digits, *, seed: int, epochs: int) -> Run:
    """Train one network. The seed alone decides its first weights and the order of the images.

    The caller's random numbers and number of threads are left as they were.
    """
    # Matrices this small are slower on several threads, and one thread adds in one order.
    with torch.random.fork_rng(devices=[]), threads_of(1):
        torch.manual_seed(seed)
        model = digits.network()
        loop.train(
            model,
            setting.optimizer(model, LR),
            data.train_images,
            data.train_labels,
            epochs=epochs,
            batch=BATCH,
            seed=seed,
        )
        right = loop.accuracy(model, data.validation_images, data.validation_labels)
    return Run(seed, right, pdecay.sparsity(model))
