"""Training batches and evaluation splits.

The batch of a step is a function of the seed and the step number, so a stream has no state to
checkpoint: an interrupted run resumes with the same batches, and methods that are compared under
the same seed see the same data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pdecay.lab.data.shakespeare import Text
from pdecay.lab.data.sources import Images, Labelled

Batch = tuple[Tensor, Tensor]

_IMAGES, _EXCERPTS = 500, 64  # in an evaluation batch


class Stream(Protocol):
    """A source of training batches and two fixed evaluation splits."""

    def batch(self, seed: int, step: int) -> Batch:
        """Return the inputs and targets of a training step."""

    def validation(self) -> Iterator[Batch]:
        """Iterate over the validation split in batches."""

    def test(self) -> Iterator[Batch]:
        """Iterate over the test split in batches."""


def derive(seed: int, *place: int) -> int:
    """Derive a seed for a place in a run, such as a purpose and a step number."""
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    state = np.random.SeedSequence([seed, *place]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))  # torch takes 63 bits


def generator(seed: int, *place: int) -> torch.Generator:
    """Return a CPU generator for a place in a run, so that batches are the same on all devices."""
    return torch.Generator().manual_seed(derive(seed, *place))


_ORDER, _AUGMENT, _EXCERPT = range(3)  # purposes of randomness: the first number of a place


@dataclass
class ImageStream:
    """Standardised images in a new random order each epoch, with optional augmentation.

    Args:
        images: the data.
        size: the batch size; the last batch of an epoch may be smaller.
        pad: crop randomly from the image padded by this many pixels; 0 for no crops.
        flip: mirror images randomly.
        device: the device of the data and batches.
    """

    images: Images
    size: int = 64
    pad: int = 0
    flip: bool = False
    device: torch.device | str = "cpu"
    _epoch: tuple[tuple[int, int], Tensor] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        pixels, labels = self.images.train
        self._x, self._y = pixels.to(self.device), labels.to(self.device)
        # One channel at a time, because a float copy of all images needs four times their memory.
        channels = [_moments(part.float()) for part in pixels.unbind(1)]
        mean, deviation = (torch.stack(values) for values in zip(*channels, strict=True))
        self._mean = mean.view(1, -1, 1, 1).to(self.device)
        self._scale = (1 / deviation).view(1, -1, 1, 1).to(self.device)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self._x) // self.size)

    def batch(self, seed: int, step: int) -> Batch:
        epoch, place = divmod(step, self.steps_per_epoch)
        rows = self._order(seed, epoch)[place * self.size : (place + 1) * self.size]
        x = self._x[rows]
        if self.pad or self.flip:
            x = self._augment(x, generator(seed, _AUGMENT, step))
        return self._standardise(x), self._y[rows]

    def validation(self) -> Iterator[Batch]:
        return self._split(self.images.validation)

    def test(self) -> Iterator[Batch]:
        return self._split(self.images.test)

    def _split(self, split: Labelled) -> Iterator[Batch]:
        for x, y in zip(*(part.split(_IMAGES) for part in split), strict=True):
            yield self._standardise(x.to(self.device)), y.to(self.device)

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
        # One gather for all crops; it puts the indexed dimensions first and the channels last.
        return padded[images[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(
            0, 3, 1, 2
        )

    def _standardise(self, x: Tensor) -> Tensor:
        # With channels last, convolutions on a CPU take two thirds of the time.
        x = x.to(torch.float32, memory_format=torch.channels_last)
        return (x - self._mean) * self._scale


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation in two passes, three times as fast as `std_mean`."""
    mean = values.mean()
    return mean, (values - mean).square_().mean().sqrt()


@dataclass
class TextStream:
    """Random excerpts of a text; the targets are the next characters.

    The validation and test splits are cut into consecutive excerpts without overlap.

    Args:
        text: the data.
        size: the number of excerpts in a batch.
        block: the length of an excerpt.
        device: the device of the data and batches.
    """

    text: Text
    size: int
    block: int
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        shortest = min(map(len, (self.text.train, self.text.validation, self.text.test)))
        if shortest <= self.block:
            raise ValueError(
                f"the text is too short for excerpts of {self.block}: a split has {shortest} "
                "characters"
            )
        self._train = self.text.train.to(self.device)

    def batch(self, seed: int, step: int) -> Batch:
        starts = torch.randint(
            len(self._train) - self.block,
            (self.size, 1),
            generator=generator(seed, _EXCERPT, step),
        )
        excerpts = self._train[(starts + torch.arange(self.block + 1)).to(self.device)]
        return excerpts[:, :-1], excerpts[:, 1:]

    def validation(self) -> Iterator[Batch]:
        return self._split(self.text.validation)

    def test(self) -> Iterator[Batch]:
        return self._split(self.text.test)

    def _split(self, tokens: Tensor) -> Iterator[Batch]:
        tokens = tokens.to(self.device)
        length = (len(tokens) - 1) // self.block * self.block
        inputs = tokens[:length].view(-1, self.block).split(_EXCERPTS)
        targets = tokens[1 : length + 1].view(-1, self.block).split(_EXCERPTS)
        yield from zip(inputs, targets, strict=True)
