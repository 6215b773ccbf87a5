"""Randomly composed networks with random dead units (property-based test)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pdecay.deployment.compact import compact
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import difference, outputs

from .models import SqueezeExcite, kill, trained

ACTIVATIONS = [
    nn.ReLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.SiLU, nn.Hardswish, nn.LeakyReLU, nn.ELU, nn.Softplus,
    nn.Identity, nn.PReLU, nn.Hardtanh, nn.ReLU6, nn.Mish, nn.Dropout, nn.Softsign,
]  # fmt: skip


class Sum(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = (branch(x) for branch in self.branches)
        return sum(rest, first)


class Multiply(Sum):
    def forward(self, x: Tensor) -> Tensor:
        one, other = (branch(x) for branch in self.branches)
        return one * other


class Concat(Sum):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Halves(nn.Module):
    """Splits the channels, gates one half by the other, and concatenates both."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, 1)
        return torch.cat([one * other.sigmoid(), other], 1)


class Shuffle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.channel_shuffle(x, 2)


@st.composite
def blocks(draw, channels: int, depth: int = 2) -> nn.Module:
    """Draw a block that keeps the number of channels and the image size."""
    kinds = ["conv", "norm", "act", "se", "halves", "shuffle", "flip", "pool", "bottleneck"]
    if depth:
        kinds += ["sum", "residual", "concat", "multiply", "chain", "chain"]
    kind = draw(st.sampled_from(kinds))
    if kind == "conv":
        return draw(convolutions(channels, channels))
    if kind == "norm":
        norms = [nn.BatchNorm2d(channels), nn.GroupNorm(2, channels), nn.InstanceNorm2d(channels)]
        return draw(st.sampled_from(norms))
    if kind == "act":
        return draw(st.sampled_from(ACTIVATIONS))()
    if kind == "se":
        return SqueezeExcite(channels, 3)
    if kind == "halves":
        return Halves()
    if kind == "shuffle":
        return Shuffle()
    if kind == "flip":
        return nn.PixelShuffle(1)
    if kind == "pool":
        pools = [nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.UpsamplingNearest2d(size=(5, 5))]
        return draw(st.sampled_from(pools))
    if kind == "bottleneck":
        width = draw(st.sampled_from([2, 4, 6]))
        return nn.Sequential(
            draw(convolutions(channels, width)), nn.ReLU(), draw(convolutions(width, channels))
        )
    inner = [draw(blocks(channels, depth - 1)) for _ in range(2)]
    if kind == "residual":
        return Sum(nn.Identity(), nn.Sequential(*inner))
    if kind == "concat":
        return nn.Sequential(Concat(*inner), draw(convolutions(2 * channels, channels)))
    return {"sum": Sum, "multiply": Multiply, "chain": nn.Sequential}[kind](*inner)


@st.composite
def convolutions(draw, inputs: int, outputs: int) -> nn.Module:
    size = draw(st.sampled_from([1, 3]))
    groups = draw(
        st.sampled_from([n for n in (1, 1, 2, inputs) if not (inputs % n or outputs % n)])
    )
    if draw(st.integers(0, 5)) == 0:
        return nn.ConvTranspose2d(inputs, outputs, size, padding=size // 2, groups=groups)
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate"]))
    return nn.Conv2d(
        inputs, outputs, size, padding=size // 2, groups=groups,
        bias=draw(st.booleans()), padding_mode=mode,
    )  # fmt: skip


@st.composite
def networks(draw) -> nn.Module:
    channels = draw(st.sampled_from([4, 6]))
    body = [draw(blocks(channels)) for _ in range(draw(st.integers(1, 4)))]
    pooled = draw(st.booleans())
    head = [
        nn.AdaptiveAvgPool2d(1) if pooled else nn.Identity(),
        nn.Flatten(),
        nn.Linear(channels * (1 if pooled else 25), 7),
        draw(st.sampled_from([nn.ReLU(), nn.LayerNorm(7), nn.Softmax(-1), nn.Tanh()])),
        nn.Linear(7, 3),
    ]
    return nn.Sequential(nn.Conv2d(2, channels, 3, padding=1), *body, *head)


@settings(max_examples=40, deadline=None)
@given(networks(), st.integers(0, 1000), st.sampled_from([0.2, 0.5]))
def test_outputs_do_not_change(model, seed, share):
    torch.manual_seed(seed)
    trained(model)
    kill(model, seed, share)
    model.eval()
    example = torch.randn(2, 2, 5, 5)
    smaller = compact(model, example)
    for other in (example, 3 * torch.randn(3, 2, 5, 5)):
        inputs = Inputs.of(other)
        assert difference(outputs(model, inputs), outputs(smaller, inputs)) < 1e-5
    assert not smaller.compact_report.unknown
    for module in smaller.modules():
        if isinstance(module, nn.GroupNorm):
            assert module.weight.shape == (module.num_channels,)
