"""The tasks of the experiments: data, a model and a recipe under one name, at three scales.

``paper`` holds the paper's settings and wants a GPU; ``cpu`` takes minutes on two cores; ``quick``
takes seconds on one, for grids of many runs.

Example:
    A loop that can be killed at any step and go on, as long as it saves the model, the optimizer
    and the number of the step::

        job = task("shakespeare", "cpu")
        model = job.model(seed)
        optimizer = torch.optim.AdamW(pdecay.param_groups(model), lr=job.lr)
        scheduler = schedule(optimizer, job.steps, job.warmup)
        for step in range(job.steps):
            job.reseed(seed, step)  # the dropout of this step
            job.loss(model, job.batch(seed, step)).backward()
            job.clip_(model)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        job.evaluate(model)  # {"accuracy": 48.5, "loss": 1.7}
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pdecay.deployment.model.state import evaluating
from pdecay.lab.data import cifar10, fashion, shakespeare
from pdecay.lab.data.sources import DataError, Images
from pdecay.lab.data.streams import Batch, ImageStream, Stream, TextStream, derive
from pdecay.lab.models import CNN, GPT, MLP, ResNet

_MODEL, _STEP = 100, 101  # places of randomness beside those of the streams


@dataclass(frozen=True)
class Task:
    """What is learned, by which model, and how long: all of an experiment but the method.

    The data are read when they are first needed, once for each task object: keep the object.

    Args:
        name, scale: what the task is called.
        build: makes the model.
        open: opens the data on a device.
        steps, warmup: how many optimizer steps, and how many of them to warm up.
        lr: a good highest learning rate for AdamW.
        clip: the gradient's largest norm; None for no clipping.
        device: where the model and the batches live.
    """

    name: str
    scale: str
    build: Callable[[], nn.Module] = field(repr=False)
    open: Callable[[str], Stream] = field(repr=False)
    steps: int
    warmup: int
    lr: float
    clip: float | None = None
    device: str = "cpu"

    @functools.cached_property
    def stream(self) -> Stream:
        """The data, read at first use."""
        return self.open(self.device)

    def model(self, seed: int) -> nn.Module:
        """A new model; the seed decides its weights, and the global generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, _MODEL))
            return self.build().to(self.device)

    def batch(self, seed: int, step: int) -> Batch:
        """The inputs and targets of a step: the same at every call."""
        return self.stream.batch(seed, step)

    def batches(self, seed: int, start: int = 0) -> Iterator[Batch]:
        """The batches from a step on, without end."""
        return (self.batch(seed, step) for step in count(start))

    def reseed(self, seed: int, step: int) -> None:
        """Set torch's generators for a step, so that its dropout does not depend on the past."""
        torch.manual_seed(derive(seed, _STEP, step))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean cross entropy of a batch."""
        inputs, targets = batch
        return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    def clip_(self, model: nn.Module) -> None:
        """Clip the gradients, if the task has it so."""
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: int | None = None) -> dict[str, float]:
        """The accuracy in percent and the mean cross entropy on the validation set.

        Every module is in evaluation mode meanwhile, and in the mode it was in afterwards.

        Args:
            model: the model.
            batches: how many of the validation set's batches to use, from the first on; None
                for all.
        """
        right = total = 0
        loss = 0.0
        with evaluating(model):
            for inputs, targets in islice(self.stream.validation(), batches):
                logits = model(inputs).flatten(0, -2)
                wanted = targets.flatten()
                right += int((logits.argmax(-1) == wanted).sum())
                loss += float(cross_entropy(logits, wanted, reduction="sum"))
                total += len(wanted)
        return {"accuracy": 100 * right / total, "loss": loss / total}


def task(name: str, scale: str = "cpu", *, device: str = "cpu") -> Task:
    """The task of a name at a scale, on a device."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; there are {', '.join(TASKS)}")
    scales = [known for known in SCALES if (name, known) in _RECIPES]
    if scale not in scales:
        raise ValueError(f"{name} has no scale {scale!r}; it has {', '.join(scales)}")
    return replace(_RECIPES[name, scale], device=device)


