"""The tasks of the experiments: data, a model and a training recipe under one name and scale.

The scale ``paper`` has the paper's settings and needs a GPU; ``cpu`` takes minutes on two cores;
``quick`` takes seconds on one core, for grids of many runs.

Every task has three splits. Training batches come from the first. Settings are chosen by the
accuracy on the validation split. The test split is for the final number only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pdecay.deployment.model.state import evaluating
from pdecay.lab.data import cifar10, fashion, shakespeare
from pdecay.lab.data.sources import Images
from pdecay.lab.data.streams import Batch, ImageStream, Stream, TextStream, derive
from pdecay.lab.models import CNN, GPT, MLP, ResNet, Whitening

_MODEL, _STEP = 100, 101  # identify the random numbers of the model and of a step, see `derive`


@dataclass(frozen=True)
class Task:
    """Data, a model and a recipe: everything about an experiment except the method.

    A task object reads its data at first use and keeps them.

    Args:
        name, scale: the names of the task.
        build: builds the model.
        load: loads the data onto a device.
        steps, warmup: the number of optimizer steps and of warm-up steps among them.
        lr: a good peak learning rate for AdamW.
        clip: the largest norm of the gradient; None for no clipping.
        label_smoothing: the share of the target probability that is spread over all classes.
        device: the device of the model and the batches.
    """

    name: str
    scale: str
    build: Callable[[], nn.Module] = field(repr=False)
    load: Callable[[str], Stream] = field(repr=False)
    steps: int
    warmup: int
    lr: float
    clip: float | None = None
    label_smoothing: float = 0.0
    device: str = "cpu"

    @functools.cached_property
    def stream(self) -> Stream:
        """The data, read at first use."""
        return self.load(self.device)

    def model(self, seed: int) -> nn.Module:
        """Build a model with weights that depend on the seed only.

        A whitening layer is fitted to training images, the same for all seeds.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, _MODEL))
            model = self.build().to(self.device)
        for module in model.modules():
            if isinstance(module, Whitening):
                module.fit(torch.cat([self.batch(0, step)[0] for step in range(16)]))
        return model

    def batch(self, seed: int, step: int) -> Batch:
        """Return the inputs and targets of a training step, the same at every call."""
        return self.stream.batch(seed, step)

    def validation(self) -> Iterator[Batch]:
        """Iterate over the validation split, which settings are chosen on."""
        return self.stream.validation()

    def test(self) -> Iterator[Batch]:
        """Iterate over the test split, which only final models are measured on."""
        return self.stream.test()

    def reseed(self, seed: int, step: int) -> None:
        """Seed torch's generators for a step, so that its dropout does not depend on the past."""
        torch.manual_seed(derive(seed, _STEP, step))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a training batch."""
        inputs, targets = batch
        return cross_entropy(
            model(inputs).flatten(0, -2), targets.flatten(), label_smoothing=self.label_smoothing
        )

    def clip_(self, model: nn.Module) -> None:
        """Clip the gradients if the task has a `clip`."""
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)

    @torch.no_grad()
    def evaluate(
        self,
        model: nn.Module,
        split: Literal["validation", "test"] = "validation",
        *,
        batches: int | None = None,
    ) -> dict[str, float]:
        """Return the accuracy in percent and the mean cross entropy on a split.

        The model is in evaluation mode meanwhile; every module's mode is restored.

        Args:
            model: the model.
            split: the split to evaluate on.
            batches: evaluate on the first batches of the split only; None for all.
        """
        correct = total = 0
        loss = 0.0
        with evaluating(model):
            data = self.validation() if split == "validation" else self.test()
            for inputs, targets in islice(data, batches):
                logits, labels = model(inputs).flatten(0, -2), targets.flatten()
                correct += int((logits.argmax(-1) == labels).sum())
                loss += float(cross_entropy(logits, labels, reduction="sum"))
                total += len(labels)
        return {"accuracy": 100 * correct / total, "loss": loss / total}


def get_task(name: str, scale: str = "cpu", *, device: str = "cpu") -> Task:
    """Return the task with a name and scale, on a device."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; choose from {', '.join(TASKS)}")
    scales = [known for known in SCALES if (name, known) in _RECIPES]
    if scale not in scales:
        raise ValueError(f"{name} has no scale {scale!r}; choose from {', '.join(scales)}")
    return replace(_RECIPES[name, scale], device=device)


