"""Small networks of many architectures, and functions that make their units dead."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pdecay.lab.models import CNN, GPT, MLP, ResNet


def conv(inputs: int, outputs: int, size: int = 3, **options) -> nn.Sequential:
    options.setdefault("padding", size // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, bias=False, **options), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Classifier(nn.Module):
    """Convolutional features, global average pooling, and a linear layer."""

    def __init__(self, features: nn.Module, channels: int) -> None:
        super().__init__()
        self.features = features
        self.head = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut: ResNet, or ResNeXt with groups."""

    def __init__(self, channels: int, width: int, groups: int = 1) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            conv(channels, width, 1),
            conv(width, width, groups=groups),
            nn.Conv2d(width, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


class InvertedResidual(nn.Module):
    """A MobileNetV2 block: expand, depthwise convolution, project, shortcut without ReLU."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            conv(channels, width, 1),
            conv(width, width, groups=width),
            nn.Conv2d(width, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class DenseBlock(nn.Module):
    """A DenseNet block: every layer reads the concatenation of all earlier outputs."""

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(conv(channels + i * growth, growth) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, width)
        self.excite = nn.Linear(width, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.excite(F.relu(self.squeeze(x.mean((2, 3)))))
        return x * gate.sigmoid()[:, :, None, None]


class UNet(nn.Module):
    """Downsampling, a transposed convolution, and concatenation with the skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = conv(3, 8)
        self.down = nn.Sequential(nn.MaxPool2d(2), conv(8, 12))
        self.up = nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.last = nn.Sequential(conv(16, 8), nn.Conv2d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.last(torch.cat([first, self.up(self.down(first))], 1))


class Shuffled(nn.Module):
    """Two grouped convolutions with a channel shuffle between them."""

    def __init__(self, channels: int = 12) -> None:
        super().__init__()
        self.stem = conv(3, channels)
        self.one = conv(channels, channels, 1, groups=3)
        self.two = conv(channels, channels, groups=3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(self.stem(x))
        y = y.unflatten(1, (3, -1)).transpose(1, 2).flatten(1, 2)
        return self.two(y)


class Generator(nn.Module):
    """A linear layer reshaped to an image, then transposed convolutions and a pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = 8
        self.start = nn.Linear(6, 8 * 4 * 4)
        self.up = nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.pixels = nn.Conv2d(6, 3 * 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.start(x).view(-1, self.channels, 4, 4))
        return F.pixel_shuffle(self.pixels(F.relu(self.norm(self.up(y)))), 2).tanh()


class Gated(nn.Module):
    """A gated linear unit; one layer computes gates and values."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(6, 24)
        self.down = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class BagOfWords(nn.Module):
    """An embedding without a norm after it, so that its dimensions can be removed."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 12)
        self.hidden = nn.Linear(12, 10)
        self.head = nn.Linear(10, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(self.words(tokens).mean(1))))


class Attention(nn.Module):
    """Attention with one projection for queries, keys and values, which runs with fewer heads."""

    def __init__(self, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.n_head = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    """An LSTM between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 8))
        self.lstm = nn.LSTM(8, 7, batch_first=True)
        self.after = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 2))

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(self.before(x))
        return self.after(y[:, -1])


