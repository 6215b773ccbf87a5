"""Element types of a file: names, sizes, and the bit patterns that count as zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The numpy dtype that carries elements of each size. Values are only copied, bit by bit.
_CARRIERS: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
    16: np.complex128,
}


@dataclass(frozen=True)
class DType:
    """A torch dtype and its representation in files.

    Args:
        name: the name in safetensors; ``C32`` and ``C128`` are additions of pdecay.
        torch: the torch dtype.
        sign: the sign bits. An element is zero if all its other bits are zero.
        stored_as: the safetensors dtype of the values in a sparse file: the same for dtypes that
            every safetensors reader knows, an unsigned integer for others.
        packed: how many safetensors elements one torch element holds.
    """

    name: str
    torch: torch.dtype
    sign: int
    stored_as: str
    packed: int = 1

    @property
    def itemsize(self) -> int:
        return self.torch.itemsize

    @property
    def carrier(self) -> np.dtype[Any]:
        return np.dtype(_CARRIERS[self.itemsize])

    def nonzero(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask of the elements that are neither 0.0 nor -0.0.

        The test is on bits: with ``torch.set_flush_denormal``, a comparison with 0.0 would take
        denormal numbers for zeros.
        """
        words = values.view(np.dtype(f"u{min(self.itemsize, 8)}"))
        all_bits = (1 << 8 * words.itemsize) - 1
        nonzero: NDArray[np.bool_] = (words & words.dtype.type(~self.sign & all_bits)) != 0
        if len(words) > len(values):  # complex128: two words per element
            nonzero = np.any(nonzero.reshape(-1, 2), axis=1)
        return nonzero


def _dtypes() -> tuple[DType, ...]:
    plain = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
    plain |= {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
    plain |= {"BOOL": torch.bool}
    return (
        *(DType(name, dtype, 0, name) for name, dtype in plain.items()),
        DType("F64", torch.float64, 1 << 63, "F64"),
        DType("F32", torch.float32, 1 << 31, "F32"),
        DType("F16", torch.float16, 1 << 15, "F16"),
        DType("BF16", torch.bfloat16, 1 << 15, "BF16"),
        DType("F8_E4M3", torch.float8_e4m3fn, 1 << 7, "U8"),
        DType("F8_E5M2", torch.float8_e5m2, 1 << 7, "U8"),
        # These have no negative zero: its bits are a NaN, or there is no sign bit.
        DType("F8_E4M3FNUZ", torch.float8_e4m3fnuz, 0, "U8"),
        DType("F8_E5M2FNUZ", torch.float8_e5m2fnuz, 0, "U8"),
        DType("C32", torch.complex32, 1 << 31 | 1 << 15, "U32"),
        DType("C64", torch.complex64, 1 << 63 | 1 << 31, "U64"),
        DType("C128", torch.complex128, 1 << 63, "U64"),
        *_newest(),
    )


def _newest() -> Iterator[DType]:
    if hasattr(torch, "float8_e8m0fnu"):  # from torch 2.7 on
        yield DType("F8_E8M0", torch.float8_e8m0fnu, 0, "U8")
    if hasattr(torch, "float4_e2m1fn_x2"):  # from torch 2.8 on
        # Two numbers per byte; the byte is treated as one element.
        yield DType("F4", torch.float4_e2m1fn_x2, 0, "U8", packed=2)


BY_NAME = {dtype.name: dtype for dtype in _dtypes()}
BY_TORCH = {dtype.torch: dtype for dtype in _dtypes()}


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Return the elements in row-major order as bit patterns, without a copy if contiguous."""
    if not tensor.numel():
        return np.empty(0, BY_TORCH[tensor.dtype].carrier)
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # reshape(-1) keeps the stride of one element
    array: NDArray[Any] = flat.view(torch.uint8).numpy().view(BY_TORCH[tensor.dtype].carrier)
    return array