@functools.lru_cache(maxsize=1)
def cached_task(name: str, scale: str, device: str) -> Task:
    """Return a task whose data the next call shares: consecutive runs read them once."""
    return get_task(name, scale, device=device)


def _load_digits() -> Images:
    from pdecay.lab.data import digits  # imports scikit-learn

    return digits.load()


# The loaders are module-level functions in partials, because a task must be picklable.
def _images(load: Callable[[], Images], device: str, **options: Any) -> Stream:
    return ImageStream(load(), device=device, **options)


def _text(size: int, block: int, device: str) -> Stream:
    return TextStream(shakespeare.load(), size, block, device)


TASKS = ("digits", "fashion", "cifar10", "shakespeare")
SCALES = ("quick", "cpu", "paper")

_EPOCH = -(-50_000 // 64)  # the paper's epoch in steps: all of CIFAR-10 in batches of 64

_partial = functools.partial
_mlp = _partial(MLP, 64, (300, 100), 10)
_small_cnn = _partial(CNN, 1, 28, (16, 32), 64, 10)
_large_cnn = _partial(CNN, 1, 28, (32, 64), 128, 10)
_small_resnet = _partial(ResNet, 16, (1, 1, 1), stride=2)
_large_resnet = _partial(ResNet, 32, (1, 1, 1), stride=2, whitened=True)
_small_gpt = _partial(GPT, shakespeare.SYMBOLS, block=32, layers=2, heads=4, width=64)
_large_gpt = _partial(GPT, shakespeare.SYMBOLS, block=64, layers=4, heads=4, width=128)
_nano_gpt = _partial(GPT, shakespeare.SYMBOLS, block=256, layers=6, heads=6, width=384, dropout=0.2)
_digits, _fashion = (_partial(_images, load) for load in (_load_digits, fashion.load))
_fashion_flipped = _partial(_images, fashion.load, flip=True)
_cifar10 = _partial(_images, cifar10.load, flip=True)
_cifar10_cpu = _partial(_cifar10, size=128, pad=2)
_cifar10_paper = _partial(_cifar10, pad=4)


_RECIPES = {
    (recipe.name, recipe.scale): recipe
    for recipe in (
        # steps, warm-up, learning rate, clipping
        Task("digits", "quick", _mlp, _digits, 600, 30, 3e-3),
        Task("digits", "cpu", _mlp, _digits, 3000, 150, 3e-3),
        Task("fashion", "quick", _small_cnn, _fashion, 1800, 90, 3e-3),
        Task("fashion", "cpu", _large_cnn, _fashion_flipped, 7504, 300, 3e-3),
        Task("cifar10", "quick", _small_resnet, _cifar10, 600, 40, 5e-3),
        Task("cifar10", "cpu", _large_resnet, _cifar10_cpu, 2816, 280, 1e-2, label_smoothing=0.1),
        Task("cifar10", "paper", ResNet, _cifar10_paper, 100 * _EPOCH, 3 * _EPOCH, 1e-3),
        Task("shakespeare", "quick", _small_gpt, _partial(_text, 16, 32), 1600, 100, 1e-2, 1.0),
        Task("shakespeare", "cpu", _large_gpt, _partial(_text, 16, 64), 1500, 100, 1e-2, 1.0),
        Task("shakespeare", "paper", _nano_gpt, _partial(_text, 64, 256), 5000, 100, 1e-3, 1.0),
    )
}