class InPlace(nn.Module):
    """Operations that overwrite their inputs, or a part of them, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 1)
        self.two = nn.Conv2d(8, 8, 1)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.one(x))
        y += self.two(y)
        y.mul_(0.5)
        y[:, :, 0] = 1.0
        return self.head(y)


IMAGE = (2, 3, 12, 12)

ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[], object]]] = {
    "mlp": (lambda: MLP(6, [16, 12], 3), lambda: torch.randn(4, 6)),
    "cnn": (lambda: CNN(3, 12, [8, 12], 16, 5), lambda: torch.randn(IMAGE)),
    "vgg": (
        lambda: Classifier(
            nn.Sequential(conv(3, 8), nn.MaxPool2d(2), conv(8, 12), nn.AvgPool2d(2), conv(12, 10)),
            10,
        ),
        lambda: torch.randn(IMAGE),
    ),
    "resnet18": (lambda: ResNet(8, (2, 2, 2, 2)), lambda: torch.randn(2, 3, 32, 32)),
    "bottleneck": (
        lambda: Classifier(nn.Sequential(conv(3, 12), Bottleneck(12, 8), Bottleneck(12, 8)), 12),
        lambda: torch.randn(IMAGE),
    ),
    "resnext": (
        lambda: Classifier(nn.Sequential(conv(3, 12), Bottleneck(12, 12, 4)), 12),
        lambda: torch.randn(IMAGE),
    ),
    "mobilenet": (
        lambda: Classifier(
            nn.Sequential(conv(3, 8), InvertedResidual(8, 24), InvertedResidual(8, 24)), 8
        ),
        lambda: torch.randn(IMAGE),
    ),
    "densenet": (
        lambda: Classifier(nn.Sequential(conv(3, 8), DenseBlock(8, 6, 3), conv(26, 8, 1)), 8),
        lambda: torch.randn(IMAGE),
    ),
    "squeeze-excite": (
        lambda: Classifier(nn.Sequential(conv(3, 12), SqueezeExcite(12, 6), conv(12, 8)), 8),
        lambda: torch.randn(IMAGE),
    ),
    "unet": (UNet, lambda: torch.randn(IMAGE)),
    "shufflenet": (lambda: Classifier(Shuffled(), 12), lambda: torch.randn(IMAGE)),
    "generator": (Generator, lambda: torch.randn(2, 6)),
    "group norm": (
        lambda: Classifier(
            nn.Sequential(
                nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12), nn.SiLU(), nn.Conv2d(12, 8, 3), nn.ELU()
            ),
            8,
        ),
        lambda: torch.randn(IMAGE),
    ),
    "instance norm": (
        lambda: Classifier(
            nn.Sequential(
                nn.Conv2d(3, 12, 3),
                nn.InstanceNorm2d(12, affine=True),
                nn.PReLU(12),
                nn.Conv2d(12, 8, 3, padding=1, padding_mode="reflect"),
            ),
            8,
        ),
        lambda: torch.randn(IMAGE),
    ),
    "gated": (Gated, lambda: torch.randn(3, 5, 6)),
    "bag of words": (BagOfWords, lambda: torch.randint(0, 20, (3, 7))),
    "1-d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 8, 3), nn.ReLU(), nn.Conv1d(8, 6, 3), nn.Flatten(), nn.Linear(36, 3)
        ),
        lambda: torch.randn(2, 2, 10),
    ),
    "gpt": (lambda: GPT(20, 8, 2, 4, 24), lambda: torch.randint(0, 20, (2, 8))),
    "attention": (
        lambda: nn.Sequential(nn.Linear(5, 24), Attention(), Attention(), nn.Linear(24, 3)),
        lambda: torch.randn(2, 6, 5),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2, enable_nested_tensor=False
        ),
        lambda: torch.randn(2, 5, 16),
    ),
    "transformer": (
        lambda: nn.Transformer(16, 4, 1, 1, 24, batch_first=True),
        lambda: (torch.randn(2, 5, 16), torch.randn(2, 4, 16)),
    ),
    "lstm": (Recurrent, lambda: torch.randn(3, 6, 5)),
    "in place": (InPlace, lambda: torch.randn(IMAGE)),
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, object]:
    """Return a network with random norms and biases, and an example."""
    make_model, make_example = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = make_model()
    trained(model)
    return model, make_example()


@torch.no_grad()
def trained(model: nn.Module) -> None:
    """Set norms and biases to values other than 0 and 1."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2)
    for param in model.parameters():
        if param.ndim == 1:
            param.add_(0.2 * torch.randn_like(param))


@torch.no_grad()
def kill(model: nn.Module, seed: int, share: float = 0.3) -> None:
    """Set random rows, columns, biases and norms to zero, like sparse training."""
    generator = torch.Generator().manual_seed(seed)

    def some(count: int, chance: float) -> Tensor:
        hit = torch.rand((), generator=generator) < chance
        return hit & (torch.rand(count, generator=generator) < share)

    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        for name, param in own.items():
            if param.ndim >= 2:
                rows = some(param.shape[0], 0.7)
                param[rows] = 0
                param[:, some(param.shape[1], 0.7)] = 0
                bias = own.get(name.replace("weight", "bias"))
                if bias is not None and bias.shape == rows.shape and some(1, 2.0):
                    bias[rows] = 0
            else:
                param[some(len(param), 0.3)] = 0
