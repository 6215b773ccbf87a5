"""The base class of sparse layers: storage of the non-zeros, kernel calls and dense fallback.

Sparse layers are for inference on the CPU, in float32 or float64. They store and multiply only the
non-zeros of their weight. A zero weight never reads its input, so that an infinite or NaN input
does not turn into NaN there, as in a dense layer.

The kernel is plain C, compiled at first use (see ``pdecay._native``). The layers compute densely,
with the same result, if there is no compiler, if their buffers are replaced
(``torch.func.functional_call``), and while torch traces, compiles or transforms the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from pdecay._core.validation import check_flag
from pdecay.deployment.layers import kernel
from pdecay.deployment.layers.kernel import Call, Plan, is_traced
from pdecay.deployment.layers.shapes import NonZeros, Shape
from pdecay.deployment.model.state import total_nbytes

_DTYPES = (torch.float32, torch.float64)
_MAX_PLANS = 16  # cached plans per layer
_MAX_SHAPES = 64  # cached input shapes per layer
# Attributes derived from the buffers; they are not pickled.
_DERIVED = (
    *("_dtype", "_weight", "_prepared", "_versions", "_addresses"),
    *("_calls", "_plans", "_dense", "_why_dense"),
)

Dense = TypeVar("Dense", nn.Linear, nn.Conv2d)


def why_not(layer: nn.Linear | nn.Conv2d) -> str | None:
    """Return why a layer cannot be made sparse, in a few words; None if it can."""
    count = layer.weight.numel()
    return f"of {count} weights" if count == 0 or count >= 2**31 else _no_kernel(layer.weight)


def _no_kernel(weight: Tensor) -> str | None:
    """Return why the kernel cannot use such a weight; None if it can."""
    if weight.dtype not in _DTYPES:
        return f"of dtype {str(weight.dtype).removeprefix('torch.')}"
    if weight.device.type != "cpu" or weight.layout != torch.strided:
        return f"on device {weight.device.type}, {weight.layout}"
    return kernel.available()


class SparseLayer(nn.Module):
    """Base class of sparse layers. It stores the non-zeros and caches a plan per input size.

    Buffers (compressed sparse rows): ``values``, the non-zeros; ``columns``, their indices in the
    flattened weight of an output; ``row``, the start of each output's non-zeros; ``bias``, if any.
    To change the weights, convert the layer with ``to_dense`` first. The layer notices buffers that
    are replaced or changed in place, except changes through ``.data``.

    Args:
        layer: the dense layer; it is copied, not changed.
        shape: its geometry.
        relu: whether to apply a ReLU to the output.
    """

    takes_sums = True  # `forward` takes a tensor to add, and a ReLU

    values: Tensor
    columns: Tensor
    row: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear | nn.Conv2d, shape: Shape, *, relu: bool) -> None:
        super().__init__()
        check_flag("relu", relu)
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
        self._reset()

    @property
    def sparsity(self) -> float:
        """The fraction of zeros in the weight."""
        return 1 - len(self.values) / self.shape.weights

    @property
    def nbytes(self) -> int:
        """The bytes of the buffers and of the cached plans."""
        arrays = (array for plan in self._plans.values() for array in plan.arrays.values())
        return total_nbytes((*self.buffers(), *arrays))

    @property
    def weight(self) -> Tensor:
        """The dense weight, computed at each access, for code that reads ``layer.weight``."""
        # torch.repeat_interleave trusts counts whose sum overflows: it would write anywhere.
        checked = not is_traced(self.row) and not self.row.is_meta
        if checked and not self._are_slices(self.row, len(self.values)):
            raise self._damaged()
        indices = torch.arange(self.shape.out_channels, device=self.row.device)
        # Without output_size, which ONNX export does not support.
        outputs = torch.repeat_interleave(indices, self.row.diff())
        columns = self.shape.weights // self.shape.out_channels
        zeros = self.values.new_zeros(self.shape.out_channels, columns)
        return self._reshape_weight(zeros.index_put((outputs, self.columns.long()), self.values))

    def enable_relu(self) -> None:
        """Apply a ReLU to the output from now on."""
        self.relu = True
        self._reset()

    def extra_repr(self) -> str:
        text = f"{self.shape.in_channels}, {self.shape.out_channels}, "
        text += "".join(f"{name}={value}, " for name, value in self._options().items())
        text += "relu=True, " if self.relu else ""
        return f"{text}nonzeros={len(self.values)} ({self.sparsity:.1%} sparse)"

    def _options(self) -> dict[str, Any]:
        """Return the constructor arguments of the dense layer, except its sizes."""
        return {"bias": self.bias is not None}

    def _reshape_weight(self, weight: Tensor) -> Tensor:
        """Reshape a weight with one row per output to the shape of the dense layer."""
        return weight

    def forward(self, x: Tensor, more: Tensor | float | None = None, relu: bool = False) -> Tensor:
        """Return the output; `more`, if given, is added before the ReLU.

        With `relu`, this call applies a ReLU even if the layer has none.
        """
        # Keep this path short: a call may take only ten microseconds in total.
        if is_traced(x) or self._has_other_buffers():
            return self._forward_dense(x, more, relu)
        for buffer, version in self._versions:
            if buffer._version != version:  # it was changed in place
                self._reset()
                break
        for array, address in self._addresses:
            if array.data_ptr() != address:  # its memory was moved, and the old is freed
                self._reset()
                break
        call = self._calls.get(x.shape)
        if call is None or x.dtype is not self._dtype or x.requires_grad or not x.is_cpu:
            x = self._check_input(x)
            call = self._call(x.shape)
            if call is None:
                return self._forward_dense(x, more, relu)
        return call(x, more, relu)

    def _check_input(self, x: Tensor) -> Tensor:
        """Return the input in the kernel's dtype; raise if the kernel cannot use it."""
        name = type(self).__name__
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} computes no gradients, but its input requires one: call the model in "
                "torch.inference_mode(), or train the dense model"
            )
        if x.is_cpu and x.is_floating_point() and torch.is_autocast_enabled("cpu"):
            return x.to(self._dtype)  # half-precision input under autocast
        if x.dtype is not self._dtype or x.device != self.values.device:
            raise ValueError(
                f"{name} takes {self._dtype} on {self.values.device}, got {x.dtype} on {x.device}: "
                "convert the input, or deploy the model in that dtype"
            )
        return x

    def _call(self, shape: torch.Size) -> Call | None:
        """Return the kernel call for an input shape; None if there is no kernel."""
        self._check_shape(shape)
        if self._why_dense is not None:
            return None
        call = self._calls.get(shape)
        if call is None:
            if len(self._calls) >= _MAX_SHAPES:
                self._calls.clear()
            self._check_buffers()
            with torch.device("cpu"):  # torch's default device may be another
                call = self._calls[shape] = self._prepare(shape)
        return call

    def _check_buffers(self) -> None:
        """Raise unless the buffers are consistent; else the kernel would read invalid memory.

        They may be inconsistent after ``to_empty`` or ``load_state_dict``.
        """
        columns, row = self._weight.columns, self._weight.row
        each = self.shape.weights // self.shape.out_channels
        if not (
            self._weight.bias.shape == (self.shape.out_channels,)
            and len(columns) == len(self._weight.values)
            and self._are_slices(row, len(columns))
            and bool(((columns >= 0) & (columns < each)).all())
        ):
            raise self._damaged()

    def _are_slices(self, row: Tensor, count: int) -> bool:
        """Return whether `row` cuts this many non-zeros into the slices of the outputs.

        Neighbours are compared, because their differences may overflow.
        """
        return (
            row.shape == (self.shape.out_channels + 1,)
            and int(row[0]) == 0
            and int(row[-1]) == count
            and bool((row[1:] >= row[:-1]).all())
        )

    def _damaged(self) -> ValueError:
        outputs = self.shape.out_channels
        return ValueError(
            f"the buffers of this {type(self).__name__} are not the non-zeros of a "
            f"{outputs} x {self.shape.weights // outputs} weight: load its state dict again"
        )

    def _check_shape(self, shape: torch.Size) -> None:
        """Raise unless the layer accepts inputs of this shape."""
        raise NotImplementedError

    def _prepare(self, shape: torch.Size) -> Call:
        """Return a new kernel call for an input shape."""
        raise NotImplementedError

    def _compute_dense(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _reset(self) -> None:
        """Recompute derived attributes after a change of the buffers."""
        self._dtype = self.values.dtype
        bias = self.values.new_zeros(self.shape.out_channels) if self.bias is None else self.bias
        # Convert for the kernel: load_state_dict(assign=True) may set other dtypes and strides.
        values, columns = kernel.in_memory(self.values), kernel.in_memory(self.columns.int())
        row, bias = kernel.in_memory(self.row.long()), kernel.in_memory(bias.to(self._dtype))
        self._weight = NonZeros(values, columns, row.clone(), bias.clone())
        # A tensor that is sent to another process moves to shared memory, but plans have addresses.
        # The values and columns are too large to copy, so that their addresses are compared.
        self._addresses = [
            (array, array.data_ptr()) for array in (values, columns) if type(array) is Tensor
        ]
        self._prepared = dict(self._buffers)
        # Tensors that were made in inference mode have no version.
        self._versions = [(one, one._version) for one in self.buffers() if not one.is_inference()]
        self._calls: dict[torch.Size, Call] = {}
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._dense: Tensor | None = None
        self._why_dense = _no_kernel(self.values)

    def _has_other_buffers(self) -> bool:
        """Return whether the buffers were replaced, as ``torch.func.functional_call`` does."""
        # Written out because it runs at each call; a loop takes twice as long.
        now, then = self._buffers, self._prepared
        return not (
            now["values"] is then["values"]
            and now["columns"] is then["columns"]
            and now["row"] is then["row"]
            and now["bias"] is then["bias"]
        )

    def _plan(self, key: tuple[int, ...], make: Callable[[], Plan]) -> Plan:
        """Return the cached plan of a key, or make it."""
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
                self._calls.clear()
            plan = self._plans[key] = make()
        return plan

    def _forward_dense(self, x: Tensor, more: Tensor | float | None, relu: bool) -> Tensor:
        weight = self._dense
        if weight is None or self._has_other_buffers():
            weight = self.weight
            if not is_traced(x) and not self._has_other_buffers():
                name = type(self).__name__
                warnings.warn(f"{name} computes densely: {self._why_dense}", stacklevel=3)
                self._dense = weight
        y = self._compute_dense(x, weight, self.bias)
        y = y if more is None else y + more
        return y.relu() if self.relu or relu else y

    def _fill(self, layer: Dense) -> Dense:
        """Set the weight and bias of a dense layer."""
        layer.weight = nn.Parameter(self.weight)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.clone())
        return layer.train(self.training)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._reset()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _DERIVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()
