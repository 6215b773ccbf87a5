"""The training loop of all experiments: `pdecay train`, sweeps, the demo and the benchmarks.

    task = get_task("digits", "quick")
    trainer = Trainer(task, PAdamMethod(lam=0.03), seed=0, lr=task.lr, steps=task.steps)
    for loss in trainer.train():
        ...  # after each step: show the loss, write a checkpoint, or break
    result = trainer.finish()  # accuracies, sparsity and the zeros of each layer

A step depends on the arguments of the trainer, the step number and :meth:`Trainer.state_dict` only:
batches and dropout are functions of the seed and the step number. A trainer that loads the state of
another one therefore continues bit by bit like the first.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import pdecay
from pdecay.lab.data.streams import derive
from pdecay.lab.methods import Method
from pdecay.lab.tasks import Task
from pdecay.lab.train.records import tradeoff

_FLOOR = 0.01  # the last learning rate relative to the peak
_CURVE_BATCHES = 5  # validation batches for a point of the curve; all would cost too much
_METHOD = 102  # identifies the method's random numbers, see `derive`

Point = dict[str, Any]


class Trainer:
    """A model that a method trains on a task.

    Args:
        task: the data, the model and the recipe.
        method: the training method.
        seed: determines the initial weights, the batches and the dropout.
        lr: the peak learning rate.
        steps: the number of steps; the warm-up is scaled in proportion.
        points: the number of evaluations during training for the curve; 0 for none.
    """

    def __init__(
        self, task: Task, method: Method, *, seed: int, lr: float, steps: int, points: int = 20
    ) -> None:
        self.task, self.seed, self.steps = task, seed, steps
        _ = task.stream  # raise the error for missing data first
        self.model = task.model(seed)
        torch.manual_seed(derive(seed, _METHOD))
        self.method = method.start(self.model, task, lr, steps)
        _check_loadable(type(method).__name__, self.method.state_dict())
        self.optimizer = self.method.optimizer
        self.scheduler = schedule(self.optimizer, steps, round(task.warmup * steps / task.steps))
        self.step = 0
        self.diverged = False
        self.curve: list[Point] = []
        self._evaluate_at = {round(k * steps / points) for k in range(points)}
        self._losses: list[float] = []  # since the last point of the curve

    @property
    def done(self) -> bool:
        return self.diverged or self.step == self.steps

    def train(self, on_point: Callable[[Point], None] = lambda point: None) -> Iterator[float]:
        """Train up to the last step and yield the training loss of each step.

        The iteration also ends if a loss is not finite; `diverged` is true then. It may be
        abandoned after any step, and continued by another call.

        Args:
            on_point: called with each new point of the curve.
        """
        task, model, seed = self.task, self.model, self.seed
        while not self.done:
            # Evaluate before the step, unless the run was resumed right after the evaluation.
            if self.step in self._evaluate_at and not self._has_point:
                on_point(self.add_point())
                if self.diverged:
                    return

            # Forward pass.
            task.reseed(seed, self.step)
            loss = task.loss(model, task.batch(seed, self.step))
            value = loss.item()
            if not math.isfinite(value):
                self.diverged = True
                return

            # Backward pass and update. Pruning and decay happen in the optimizer's hooks or here.
            loss.backward()
            task.clip_(model)
            self.optimizer.step()
            self.method.after_step()
            self.scheduler.step()
            model.zero_grad()

            self.step += 1
            self._losses.append(value)
            yield value

    def add_point(self) -> Point:
        """Evaluate on a part of the validation split and add a point to the curve."""
        point = {
            "step": self.step,
            "lr": self.optimizer.param_groups[0]["lr"],
            "train_loss": sum(self._losses) / len(self._losses) if self._losses else None,
            **self._evaluate(_CURVE_BATCHES),
            "sparsity": pdecay.sparsity(self.model).total,
        }
        self._losses.clear()
        self.curve.append(point)
        return point

    def finish(self) -> dict[str, Any]:
        """Finish the method, complete the curve and return the result on the whole splits."""
        if not self.diverged:
            self.method.finish()
            pdecay.prune_(self.model)  # weights that count as zero become exact zeros
        if not self._has_point:
            self.add_point()
        validation = self._evaluate()
        accuracy = validation["accuracy"]
        test = None if self.diverged else self.task.evaluate(self.model, "test")["accuracy"]
        report = pdecay.sparsity(self.model)
        layers = [layer for layer in report.layers if layer.decayed]
        return {
            **validation,
            "test_accuracy": test,
            "sparsity": report.total,
            "tradeoff": None if accuracy is None else tradeoff(accuracy, report.total),
            "total_sparsity": report.total_all,
            "weights": sum(layer.size for layer in layers),
            "layers": [
                {
                    "name": layer.name,
                    "shape": list(layer.shape),
                    "size": layer.size,
                    "zeros": layer.zeros,
                }
                for layer in layers
            ],
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "method": self.method.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "curve": self.curve,
            "losses": self._losses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        _check_moments(self.optimizer)
        self.method.load_state_dict(state["method"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.curve = state["curve"]
        self._losses = state["losses"]

    @property
    def _has_point(self) -> bool:
        return bool(self.curve) and self.curve[-1]["step"] == self.step

    def _evaluate(self, batches: int | None = None) -> dict[str, float | None]:
        if not self.diverged:
            result = self.task.evaluate(self.model, batches=batches)
            if math.isfinite(result["loss"]):
                return dict(result)
            self.diverged = True  # the last step made the loss infinite or NaN
        return {"accuracy": None, "loss": None}


def schedule(optimizer: Optimizer, steps: int, warmup: int) -> LambdaLR:
    """Return the paper's learning-rate schedule: linear warm-up, then a cosine.

    The peak is the optimizer's own `lr`; the last step has a hundredth of it.
    """
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup must be >= 0 and < steps, got {warmup} of {steps}")
    return LambdaLR(optimizer, functools.partial(lr_factor, steps=steps, warmup=warmup))


def lr_factor(step: int, steps: int, warmup: int) -> float:
    """Return the learning rate of a step, counted from 0, relative to the peak.

    Step ``warmup - 1`` has the peak and step ``steps - 1`` the lowest rate. The first rate is above
    zero, so that every step changes the weights.

    Example:
        >>> [round(lr_factor(step, 10, 2), 2) for step in (0, 1, 5, 9)]
        [0.5, 1.0, 0.51, 0.01]
    """
    done = step + 1
    if done <= warmup:
        return done / warmup
    progress = min(1.0, (done - warmup) / (steps - warmup))
    return _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def _check_moments(optimizer: Optimizer) -> None:
    """Raise ValueError unless the loaded state of each parameter has its shape, except the step.

    The fused optimizers of torch trust it, and would use memory outside the tensors.
    """
    for param, state in optimizer.state.items():
        for name, one in state.items():
            if isinstance(one, Tensor) and (
                one.shape != (() if name == "step" else param.shape)
                or not (one.is_contiguous() or one.stride() == param.stride())
            ):
                raise ValueError(
                    f"{name!r} of a parameter of shape {list(param.shape)} has the shape "
                    f"{list(one.shape)} in the checkpoint: it was altered; delete it to start again"
                )


def _check_loadable(name: str, state: dict[str, Any]) -> None:
    """Raise a TypeError now if a checkpoint could not restore a method's state later."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError):
        raise TypeError(
            f"the state_dict() of {name}'s run must hold numbers, strings and tensors, and lists "
            f"and dicts of them, so that a checkpoint can be loaded; got {state!r}"
        ) from None
