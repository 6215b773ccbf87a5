"""Dense layers with many zeros."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pdecay.deployment.layers import kernel as layers_kernel

needs_kernel = pytest.mark.skipif(bool(layers_kernel.available()), reason="no compiler")


def dense_linear(*args, **options):
    return mostly_zero(nn.Linear, *args, **options)


def dense_conv(*args, **options):
    return mostly_zero(nn.Conv2d, *args, **options)


def mostly_zero(kind, *args, **options):
    """Return a dense layer with 90 % zeros."""
    with torch.inference_mode(False), torch.no_grad():
        layer = kind(*args, **options)
        layer.weight.mul_(torch.rand(layer.weight.shape) >= 0.9)
    return layer
