"""What a method is: a frozen dataclass of options that can start on a model, and the run it starts.

All methods decay, prune and count the same weights, those of :func:`pdecay.param_groups`, so that
their sparsities can be compared.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import pdecay
from pdecay._core.validation import check_number
from pdecay.lab.tasks import Task


class Run:
    """A method at work on one model.

    The loop steps `optimizer` under the task's schedule and calls :meth:`after_step`. What a
    method must remember beyond the model and the optimizer goes through :meth:`state_dict`, in
    plain numbers, containers and tensors.

    Args:
        optimizer: trains the model's parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def after_step(self) -> None:
        """Called after each step of the optimizer, before the learning rate moves on."""

    def finish(self) -> None:
        """Called once after the last step, before the model is judged and saved."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint; the model and the optimizer have theirs already."""


class Method:
    """One way to train for sparsity: the options are the fields of a frozen dataclass.

    Options are numbers, strings or booleans; ``__post_init__`` is the place to refuse bad ones.
    """

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        """Begin to train a new model.

        Args:
            model: as the task makes it; torch's generator is seeded for the method's own use.
            task: what is trained; ``task.batch(seed, step)`` gives examples.
            lr: the highest learning rate.
            steps: how many steps the training has.
        """
        raise NotImplementedError


def adamw(model: nn.Module, lr: float, weight_decay: float) -> AdamW:
    """AdamW as the paper has it; what p-norm weight decay spares, L2 spares too."""
    decayed, spared = pdecay.param_groups(model)
    groups = [decayed, {**spared, "weight_decay": 0.0}]
    return AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, fused=True)


def decayed_weights(optimizer: Optimizer) -> list[Tensor]:
    """The weights of an optimizer that was given the groups of :func:`pdecay.param_groups`."""
    weights: list[Tensor] = optimizer.param_groups[0]["params"]
    return weights


def check_share(name: str, value: object) -> float:
    """The value, if it is a share of the weights from 0 to below 1."""
    share = check_number(name, value)
    if share >= 1:
        raise ValueError(f"{name} must be below 1, or nothing is left, got {value!r}")
    return share
