"""Passes over single-precision tensors on the CPU, in C (``ranking.c``).

Each function needs tensors for which :func:`supports` is true. The C functions run on all threads
and allocate nothing but histograms.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pdecay._core.tensors import is_tracing
from pdecay._native.build import KernelUnavailable, load

# Weights without any gradient rank first, by magnitude. In float32 their scores do not underflow.
SMALLEST_SQUARE = 1e-36
# C writes to memory of this kind, whatever the user's default dtype and default device are.
_INT64: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}


def supports(*tensors: Tensor) -> bool:
    """Check that these are contiguous float32 tensors on the CPU, and that C is available."""
    return (
        all(
            type(x) in (Tensor, torch.nn.Parameter)
            and x.is_cpu
            and x.dtype == torch.float32
            and x.layout is torch.strided
            and x.is_contiguous()
            and not x.is_neg()
            and not x._is_zerotensor()
            for x in tensors
        )
        and len({x.numel() for x in tensors}) == 1
        and not is_tracing()
        and _library() is not None
    )


def scores_(result: Tensor, weight: Tensor, squares: Tensor) -> None:
    """Write ``|w| * v^(1/4)``, with v of at least `SMALLEST_SQUARE`; 0 for zero weights."""
    pointers = (weight.data_ptr(), squares.data_ptr(), result.data_ptr())
    _call("pdecay_scores", *pointers, weight.numel(), SMALLEST_SQUARE, torch.get_num_threads())


def histogram(
    ranked: Tensor,
    prefix: int,
    known: int,
    shift: int,
    squares: Tensor | None = None,
    every: int = 1,
) -> Tensor:
    """Count each digit ``pattern >> shift`` of the patterns with ``pattern >> known == prefix``.

    With `squares`, these are the patterns of the scores of :func:`scores_`, which are not stored.
    With `every`, a sample is counted: the first of so many blocks of 4096 numbers.
    """
    counts = torch.zeros(1 << (known - shift), **_INT64)
    where = (ranked.data_ptr(), *_second(squares), ranked.numel())
    threads = torch.get_num_threads()
    if _call("pdecay_histogram", *where, every, prefix, known, shift, counts.data_ptr(), threads):
        raise MemoryError("no memory for a histogram of the weights")
    return counts


def between(
    tensors: Sequence[Tensor], squares: Sequence[Tensor | None], low: int, high: int, capacity: int
) -> tuple[Tensor, int] | None:
    """Return the magnitudes or scores with patterns from `low` to `high`, and the number below.

    Return None if there are more than `capacity`.
    """
    selected = torch.empty(capacity, dtype=torch.float32, device="cpu")
    inside, below = torch.zeros(1, **_INT64), torch.zeros(1, **_INT64)
    for tensor, square in zip(tensors, squares, strict=True):
        where = (tensor.data_ptr(), *_second(square), tensor.numel(), low, high)
        memory = (selected.data_ptr(), capacity, inside.data_ptr(), below.data_ptr())
        _call("pdecay_between", *where, *memory, torch.get_num_threads())
    found = int(inside)
    return (selected[:found], int(below)) if found <= capacity else None


def zero_(
    weight: Tensor, ranked: Tensor, pattern: int, tied: int, squares: Tensor | None = None
) -> int:
    """Zero weights ranked below a pattern, and the first `tied` equal to it; count the latter."""
    where = (weight.data_ptr(), ranked.data_ptr(), *_second(squares), weight.numel())
    equal = _call("pdecay_zero", *where, pattern, tied, torch.get_num_threads())
    increment_version([weight])
    return equal


def _second(squares: Tensor | None) -> tuple[int | None, float]:
    return None if squares is None else squares.data_ptr(), SMALLEST_SQUARE


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = load("ranking")
    except KernelUnavailable:
        return None  # torch's own operations give the same result
    kinds = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "u": ctypes.c_uint32}
    kinds["f"] = ctypes.c_float
    signatures = {
        "scores": "pppnfi",
        "histogram": "ppfnnuiipi",
        "between": "ppfnuupnppi",
        "zero": "pppfnuni",
    }
    for name, letters in signatures.items():
        getattr(library, f"pdecay_{name}").argtypes = [kinds[letter] for letter in letters]
    library.pdecay_zero.restype = ctypes.c_int64
    for name in ("between", "scores"):
        getattr(library, f"pdecay_{name}").restype = None
    return library


def _call(name: str, *arguments: float | None) -> int:
    return int(getattr(_library(), name)(*arguments) or 0)
