"""deploy on random networks, compared with the dense ones at several input sizes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.deployment.layers.modules import SparseLayer
from pdecay.deployment.runtime.pipeline import deploy

pytestmark = pytest.mark.skipif(bool(layers_kernel.available()), reason="no compiler")


class Step(nn.Module):
    """Two layers, a norm and a shared ReLU, combined in one of `PATTERNS`."""

    def __init__(self, channels: int, relu: nn.ReLU, dice: random.Random, images: bool) -> None:
        super().__init__()
        self.first, self.second = (layer(channels, dice, images) for _ in range(2))
        norm = nn.BatchNorm2d if images else nn.BatchNorm1d
        self.norm = norm(channels) if dice.random() < 0.6 else nn.Identity()
        self.relu = relu
        self.pattern = dice.choice(PATTERNS)

    def forward(self, x):
        return self.pattern(self, x)


def layer(channels: int, dice: random.Random, images: bool) -> nn.Module:
    bias = dice.random() < 0.7
    if not images:
        return nn.Linear(channels, channels, bias)
    return nn.Conv2d(
        *(channels, channels, dice.choice([1, 3, (1, 3), 5])),
        padding="same",
        dilation=dice.choice([1, 1, 2]),
        groups=dice.choice([1, 1, 1, channels]),
        bias=bias,
    )


def plain(step, x):
    return step.norm(step.first(x))


def activated(step, x):
    return step.norm(step.first(x)).relu_()


def residual(step, x):
    return x + step.norm(step.second(functional.relu(step.first(x))))


def residual_in_place(step, x):
    y = step.relu(step.norm(step.first(x)))
    y = step.second(y)
    y += x
    return step.relu(y)


def two_branches(step, x):
    y = step.norm(step.first(x))
    y += step.second(x)
    return step.relu(y)


def preactivated(step, x):
    y = functional.relu(step.norm(x))
    return step.second(functional.relu(step.first(y))) + x


def repeated(step, x):
    return torch.relu(step.first(functional.relu(step.first(x))) + x)


def scaled(step, x):
    return functional.relu(step.first(x) * 0.5) + step.second(x)


def with_the_mean(step, x):
    """The sum broadcasts the layer's output, unless there is only one row or pixel."""
    mean = x.mean((2, 3) if x.dim() == 4 else 0, keepdim=True)
    return functional.relu(step.second(mean) + step.first(x).tanh())


PATTERNS = [plain, activated, residual, residual_in_place, two_branches]
PATTERNS += [preactivated, repeated, scaled, with_the_mean]


def network(dice: random.Random, images: bool) -> nn.Sequential:
    relu = nn.ReLU(inplace=dice.random() < 0.5)
    channels = dice.choice([4, 8, 17, 32])
    steps = [Step(channels, relu, dice, images) for _ in range(dice.randint(1, 4))]
    model = nn.Sequential(*steps, *steps[: dice.choice([0, 0, 1])])  # the first may be called twice
    zeros = dice.choice([0.5, 0.7, 0.9, 0.95, 0.99])
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.weight.mul_(torch.rand(module.weight.shape) >= zeros)
            elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.bias.normal_()
    return model.to(dice.choice([torch.float32, torch.float32, torch.float64])).eval()


@pytest.mark.parametrize("seed", range(30))
@torch.no_grad()
def test_random_network(clock, seed):
    dice = random.Random(seed)
    torch.manual_seed(seed)
    images = dice.random() < 0.65
    model = network(dice, images)
    memory = dice.choice([torch.contiguous_format, torch.contiguous_format, torch.channels_last])
    model = model.to(memory_format=memory)

    def draw():
        weight = model[0].first.weight
        sizes = [dice.choice([1, 2, 5, 17]), len(weight)]
        sizes += [dice.choice([1, 4, 7, 9, 16, 20, 32]) for _ in range(2 if images else 0)]
        x = torch.randn(sizes, dtype=weight.dtype)
        return x.to(memory_format=memory) if images else x

    example = draw()
    deployed = deploy(model, example)
    assert any(isinstance(module, SparseLayer) for module in deployed.modules())
    for x in (example, draw(), draw(), draw()):
        wanted, got = model(x.clone()), deployed(x.clone())
        assert got.shape == wanted.shape
        assert float((got - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())
