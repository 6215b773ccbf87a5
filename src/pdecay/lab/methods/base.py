"""The interface of a training method: a `Method` holds options and starts a `Run` on a model.

All methods decay, prune and count the weights that :func:`pdecay.param_groups` selects, so that
their sparsities are comparable.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import pdecay
from pdecay.lab.tasks import Task


class Run:
    """A method applied to one model.

    The training loop steps `optimizer` and the task's schedule and calls :meth:`after_step`. State
    beyond that of the model and the optimizer belongs into :meth:`state_dict`, as numbers, strings,
    tensors, and lists and dicts of them.

    Args:
        optimizer: the optimizer of the model's parameters.
        part: an object whose state is the state of the run, such as a pruning or a schedule.
    """

    def __init__(self, optimizer: Optimizer, part: Any = None) -> None:
        self.optimizer, self.part = optimizer, part

    def after_step(self) -> None:
        """Act after each optimizer step, before the learning rate changes."""

    def finish(self) -> None:
        """Act once after the last step, before the model is evaluated and saved."""

    def state_dict(self) -> dict[str, Any]:
        return {} if self.part is None else dict(self.part.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state after the model and the optimizer were restored."""
        if self.part is not None:
            self.part.load_state_dict(state_dict)


class Method:
    """A training method: a frozen dataclass whose fields are the options.

    Options are numbers, strings or booleans. ``__post_init__`` should raise for invalid values.
    """

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        """Prepare the training of a new model.

        Args:
            model: the model. torch's generator is seeded, so the method may use it.
            task: the task; ``task.batch(seed, step)`` returns examples.
            lr: the peak learning rate.
            steps: the number of training steps.
        """
        raise NotImplementedError


def adamw(model: nn.Module, lr: float, weight_decay: float) -> AdamW:
    """Return the paper's AdamW; L2 decays the same weights as p-norm weight decay does."""
    decayed, others = pdecay.param_groups(model)
    groups = [decayed, {**others, "weight_decay": 0.0}]
    return AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, fused=True)


def decayed_weights(optimizer: Optimizer) -> list[Tensor]:
    """Return the decayed weights of an optimizer made with :func:`pdecay.param_groups`."""
    weights: list[Tensor] = optimizer.param_groups[0]["params"]
    return weights
