"""Linear and convolutional layers that hold and compute with the non-zeros of their weight alone.

They are for inference on the CPU, in float32 or float64. A zero weight is no term of the sum: where
a dense layer multiplies it with an infinite or undefined input and gets NaN, a sparse one does not
see that input.

The kernels are plain C, compiled at first use (see ``pdecay._native``). Without a compiler, and
while torch traces, compiles or transforms the model (``torch.func``), the layers compute densely,
with the same result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.deployment.layers.kernel import Call, Plan, is_traced
from pdecay.deployment.layers.tiling import NonZeros, Shape, convolution, rows
from pdecay.deployment.model.state import total_nbytes

__all__ = ["SparseConv2d", "SparseLayer", "SparseLinear", "why_not"]

_DTYPES = (torch.float32, torch.float64)
_PLANS = 16  # that a layer keeps
_SHAPES = 64  # of inputs that it remembers
_FEW_ROWS = 3  # a linear layer on up to so many rows is faster row by row
_MANY_ROWS = 128  # and this many are taken at once
# Made from the buffers, and anew if they change.
_MADE = ("_dtype", "_weight", "_calls", "_plans", "_dense", "_why_dense")

Dense = TypeVar("Dense", nn.Linear, nn.Conv2d)


def why_not(layer: nn.Linear | nn.Conv2d) -> str | None:
    """Why a layer cannot be made sparse, in a few words; None if it can."""
    count = layer.weight.numel()
    return f"of {count} weights" if count == 0 or count >= 2**31 else _no_kernel(layer.weight)


def _no_kernel(weight: Tensor) -> str | None:
    """Why the kernel cannot compute with such a weight; None if it can."""
    if weight.dtype not in _DTYPES:
        return f"of dtype {str(weight.dtype).removeprefix('torch.')}"
    if weight.device.type != "cpu" or weight.layout != torch.strided:
        return f"on device {weight.device.type}, {weight.layout}"
    return layers_kernel.available()


class SparseLayer(nn.Module):
    """What both layers share: the non-zeros, as buffers, and a plan for each size of input.

    Buffers: ``values``; ``columns``, their places in an output's flat weights; ``row``, where those
    of each output begin; ``bias``, if there is one. To change the weights, go through ``to_dense``.

    Args:
        layer: the dense layer; it is copied, not changed.
        shape: its geometry.
        relu: whether a ReLU follows, as part of this layer.
    """

    values: Tensor
    columns: Tensor
    row: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear | nn.Conv2d, shape: Shape, *, relu: bool) -> None:
        super().__init__()
        weight = layer.weight.detach()
        if weight.dtype not in _DTYPES or weight.device.type != "cpu":
            raise ValueError(
                f"{type(self).__name__} holds float32 or float64 weights on the CPU, "
                f"got {weight.dtype} on {weight.device}: convert the layer first"
            )
        self.shape = shape
        self.relu = relu
        outputs, columns = weight.flatten(1).nonzero(as_tuple=True)
        counts = torch.bincount(outputs, minlength=len(weight))
        self.register_buffer("values", weight.flatten(1)[outputs, columns])
        self.register_buffer("columns", columns.int())
        self.register_buffer("row", functional.pad(counts.cumsum(0), (1, 0)))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())
        self.train(layer.training)
        self._forget()

    @property
    def sparsity(self) -> float:
        """The share of zeros in the weight."""
        return 1 - len(self.values) / self.shape.weights

    @property
    def nbytes(self) -> int:
        """The bytes that the layer holds, the plans of the inputs seen so far included."""
        arrays = (array for plan in self._plans.values() for array in plan.arrays.values())
        return total_nbytes((*self.buffers(), *arrays))

    @property
    def weight(self) -> Tensor:
        """The weight with its zeros, made anew each time: for code that asks a layer for it."""
        every = torch.arange(self.shape.out_channels, device=self.row.device)
        outputs = torch.repeat_interleave(every, self.row.diff())  # ONNX: no output_size
        columns = self.shape.weights // self.shape.out_channels
        zeros = self.values.new_zeros(self.shape.out_channels, columns)
        return self._shaped(zeros.index_put((outputs, self.columns.long()), self.values))

    def enable_relu(self) -> None:
        """Apply a ReLU to the output from now on."""
        self.relu = True
        self._forget()

    def extra_repr(self) -> str:
        text = f"{self.shape.in_channels}, {self.shape.out_channels}, "
        text += "".join(f"{name}={value}, " for name, value in self._options().items())
        text += "relu=True, " if self.relu else ""
        return f"{text}nonzeros={len(self.values)} ({self.sparsity:.1%} sparse)"

    def _options(self) -> dict[str, Any]:
        """What the dense layer was made with, besides its sizes."""
        return {"bias": self.bias is not None}

    def _shaped(self, weight: Tensor) -> Tensor:
        """A weight of a row for each output, as the dense layer has it."""
        return weight

    def forward(self, x: Tensor, more: Tensor | float | None = None) -> Tensor:
        """The layer's output; `more`, if given, is added to it, before the ReLU."""
        # What is asked for at every call is kept short: layers may take ten microseconds in all.
        if is_traced(x):
            return self._densely(x, more)
        call = self._calls.get(x.shape)
        if call is None or x.dtype is not self._dtype or x.requires_grad or not x.is_cpu:
            x = self._accepted(x)
            call = self._call(x.shape)
            if call is None:
                return self._densely(x, more)
        return call(x if x.is_contiguous() else x.contiguous(), more)

    def _accepted(self, x: Tensor) -> Tensor:
        """The input, if it is one that the kernel can read."""
        name = type(self).__name__
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} computes no gradients, and its input requires one: call the model in "
                "torch.inference_mode(), or train the dense model"
            )
        if x.is_cpu and x.is_floating_point() and torch.is_autocast_enabled("cpu"):
            return x.to(self._dtype)  # the short numbers of a dense layer before this one
        if x.dtype is not self._dtype or x.device != self.values.device:
            raise ValueError(
                f"{name} takes {self._dtype} on {self.values.device}, got {x.dtype} on {x.device}: "
                "convert the input, or deploy the model in the dtype that it shall have"
            )
        return x

    def _call(self, shape: torch.Size) -> Call | None:
        """The kernel on a shape of input; None where there is no kernel."""
        self._check(shape)
        if self._why_dense is not None:
            return None
        call = self._calls.get(shape)
        if call is None:
            if len(self._calls) >= _SHAPES:
                self._calls.clear()
            self._check_buffers()
            with torch.device("cpu"):  # whatever torch's default device is
                call = self._calls[shape] = self._prepare(shape)
        return call

    def _check_buffers(self) -> None:
        """Raise unless the buffers are a weight: the kernel would read whatever memory they name.

        They are not, after ``to_empty`` or a state dict of something else.
        """
        columns, row = self._weight.columns, self._weight.row
        each = self.shape.weights // self.shape.out_channels
        if not (
            len(row) == self.shape.out_channels + 1 == len(self._weight.bias) + 1
            and int(row[0]) == 0
            and int(row[-1]) == len(columns) == len(self._weight.values)
            and bool((row.diff() >= 0).all())
            and bool(((columns >= 0) & (columns < each)).all())
        ):
            raise ValueError(
                f"the buffers of this {type(self).__name__} are not the non-zeros of a "
                f"{self.shape.out_channels} x {each} weight: load its state dict again"
            )

    def _check(self, shape: torch.Size) -> None:
        """Raise unless this is a shape of input that the layer takes."""
        raise NotImplementedError

    def _prepare(self, shape: torch.Size) -> Call:
        raise NotImplementedError

    def _compute_densely(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _forget(self) -> None:
        """Make anew what is made from the buffers; for when they change."""
        self._dtype = self.values.dtype
        bias = self.values.new_zeros(self.shape.out_channels) if self.bias is None else self.bias
        # As the kernel reads them: a state dict that is assigned may hold them otherwise.
        self._weight = NonZeros(
            self.values.contiguous(),
            self.columns.int().contiguous(),
            self.row.long().contiguous(),
            bias.to(self._dtype).contiguous(),
        )
        self._calls: dict[torch.Size, Call] = {}
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._dense: Tensor | None = None
        self._why_dense = _no_kernel(self.values)

    def _plan(self, key: tuple[int, ...], make: Callable[[], Plan]) -> Plan:
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
                self._calls.clear()
            plan = self._plans[key] = make()
        return plan

    def _densely(self, x: Tensor, more: Tensor | float | None) -> Tensor:
        weight = self._dense
        if weight is None:
            weight = self.weight
            if not is_traced(x):
                name = type(self).__name__
                warnings.warn(f"{name} computes densely: {self._why_dense}", stacklevel=3)
                self._dense = weight
        y = self._compute_densely(x, weight, self.bias)
        y = y if more is None else y + more
        return y.relu() if self.relu else y

    def _fill(self, layer: Dense) -> Dense:
        """Give a dense layer this one's weight and bias."""
        layer.weight = nn.Parameter(self.weight)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.clone())
        return layer.train(self.training)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._forget()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _MADE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()


