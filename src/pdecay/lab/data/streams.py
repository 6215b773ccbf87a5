"""Endless streams of training batches that need no memory of how far they are.

The batch of a step is a function of the seed and of the step's number: a run that was killed goes
on with the same batches, and two methods that are compared with one seed see the same data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pdecay.lab.data.shakespeare import Text
from pdecay.lab.data.sources import Images

Batch = tuple[Tensor, Tensor]


class Stream(Protocol):
    """What a task draws on: a training batch for each step, and a fixed validation set."""

    def batch(self, seed: int, step: int) -> Batch:
        """The inputs and targets of a step, the same at every call."""

    def validation(self) -> Iterator[Batch]:
        """The validation set, in batches, the same at every call."""


def derive(seed: int, *place: int) -> int:
    """A seed for one place (a stream, an epoch, a step) of a run; unlike places, unlike seeds."""
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    state = np.random.SeedSequence([seed, *place]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))  # torch takes 63 bits


def generator(seed: int, *place: int) -> torch.Generator:
    """A generator on the CPU for one place, so that every device sees the same batches."""
    return torch.Generator().manual_seed(derive(seed, *place))


_ORDER, _AUGMENT, _EXCERPT = range(3)  # what the randomness is for: the first number of a place


@dataclass
class ImageStream:
    """Images in a new order each epoch, standardised, and cropped and flipped at will.

    Args:
        images: the data.
        size: of a batch; the last one of an epoch has what is left.
        train, test: how many images of each part to use; None for all.
        pad: a crop of the image padded by this many pixels on each side; 0 for none.
        flip: mirror every second image.
        device: where the data and batches live.
    """

    images: Images
    size: int
    train: int | None = None
    test: int | None = None
    pad: int = 0
    flip: bool = False
    device: torch.device | str = "cpu"
    _epoch: tuple[tuple[int, int], Tensor] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        images = self.images
        self._x = images.train_x[: self.train].to(self.device)
        self._y = images.train_y[: self.train].to(self.device)
        self._test_x = images.test_x[: self.test].to(self.device)
        self._test_y = images.test_y[: self.test].to(self.device)
        # Channel by channel, to have one channel at a time in floating point.
        channels = [_moments(part.float()) for part in images.train_x.unbind(1)]
        mean, deviation = (torch.stack(values) for values in zip(*channels, strict=True))
        self._mean = mean.view(1, -1, 1, 1).to(self.device)
        self._scale = (1 / deviation).view(1, -1, 1, 1).to(self.device)

    @property
    def steps_per_epoch(self) -> int:
        """How many batches show every training image once."""
        return -(-len(self._x) // self.size)

    def batch(self, seed: int, step: int) -> Batch:
        epoch, place = divmod(step, self.steps_per_epoch)
        rows = self._order(seed, epoch)[place * self.size : (place + 1) * self.size]
        x = self._x[rows]
        if self.pad or self.flip:
            x = self._augment(x, generator(seed, _AUGMENT, step))
        return self._standardise(x), self._y[rows]

    def validation(self) -> Iterator[Batch]:
        for start in range(0, len(self._test_x), 500):
            x = self._test_x[start : start + 500]
            yield self._standardise(x), self._test_y[start : start + 500]

    def _order(self, seed: int, epoch: int) -> Tensor:
        if self._epoch is None or self._epoch[0] != (seed, epoch):
            order = torch.randperm(len(self._x), generator=generator(seed, _ORDER, epoch))
            self._epoch = (seed, epoch), order.to(self.device)
        return self._epoch[1]

    def _augment(self, x: Tensor, random: torch.Generator) -> Tensor:
        count, _, height, width = x.shape
        top, left = torch.randint(2 * self.pad + 1, (2, count, 1), generator=random)
        columns = torch.arange(width).expand(count, width)
        if self.flip:
            mirrored = torch.rand(count, 1, generator=random) < 0.5
            columns = torch.where(mirrored, width - 1 - columns, columns)
        rows = (top + torch.arange(height)).to(x.device)
        columns = (left + columns).to(x.device)
        padded = torch.nn.functional.pad(x, [self.pad] * 4)
        images = torch.arange(count, device=x.device)
        # One gather for all crops; the indexed dimensions come first, the channels last.
        return padded[images[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(
            0, 3, 1, 2
        )

    def _standardise(self, x: Tensor) -> Tensor:
        # With the channels last, convolutions on a CPU take two thirds of the time.
        x = x.to(torch.float32, memory_format=torch.channels_last)
        return (x - self._mean) * self._scale


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation; in two passes, a third of the time of `torch.std_mean`."""
    mean = values.mean()
    return mean, (values - mean).square_().mean().sqrt()


@dataclass
class TextStream:
    """Excerpts of a text from random places; the targets are the next characters.

    The validation part is cut into excerpts side by side, so that it is used once and whole.

    Args:
        text: the data.
        size: how many excerpts a batch has.
        block: how long an excerpt is.
        device: where the data and batches live.
    """

    text: Text
    size: int
    block: int
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        self._train = self.text.train.to(self.device)
        self._test = self.text.test.to(self.device)
        if min(len(self._train), len(self._test)) <= self.block:
            raise ValueError(f"the text is too short for excerpts of {self.block}")

    def batch(self, seed: int, step: int) -> Batch:
        starts = torch.randint(
            len(self._train) - self.block,
            (self.size, 1),
            generator=generator(seed, _EXCERPT, step),
        )
        excerpts = self._train[(starts + torch.arange(self.block + 1)).to(self.device)]
        return excerpts[:, :-1], excerpts[:, 1:]

    def validation(self) -> Iterator[Batch]:
        count = (len(self._test) - 1) // self.block
        inputs = self._test[: count * self.block].view(count, self.block)
        targets = self._test[1 : count * self.block + 1].view(count, self.block)
        yield from zip(inputs.split(64), targets.split(64), strict=True)
