"""Models from functions, and checks of compacted models."""

from __future__ import annotations

from torch import nn

from pdecay.deployment.compact import compact
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import difference, outputs


class Model(nn.Module):
    """A model from named layers and a forward function."""

    def __init__(self, forward, **layers) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


def compacted(model, *example, also=()):
    """Compact a model and compare the outputs on more inputs than compact does."""
    model.eval()
    smaller = compact(model, example)
    for other in (example, *also):
        inputs = Inputs.of(tuple(other))
        assert difference(outputs(model, inputs), outputs(smaller, inputs)) < 1e-5
    return smaller


def reasons(model):
    return {one.layer: one.reason for one in model.compact_report.kept}
