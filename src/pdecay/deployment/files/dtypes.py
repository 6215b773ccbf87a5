"""The dtypes that a file can hold: their names, their bits, and which of them are a zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# What numpy moves for an element of so many bytes. Complex numbers are only moved, too: numpy
# copies them bit by bit.
_CARRIERS: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
    16: np.complex128,
}


@dataclass(frozen=True)
class DType:
    """One of torch's dtypes, as a file knows it.

    Args:
        name: safetensors' name; ``C32`` and ``C128`` are ours.
        torch: torch's dtype.
        sign: the bits that a zero may have, which are those of the signs.
        stored_as: the dtype of the values in a sparse file: the same for those that every reader
            of safetensors knows, else unsigned integers.
        packed: how many of safetensors' elements are one of torch's.
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
        """Where values are not zero, of either sign.

        Tested on the bits: with denormals flushed (``torch.set_flush_denormal``), the processor
        takes the smallest numbers for zeros.
        """
        words = values.view(np.dtype(f"u{min(self.itemsize, 8)}"))
        nonzero: NDArray[np.bool_] = (words & words.dtype.type(~self.sign & _all(words))) != 0
        if len(words) > len(values):  # numbers of two words
            nonzero = np.any(nonzero.reshape(-1, 2), axis=1)
        return nonzero


def _all(words: NDArray[Any]) -> int:
    return (1 << 8 * words.itemsize) - 1


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
        # These have one zero: the other one's bits are a NaN, or there is no sign.
        DType("F8_E4M3FNUZ", torch.float8_e4m3fnuz, 0, "U8"),
        DType("F8_E5M2FNUZ", torch.float8_e5m2fnuz, 0, "U8"),
        DType("F8_E8M0", torch.float8_e8m0fnu, 0, "U8"),
        # Two numbers in a byte: kept as it is.
        DType("F4", torch.float4_e2m1fn_x2, 0, "U8", packed=2),
        DType("C32", torch.complex32, 1 << 31 | 1 << 15, "U32"),
        DType("C64", torch.complex64, 1 << 63 | 1 << 31, "U64"),
        DType("C128", torch.complex128, 1 << 63, "U64"),
    )


BY_NAME = {dtype.name: dtype for dtype in _dtypes()}
BY_TORCH = {dtype.torch: dtype for dtype in _dtypes()}


def to_array(tensor: Tensor) -> NDArray[Any]:
    """A tensor's elements in row-major order, as bits; its own memory where that is contiguous."""
    if not tensor.numel():
        return np.empty(0, BY_TORCH[tensor.dtype].carrier)
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # reshape(-1) keeps the steps of one element
    array: NDArray[Any] = flat.view(torch.uint8).numpy().view(BY_TORCH[tensor.dtype].carrier)
    return array