class SparseLinear(SparseLayer):
    """An ``nn.Linear`` on the non-zeros of its weight.

    Args:
        layer: the dense layer; it is copied, not changed.
        relu: whether a ReLU follows, as part of this layer.

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
        super().__init__(layer, Shape(layer.in_features, layer.out_features), relu=relu)
        self.in_features = layer.in_features
        self.out_features = layer.out_features

    def to_dense(self) -> nn.Linear:
        """An ``nn.Linear`` of the same weight; a ReLU that is part of this layer is not of it."""
        return self._fill(nn.Linear(self.in_features, self.out_features, self.bias is not None))

    def _check(self, shape: torch.Size) -> None:
        if shape[-1:] != (self.shape.in_channels,):
            raise ValueError(
                f"expected an input of {self.shape.in_channels} features, got {tuple(shape)}"
            )

    def _prepare(self, shape: torch.Size) -> Call:
        count = shape[:-1].numel()
        if count <= _FEW_ROWS:
            plan = self._plan((1,), lambda: rows(self.shape, self._weight, self.relu))
        else:  # one plan serves all counts of rows that take as many vectors
            images = min(_MANY_ROWS, -(-count // 16) * 16)
            plan = self._plan(
                (images,), lambda: convolution(self.shape, self._weight, 1, 1, images, self.relu)
            )
        return Call(plan, count, (*shape[:-1], self.shape.out_channels))

    def _compute_densely(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)


class SparseConv2d(SparseLayer):
    """An ``nn.Conv2d`` on the non-zeros of its weight.

    Stride, padding, dilation and groups are as torch has them. The input may have any memory
    format; the output is contiguous.

    Args:
        layer: the dense layer; it is copied, not changed.
        relu: whether a ReLU follows, as part of this layer.

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
        kernel, stride = _pair(layer.kernel_size), _pair(layer.stride)
        dilation = _pair(layer.dilation)
        # What the kernel pads itself is zeros; other borders are copied around the input before.
        top, left, bottom, right = around = _padding(layer.padding, kernel, dilation)
        is_zeros = layer.padding_mode == "zeros"
        padding = around if is_zeros else (0, 0, 0, 0)
        shape = Shape(
            *(layer.in_channels, layer.out_channels, kernel, stride),
            *(padding, dilation, layer.groups),
        )
        super().__init__(layer, shape, relu=relu)
        self.in_channels = layer.in_channels
        self.out_channels = layer.out_channels
        self.padding = layer.padding
        self.padding_mode = layer.padding_mode
        self._border = None if is_zeros else (left, right, top, bottom)

    def to_dense(self) -> nn.Conv2d:
        """An ``nn.Conv2d`` of the same weight; a ReLU that is part of this layer is not of it."""
        return self._fill(nn.Conv2d(self.in_channels, self.out_channels, **self._options()))

    def forward(self, x: Tensor, more: Tensor | float | None = None) -> Tensor:
        if self._border is not None:
            x = functional.pad(x, self._border, self.padding_mode)
        return super().forward(x, more)

    def _check(self, shape: torch.Size) -> None:
        if len(shape) not in (3, 4) or shape[-3] != self.shape.in_channels:
            raise ValueError(
                f"expected images of {self.shape.in_channels} channels, got {tuple(shape)}"
            )

    def _prepare(self, shape: torch.Size) -> Call:
        images, height, width = shape[:-3].numel(), *shape[-2:]
        plan = self._plan(
            (images, height, width),
            lambda: convolution(self.shape, self._weight, height, width, images, self.relu),
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

    def _shaped(self, weight: Tensor) -> Tensor:
        return weight.view(len(weight), -1, *self.shape.kernel)

    def _compute_densely(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shape = self.shape
        top, left, bottom, right = shape.padding
        x = functional.pad(x, (left, right, top, bottom))
        return functional.conv2d(x, weight, bias, shape.stride, 0, shape.dilation, shape.groups)


def _pair(numbers: tuple[int, ...]) -> tuple[int, int]:
    first, second = numbers
    return first, second


def _padding(
    padding: tuple[int, ...] | str, kernel: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Zeros on the top, left, bottom and right, as torch has them."""
    if padding == "valid":
        return 0, 0, 0, 0
    if padding == "same":  # an odd number has one more behind
        whole = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        top, left = whole[0] // 2, whole[1] // 2
        return top, left, whole[0] - top, whole[1] - left
    top, left = _pair(cast("tuple[int, ...]", padding))
    return top, left, top, left
