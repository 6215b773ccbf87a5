"""The geometry of a sparse layer, and its weight in compressed sparse rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """The geometry of a layer; padding is (top, left, bottom, right)."""

    in_channels: int
    out_channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def __post_init__(self) -> None:
        # The kernel trusts the plan, and torch's layers check these numbers only when they run.
        for name, least in (("stride", 1), ("dilation", 1), ("padding", 0)):
            for number in getattr(self, name):
                if not isinstance(number, int) or not least <= number < 2**31:
                    raise ValueError(f"{name} must be integers from {least} on, got {number!r}")

    @property
    def weights(self) -> int:
        """The number of weights, zeros included."""
        return self.out_channels * (self.in_channels // self.groups) * math.prod(self.kernel)

    def output(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the output."""
        top, left, bottom, right = self.padding
        extent = [self.dilation[i] * (self.kernel[i] - 1) + 1 for i in (0, 1)]
        out_height = (height + top + bottom - extent[0]) // self.stride[0] + 1
        out_width = (width + left + right - extent[1]) // self.stride[1] + 1
        if out_height < 1 or out_width < 1:
            raise ValueError(
                f"the kernel covers {extent[0]} x {extent[1]} pixels, more than the padded input "
                f"of {height + top + bottom} x {width + left + right}"
            )
        return out_height, out_width


@dataclass(frozen=True)
class NonZeros:
    """A layer's weight in compressed sparse rows, one row per output.

    Args:
        values: the non-zeros.
        columns: their indices in the flattened weight of an output (int32).
        row: the index of each output's first non-zero, and the total number at the end (int64).
        bias: one number per output.
    """

    values: Tensor
    columns: Tensor
    row: Tensor
    bias: Tensor
