"""The live part of a training run: a model under a method, at some step, with its curve so far."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import torch

import pdecay
from pdecay.lab.data.streams import derive
from pdecay.lab.methods import Method
from pdecay.lab.tasks import Task
from pdecay.lab.train.records import tradeoff
from pdecay.lab.train.schedule import schedule

POINTS = 20  # how often the model is evaluated on the way, beside the start
_PART = 5  # batches of the validation set, for the curve: more would cost as much as the training
_METHOD = 102  # a place of randomness beside those of the tasks and streams


class Session:
    """A model in training.

    Everything that the next step depends on, beside the arguments, is in :meth:`state_dict`.

    Args:
        job: the task.
        method: how it is trained.
        seed: decides the first weights, the batches and the dropout.
        lr: the highest learning rate.
        steps: how many steps; the warm-up keeps its share of them.
    """

    def __init__(self, job: Task, method: Method, *, seed: int, lr: float, steps: int) -> None:
        self.job, self.seed, self.steps = job, seed, steps
        _ = job.stream  # data that are missing are an error before anything else is done
        self.model = job.model(seed)
        torch.manual_seed(derive(seed, _METHOD))
        self.run = method.start(self.model, job, lr, steps)
        _check_plain(type(method).__name__, self.run.state_dict())
        warmup = round(job.warmup * steps / job.steps)
        self.scheduler = schedule(self.run.optimizer, steps, warmup)
        self.step = 0
        self.diverged = False
        self.curve: list[dict[str, Any]] = []
        self._marks = {round(k * steps / POINTS) for k in range(POINTS)}
        self._loss_sum, self._loss_count = 0.0, 0

    @property
    def done(self) -> bool:
        return self.diverged or self.step == self.steps

    @property
    def at_a_mark(self) -> bool:
        """Whether the curve lacks a point that is due."""
        return self.step in self._marks and (not self.curve or self.curve[-1]["step"] < self.step)

    def advance(self) -> float:
        """Take one step; the loss before it. A loss that is not finite ends the run instead."""
        job, model = self.job, self.model
        job.reseed(self.seed, self.step)
        loss = job.loss(model, job.batch(self.seed, self.step))
        value = loss.item()
        if not math.isfinite(value):
            self.diverged = True
            return value
        loss.backward()
        job.clip_(model)
        self.run.optimizer.step()
        self.run.after_step()
        self.scheduler.step()
        model.zero_grad()
        self.step += 1
        self._loss_sum += value
        self._loss_count += 1
        return value

    def add_point(self) -> dict[str, Any]:
        """Evaluate the model on part of the validation set and put a point on the curve."""
        judged = self._judge(_PART)
        point = {
            "step": self.step,
            "lr": self.run.optimizer.param_groups[0]["lr"],
            "train_loss": self._loss_sum / self._loss_count if self._loss_count else None,
            **judged,
            "sparsity": pdecay.sparsity(self.model).total,
        }
        self._loss_sum, self._loss_count = 0.0, 0
        self.curve.append(point)
        return point

    def finish(self) -> dict[str, Any]:
        """End the method, put the last point on the curve; the result on the whole set."""
        if not self.diverged:
            self.run.finish()
            pdecay.prune_(self.model)  # what counts as zero is zero, in the saved weights too
        if not self.curve or self.curve[-1]["step"] < self.step:  # else it diverged at a mark
            self.add_point()
        judged = self._judge(None)
        report = pdecay.sparsity(self.model)
        accuracy = judged["accuracy"]
        layers = [layer for layer in report.layers if layer.decayed]
        return {
            **judged,
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
            "optimizer": self.run.optimizer.state_dict(),
            "method": self.run.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "curve": self.curve,
            "losses": [self._loss_sum, self._loss_count],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.run.optimizer.load_state_dict(state["optimizer"])
        self.run.load_state_dict(state["method"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.curve = state["curve"]
        self._loss_sum, self._loss_count = state["losses"]

    def _judge(self, batches: int | None) -> dict[str, float | None]:
        if not self.diverged:
            judged = self.job.evaluate(self.model, batches)
            if math.isfinite(judged["loss"]):
                return dict(judged)
            self.diverged = True  # the last step may have been the one too much
        return {"accuracy": None, "loss": None}


def _check_plain(name: str, state: dict[str, Any]) -> None:
    """A state that a checkpoint could not give back is an error now, not after a crash."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError):  # what pickle says of odd objects
        raise TypeError(
            f"the state_dict() of {name}'s run must hold numbers, strings and tensors, and lists "
            f"and dicts of them, or no checkpoint gives it back; got {state!r}"
        ) from None
