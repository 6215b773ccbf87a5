"""Sparse layers for inference: SparseLinear and SparseConv2d."""

from __future__ import annotations

from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pdecay._core.parameters import has_transposed_weight
from pdecay.deployment.layers.base import SparseLayer, why_not
from pdecay.deployment.layers.conv_plan import conv_plan
from pdecay.deployment.layers.kernel import Call
from pdecay.deployment.layers.row_plan import row_plan
from pdecay.deployment.layers.shapes import Shape

__all__ = ["SparseConv2d", "SparseLayer", "SparseLinear", "as_linear", "why_not"]

_MAX_SINGLE_ROWS = 3  # up to this many rows, a linear layer is faster row by row
_MAX_ROWS = 128  # the most rows in one block of work


class SparseLinear(SparseLayer):
    """An ``nn.Linear`` that computes only with the non-zeros of its weight.

    Args:
        layer: the dense layer, an ``nn.Linear`` or a ``Conv1D`` of transformers; it is copied, not
            changed.
        relu: whether to apply a ReLU to the output.

    Example:
        >>> dense = nn.Linear(64, 32)
        >>> _ = dense.weight.data.masked_fill_(torch.rand(32, 64) < 0.9, 0.0)
        >>> sparse = SparseLinear(dense)
        >>> with torch.inference_mode():
        ...     x = torch.randn(5, 64)
        ...     torch.allclose(sparse(x), dense(x), atol=1e-6)
        True
    """

    def __init__(self, layer: nn.Linear, *, relu: bool = False) -> None:
        layer = as_linear(layer)
        if not isinstance(layer, nn.Linear):
            raise TypeError(f"SparseLinear needs an nn.Linear, got {type(layer).__name__}")
        # These may be integers of numpy, as in nn.Linear(np.prod(shape), 10).
        shape = Shape(int(layer.in_features), int(layer.out_features))
        super().__init__(layer, shape, relu=relu)
        self.in_features = shape.in_channels
        self.out_features = shape.out_channels

    def to_dense(self) -> nn.Linear:
        """Return an ``nn.Linear`` with the same weight, without the ReLU of this layer."""
        return self._fill(nn.Linear(self.in_features, self.out_features, self.bias is not None))

    def _check_shape(self, shape: torch.Size) -> None:
        if shape[-1:] != (self.shape.in_channels,):
            raise ValueError(
                f"expected an input of {self.shape.in_channels} features, got {tuple(shape)}"
            )

    def _prepare(self, shape: torch.Size) -> Call:
        count = shape[:-1].numel()
        if count <= _MAX_SINGLE_ROWS:
            plan = self._plan((1,), lambda: row_plan(self.shape, self._weight, self.relu))
        else:  # round up, so that one plan serves several batch sizes
            images = min(_MAX_ROWS, -(-count // 16) * 16)
            plan = self._plan(
                (images,), lambda: conv_plan(self.shape, self._weight, 1, 1, images, self.relu)
            )
        return Call(plan, count, (*shape[:-1], self.shape.out_channels))

    def _compute_dense(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)


class SparseConv2d(SparseLayer):
    """An ``nn.Conv2d`` that computes only with the non-zeros of its weight.

    All strides, paddings, dilations and groups of torch are supported. The input may have any
    memory format; the output is contiguous.

    Args:
        layer: the dense layer; it is copied, not changed.
        relu: whether to apply a ReLU to the output.

    Example:
        >>> dense = nn.Conv2d(8, 16, 3, padding=1)
        >>> _ = dense.weight.data.masked_fill_(torch.rand(16, 8, 3, 3) < 0.9, 0.0)
        >>> sparse = SparseConv2d(dense)
        >>> with torch.inference_mode():
        ...     x = torch.randn(2, 8, 12, 12)
        ...     torch.allclose(sparse(x), dense(x), atol=1e-6)
        True
    """

    def __init__(self, layer: nn.Conv2d, *, relu: bool = False) -> None:
        if not isinstance(layer, nn.Conv2d):  # an nn.ConvTranspose2d has the same attributes
            raise TypeError(f"SparseConv2d needs an nn.Conv2d, got {type(layer).__name__}")
        kernel, stride = _pair(layer.kernel_size), _pair(layer.stride)
        dilation = _pair(layer.dilation)
        # The kernel pads with zeros only; other padding modes are applied to the input before.
        top, left, bottom, right = padding = _padding(layer.padding, kernel, dilation)
        is_zeros = layer.padding_mode == "zeros"
        shape = Shape(
            *(int(layer.in_channels), int(layer.out_channels), kernel, stride),
            *(padding if is_zeros else (0, 0, 0, 0), dilation, int(layer.groups)),
        )
        super().__init__(layer, shape, relu=relu)
        self.in_channels = shape.in_channels
        self.out_channels = shape.out_channels
        # Code of models reads these: for example, it pads by a part of the kernel's size.
        self.kernel_size, self.stride = kernel, stride
        self.dilation, self.groups = dilation, shape.groups
        self.padding = layer.padding if isinstance(layer.padding, str) else (top, left)
        self.padding_mode = layer.padding_mode
        self._border = None if is_zeros else (left, right, top, bottom)

    def to_dense(self) -> nn.Conv2d:
        """Return an ``nn.Conv2d`` with the same weight, without the ReLU of this layer."""
        return self._fill(nn.Conv2d(self.in_channels, self.out_channels, **self._options()))

    def forward(self, x: Tensor, more: Tensor | float | None = None, relu: bool = False) -> Tensor:
        if self._border is not None:
            x = functional.pad(x, self._border, self.padding_mode)
        return super().forward(x, more, relu)

    def _check_shape(self, shape: torch.Size) -> None:
        if len(shape) not in (3, 4) or shape[-3] != self.shape.in_channels:
            raise ValueError(
                f"expected images of {self.shape.in_channels} channels, got {tuple(shape)}"
            )

    def _prepare(self, shape: torch.Size) -> Call:
        images, height, width = shape[:-3].numel(), *shape[-2:]
        plan = self._plan(
            (images, height, width),
            lambda: conv_plan(self.shape, self._weight, height, width, images, self.relu),
        )
        out_size = self.shape.output(height, width)
        return Call(plan, images, (*shape[:-3], self.shape.out_channels, *out_size))

    def _options(self) -> dict[str, Any]:
        return {
            "kernel_size": self.shape.kernel,
            "stride": self.shape.stride,
            "padding": self.padding,
            "dilation": self.shape.dilation,
            "groups": self.shape.groups,
            "bias": self.bias is not None,
            "padding_mode": self.padding_mode,
        }

    def _reshape_weight(self, weight: Tensor) -> Tensor:
        return weight.view(len(weight), -1, *self.shape.kernel)

    def _compute_dense(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shape = self.shape
        top, left, bottom, right = shape.padding
        x = functional.pad(x, (left, right, top, bottom))
        return functional.conv2d(x, weight, bias, shape.stride, 0, shape.dilation, shape.groups)


def as_linear(layer: nn.Linear) -> nn.Linear:
    """Return a ``Conv1D`` of transformers as an ``nn.Linear``; an ``nn.Linear`` as it is."""
    if not has_transposed_weight(layer):
        return layer
    weight = layer.weight.detach().mT
    linear = nn.Linear(1, 1, device="meta").train(layer.training)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = layer.bias
    return linear


def _pair(numbers: tuple[Any, ...]) -> tuple[int, int]:
    """Return two numbers, with integers of numpy as Python's."""
    first, second = (int(one) if isinstance(one, Integral) else one for one in numbers)
    return first, second


def _padding(
    padding: tuple[int, ...] | str, kernel: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return the padding at the top, left, bottom and right."""
    if padding == "valid":
        return 0, 0, 0, 0
    if padding == "same":  # an odd total has one more at the end
        whole = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        top, left = whole[0] // 2, whole[1] // 2
        return top, left, whole[0] - top, whole[1] - left
    top, left = _pair(cast("tuple[int, ...]", padding))
    return top, left, top, left
