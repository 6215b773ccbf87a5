"""scikit-learn's handwritten digits: 1,797 grey images of 8x8 pixels, ten classes.

They come with scikit-learn, so nothing is downloaded.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from pdecay.lab.data.sources import Images, Labelled

VALIDATION, TEST = 250, 250  # images; the other 1,297 are for training


def load() -> Images:
    """Load the digits in a fixed, stratified split that does not depend on any seed."""
    images, labels = load_digits(return_X_y=True)
    train_x, rest_x, train_y, rest_y = train_test_split(
        images, labels, test_size=VALIDATION + TEST, stratify=labels, random_state=0
    )
    validation_x, test_x, validation_y, test_y = train_test_split(
        rest_x, rest_y, test_size=TEST, stratify=rest_y, random_state=0
    )
    return Images(
        train=_tensors(train_x, train_y),
        validation=_tensors(validation_x, validation_y),
        test=_tensors(test_x, test_y),
    )


def _tensors(images: np.ndarray, labels: np.ndarray) -> Labelled:
    pixels = torch.tensor(images, dtype=torch.float32)
    return pixels.view(-1, 1, 8, 8), torch.tensor(labels)