def _digits() -> Images:
    try:
        from pdecay.lab.data import digits
    except ImportError as error:
        raise DataError(
            f"the digits come with scikit-learn ({error}): pip install 'pdecay[lab]'"
        ) from error
    parts = digits.load()
    return Images(
        parts.train_images.view(-1, 1, 8, 8),
        parts.train_labels,
        parts.validation_images.view(-1, 1, 8, 8),
        parts.validation_labels,
        classes=10,
    )


def _images(load: Callable[[], Images], **options: Any) -> Callable[[str], Stream]:
    return functools.partial(_open_images, load, options)


def _open_images(load: Callable[[], Images], options: dict[str, Any], device: str) -> Stream:
    return ImageStream(load(), device=device, **options)


def _text(size: int, block: int) -> Callable[[str], Stream]:
    return functools.partial(_open_text, size, block)


def _open_text(size: int, block: int, device: str) -> Stream:
    return TextStream(shakespeare.load(), size, block, device)


def _gpt(block: int, layers: int, heads: int, width: int, dropout: float) -> Callable[[], GPT]:
    return functools.partial(GPT, shakespeare.SYMBOLS, block, layers, heads, width, dropout)


TASKS = ("digits", "fashion", "cifar10", "shakespeare")
SCALES = ("quick", "cpu", "paper")

_EPOCH = -(-50_000 // 64)  # CIFAR-10 in batches of 64

_RECIPES = {
    (one.name, one.scale): one
    for one in (
        Task(
            "digits",
            "quick",
            functools.partial(MLP, 64, (300, 100), 10),
            _images(_digits, size=64),
            steps=600,
            warmup=30,
            lr=3e-3,
        ),
        Task(
            "fashion",
            "quick",
            functools.partial(CNN, 1, 28, (16, 32), 64, 10),
            _images(fashion.load, size=64),
            steps=1800,
            warmup=90,
            lr=3e-3,
        ),
        Task(
            "cifar10",
            "quick",
            functools.partial(ResNet, 16, (1, 1, 1), stride=2),
            _images(cifar10.load, size=64, test=5000, flip=True),
            steps=600,
            warmup=40,
            lr=5e-3,
        ),
        Task(
            "shakespeare",
            "quick",
            _gpt(32, 2, 4, 64, 0.0),
            _text(16, 32),
            steps=1600,
            warmup=100,
            lr=1e-2,
            clip=1.0,
        ),
        Task(
            "digits",
            "cpu",
            functools.partial(MLP, 64, (300, 100), 10),
            _images(_digits, size=64),
            steps=3000,
            warmup=150,
            lr=3e-3,
        ),
        Task(
            "fashion",
            "cpu",
            functools.partial(CNN, 1, 28, (32, 64), 128, 10),
            _images(fashion.load, size=64, flip=True),
            steps=8 * -(-60_000 // 64),
            warmup=300,
            lr=3e-3,
        ),
        Task(
            "cifar10",
            "cpu",
            functools.partial(ResNet, 32, (1, 1, 1), stride=2),
            _images(cifar10.load, size=64, pad=4, flip=True),
            steps=6 * _EPOCH,
            warmup=200,
            lr=3e-3,
        ),
        Task(
            "shakespeare",
            "cpu",
            _gpt(64, 4, 4, 128, 0.0),
            _text(16, 64),
            steps=1500,
            warmup=100,
            lr=1e-2,
            clip=1.0,
        ),
        Task(
            "cifar10",
            "paper",
            ResNet,
            _images(cifar10.load, size=64, pad=4, flip=True),
            steps=100 * _EPOCH,
            warmup=3 * _EPOCH,
            lr=1e-3,
        ),
        Task(
            "shakespeare",
            "paper",
            _gpt(256, 6, 6, 384, 0.2),
            _text(64, 256),
            steps=5000,
            warmup=100,
            lr=1e-3,
            clip=1.0,
        ),
    )
}
