"""scikit-learn's handwritten digits and the small network that learns them.

The 1,797 images of 8 x 8 pixels come with scikit-learn, so nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

# Pixels, two hidden layers, classes. The hidden ones are LeNet-300-100's, the usual small network
# of the pruning literature.
SIZES = (64, 300, 100, 10)
VALIDATION_IMAGES = 500
_WHITE = 16.0  # the digits' brightest pixel


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 pixels, centred, with their labels; a split into two parts."""

    train_images: Tensor
    train_labels: Tensor
    validation_images: Tensor
    validation_labels: Tensor


def load() -> Digits:
    """The digits in a fixed split: every run, whatever its seed, sees the same validation part."""
    images, labels = load_digits(return_X_y=True)
    train_x, validation_x, train_y, validation_y = train_test_split(
        images / _WHITE, labels, test_size=VALIDATION_IMAGES, stratify=labels, random_state=0
    )
    centre = train_x.mean()
    return Digits(
        train_images=torch.tensor(train_x - centre, dtype=torch.float32),
        train_labels=torch.tensor(train_y),
        validation_images=torch.tensor(validation_x - centre, dtype=torch.float32),
        validation_labels=torch.tensor(validation_y),
    )


def network() -> nn.Sequential:
    """A multilayer perceptron with 50,200 weights; torch's generator initialises it."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(SIZES):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])  # the last layer's outputs are logits
