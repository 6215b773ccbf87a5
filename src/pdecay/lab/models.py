"""The networks of the experiments: ResNet for 32x32 images, a character GPT, a CNN and an MLP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention

_VARIANCE = 5e-4  # added to each variance, so that whitening does not amplify noise


class MLP(nn.Module):
    """Linear layers with ReLU between them, on flattened inputs."""

    def __init__(self, inputs: int, hidden: Sequence[int], classes: int) -> None:
        super().__init__()
        sizes = [inputs, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers(x))


class CNN(nn.Module):
    """3x3 convolutions with stride 2, batch norm and ReLU, followed by two linear layers."""

    def __init__(
        self, channels: int, size: int, widths: Sequence[int], hidden: int, classes: int
    ) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for width in widths:
            blocks += [
                nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            channels, size = width, (size + 1) // 2
        self.features = nn.Sequential(*blocks)
        self.head = MLP(channels * size * size, [hidden], classes)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.features(x)))


class ResNet(nn.Module):
    """ResNet for 32x32 images: a 3x3 stem and no pooling before the stages.

    Stage k has ``width * 2**k`` channels and ``blocks[k]`` basic blocks. Every stage but the first
    halves the image. ``ResNet()`` is ResNet18: width 64 and two blocks in each of four stages. A
    stem with `stride` 2 reduces the cost by a factor of four. A whitened stem is a fixed layer,
    see :class:`Whitening`.
    """

    def __init__(
        self,
        width: int = 64,
        blocks: Sequence[int] = (2, 2, 2, 2),
        classes: int = 10,
        stride: int = 1,
        whitened: bool = False,
    ) -> None:
        super().__init__()
        channels = width
        if whitened:
            whitening = Whitening(3, stride)
            channels = whitening.out_channels
            self.stem = nn.Sequential(whitening, nn.ReLU())
        else:
            conv = nn.Conv2d(3, width, 3, stride, padding=1, bias=False)
            self.stem = nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())
        stages: list[nn.Module] = []
        for k, count in enumerate(blocks):
            for i in range(count):
                stages.append(_Block(channels, width << k, stride=2 if k > 0 and i == 0 else 1))
                channels = width << k
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return cast(Tensor, self.head(x.mean(dim=(2, 3))))


class Whitening(nn.Conv2d):
    """A fixed 3x3 convolution whose outputs on natural images are uncorrelated.

    The filters are the principal components of 3x3 patches, scaled to unit variance, and their
    negatives, so that a ReLU loses nothing. It replaces the first layer of a network, which
    otherwise takes a large part of a short training to find such filters. Call :meth:`fit` before
    training. The weight is a buffer: it is neither trained nor counted.
    """

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__(channels, 2 * 9 * channels, 3, stride, padding=1, bias=False)
        weight = self.weight.detach()
        del self.weight
        self.register_buffer("weight", weight)

    @torch.no_grad()
    def fit(self, images: Tensor) -> None:
        """Set the filters from standardised training images."""
        patches = nn.functional.unfold(images, 3).transpose(1, 2).flatten(0, 1)
        variances, components = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (components / (variances + _VARIANCE).sqrt()).T.view(-1, *self.weight.shape[1:])
        self.weight.copy_(torch.cat([filters, -filters]))


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class GPT(nn.Module):
    """A decoder-only transformer like nanoGPT: pre-norm, GELU, tied embeddings, no biases.

    Weights are initialised with deviation 0.02; projections into the residual stream with
    ``0.02 / sqrt(2 * layers)``, so that the variance of the stream does not grow with the depth.

    Args:
        symbols: the size of the vocabulary.
        block: the maximum length of an input.
        layers, heads, width: the size of the transformer.
        dropout: the dropout on embeddings, attention and updates of the residual stream.
    """

    def __init__(
        self, symbols: int, block: int, layers: int, heads: int, width: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
        self.block = block
        self.embedding = nn.Embedding(symbols, width)
        self.position = nn.Embedding(block, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(_Layer(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, symbols, bias=False)
        self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith("project.weight")
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.block:
            raise ValueError(f"inputs may have up to {self.block} symbols, got {length}")
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.position(positions))
        return cast(Tensor, self.head(self.norm(self.layers(x))))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = _Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.mlp = _FeedForward(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        drop = self.dropout.p if self.training else 0.0
        y = scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        return cast(Tensor, self.dropout(self.project(y)))


class _FeedForward(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.project = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.dropout(self.project(gelu(self.expand(x)))))
