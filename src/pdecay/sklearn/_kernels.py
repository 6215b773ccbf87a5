"""The coordinate-descent kernels: bridge.c through ctypes, or Python where it cannot be built."""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any

import numpy as np

from pdecay._native.build import KernelUnavailable, load
from pdecay.sklearn._python_kernels import Indices, PythonKernels, Singles
from pdecay.sklearn._terms import Floats, Terms


@functools.cache
def kernels() -> PythonKernels:
    """Return the compiled kernels, or the Python ones with a warning if they cannot be built."""
    try:
        return CompiledKernels()
    except KernelUnavailable as reason:
        warnings.warn(
            f"pdecay.sklearn runs its solver in Python, which is much slower: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return PythonKernels()


class CompiledKernels(PythonKernels):
    """Coordinate descent in C. The arguments and results are those of :class:`PythonKernels`."""

    def __init__(self) -> None:
        self._library = load("bridge", threads=False)
        for name in ("bridge_gram", "bridge_dense", "bridge_sparse"):
            getattr(self._library, name).restype = ctypes.c_int64
        for name in ("bridge_prox", "bridge_steps", "bridge_product"):
            getattr(self._library, name).restype = None

    def prox(self, terms: Terms, x: Floats, t: Floats) -> Floats:
        result = np.empty_like(x)
        self._library.bridge_prox(_int(len(x)), _of(x), _of(t), _penalty(terms), _of(result))
        return result

    def steps(self, terms: Terms, norms: Floats, cut: Floats, w: Floats, q: Floats) -> Floats:
        result = np.empty_like(w)
        self._library.bridge_steps(
            _int(len(w)), _of(norms), _of(cut), _penalty(terms), _of(w), _of(q), _of(result)
        )
        return result

    def gram(
        self, terms: Terms, gram: Floats, cut: Floats, w: Floats, q: Floats,
        sweeps: int, tol: float,
    ) -> tuple[int, float]:  # fmt: skip
        largest = ctypes.c_double()
        stride = gram.strides[0] // gram.itemsize
        done = self._library.bridge_gram(
            _int(len(w)), _int(stride), ctypes.c_void_p(gram.ctypes.data), _of(cut),
            _penalty(terms), _of(w), _of(q), _int(sweeps), ctypes.c_double(tol),
            ctypes.byref(largest),
        )  # fmt: skip
        return int(done), largest.value

    def dense(
        self, terms: Terms, x: Floats, columns: Indices, norms: Floats, cut: Floats, w: Floats,
        r: Floats, sweeps: int, tol: float,
    ) -> tuple[int, float]:  # fmt: skip
        largest = ctypes.c_double()
        done = self._library.bridge_dense(
            _int(len(r)), _of(x, "F"), _int(len(columns)), _of(columns), _of(norms), _of(cut),
            _penalty(terms), _of(w), _of(r), _int(sweeps), ctypes.c_double(tol),
            ctypes.byref(largest),
        )  # fmt: skip
        return int(done), largest.value

    def sparse(
        self, terms: Terms, x: Any, means: Floats, total: float, columns: Indices, norms: Floats,
        cut: Floats, w: Floats, r: Floats, shift: Floats, sweeps: int, tol: float,
    ) -> tuple[int, float]:  # fmt: skip
        largest = ctypes.c_double()
        done = self._library.bridge_sparse(
            _of(x.data), _of(x.indices), _of(x.indptr), _of(means), ctypes.c_double(total),
            _int(len(columns)), _of(columns), _of(norms), _of(cut), _penalty(terms), _of(w),
            _of(r), _of(shift), _int(sweeps), ctypes.c_double(tol), ctypes.byref(largest),
        )  # fmt: skip
        return int(done), largest.value

    def product(self, x: Singles, weights: Singles, u: Singles) -> tuple[Singles, Singles]:
        result, sums = np.empty_like(u), np.empty_like(weights)
        self._library.bridge_product(
            _int(x.shape[0]), _int(x.shape[1]), _of(x, "F"), _of(weights), _of(u), _of(sums),
            _of(result),
        )  # fmt: skip
        return result, sums


def _penalty(terms: Terms) -> Any:
    return ctypes.byref(terms.as_c)


def _int(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def _of(array: Any, order: str = "C") -> ctypes.c_void_p:
    """Return the address of a contiguous array."""
    if not array.flags[f"{order}_CONTIGUOUS"]:
        raise ValueError(f"the kernels need a contiguous array ({order} order)")
    return ctypes.c_void_p(array.ctypes.data)
