"""Fusion of forwards that do something else for other inputs than the example, or for proxies."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.deployment.layers.modules import SparseConv2d
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.runtime.fusion import fuse

pytestmark = pytest.mark.skipif(bool(layers_kernel.available()), reason="no compiler")


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = SparseConv2d(nn.Conv2d(4, 4, 3, padding=1))


def fused_once(model, *args):
    """Fuse the operations of a model whose modules are called once."""
    return fuse(model, dict.fromkeys(model.modules(), 1), Inputs.of(args))


def limited(x):
    return x.clamp(-9, 9) if torch.is_tensor(x) else x


def limited_by_name(x):
    return x if hasattr(x, "unknown") else x.clamp(-9, 9)


def limited_by_value(x):
    try:
        return x.clamp(-9, 9) if bool(x.abs().max() > 9) else x
    except ValueError:  # of torch.fx
        return x


@pytest.mark.parametrize("limit", [limited, limited_by_name, limited_by_value])
def test_trace_of_another_branch_is_not_fused(limit):
    """The outputs of both branches are equal on the example."""

    class Limits(Layers):
        def forward(self, x):
            return functional.relu(self.first(limit(x)))

    model, x = Limits(), torch.randn(2, 4, 9, 9).clamp(-2, 2)
    with torch.inference_mode():
        wanted = model(50 * x)
        assert fused_once(model, x) == []
        torch.testing.assert_close(model(50 * x), wanted)


class Preactivated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.layer(functional.relu(x, inplace=True))


def test_layer_is_not_moved_past_module_that_changes_its_input():
    """The change is none on the example."""

    class Shortcut(Layers):
        def __init__(self):
            super().__init__()
            self.block = Preactivated()

        def forward(self, x):
            return self.first(x) + self.block(x)

    model, x = Shortcut(), torch.rand(2, 4, 9, 9)
    with torch.inference_mode():
        wanted = model(-x)
        assert fused_once(model, x) == []
        torch.testing.assert_close(model(-x), wanted)
