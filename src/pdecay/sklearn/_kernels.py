"""The coordinate-descent kernels: bridge.c through ctypes, or Python where it cannot be built."""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdecay._native.build import KernelUnavailable, load
from pdecay.sklearn._python_kernels import Indices, Inverse, PythonKernels, Singles
from pdecay.sklearn._terms import Floats, Terms

_LINE = 16  # numbers of 32 bits in a cache line
_COLUMNS = 8  # columns that a kernel reads at a time


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
        for name in ("gram", "dense", "sparse", "solve"):
            getattr(self._library, f"bridge_{name}").restype = ctypes.c_int64
        for name in ("prox", "steps", "sparse_products", "sparse_gram"):
            getattr(self._library, f"bridge_{name}").restype = None
        for name in ("scale", "through", "pack", "packed", "columns"):
            getattr(self._library, f"bridge_{name}").restype = None

    def prox(self, terms: Terms, x: Floats, t: Floats, start: Floats | None = None) -> Floats:
        result = np.zeros_like(x) if start is None else start.copy()
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

    def sparse_products(self, x: Any, values: Floats, r: Floats) -> Floats:
        result = np.empty(x.shape[1])
        self._library.bridge_sparse_products(
            _int(x.shape[1]), _of(values), _of(x.indices), _of(x.indptr), _of(r), _of(result)
        )
        return result

    def sparse_gram(self, x: Any, rows: Indices, columns: Indices) -> Floats:
        work, gram = np.zeros(x.shape[0]), np.empty((len(rows), len(columns)))
        self._library.bridge_sparse_gram(
            _of(x.data), _of(x.indices), _of(x.indptr), _int(len(rows)), _of(rows),
            _int(len(columns)), _of(columns), _of(work), _of(gram),
        )  # fmt: skip
        return gram

    def scale(self, x: Floats, roots: Floats, means: Floats | None) -> tuple[Floats, Floats]:
        n, d = x.shape
        if not (x.flags.c_contiguous or x.flags.f_contiguous):
            x = np.asfortranarray(x)
        step, stride = (1, n) if x.flags.f_contiguous else (d, 1)
        scaled, norms = np.empty((n, d), order="F"), np.empty(d)
        self._library.bridge_scale(
            _int(n), _int(d), ctypes.c_void_p(x.ctypes.data), _int(step), _int(stride),
            _of(roots), None if means is None else _of(means), _of(scaled, "F"), _of(norms),
        )  # fmt: skip
        return scaled, norms

    def through(self, x: Floats, t: Floats, base: Floats, weights: Floats) -> tuple[Floats, Floats]:
        n, d = x.shape
        u, result = np.empty(d), np.empty(n)
        self._library.bridge_through(
            _int(n), _int(d), _of(x, "F"), _of(t), _of(base), _of(weights), _of(u), _of(result)
        )
        return u, result

    def pack(self, x: Floats, factor: float) -> Packed:
        n, d = x.shape
        rows, columns = -(-n // _LINE) * _LINE, -(-d // _COLUMNS) * _COLUMNS
        words, scales = _aligned_zeros(columns // 2 * rows, np.uint32), _aligned_zeros(columns)
        self._library.bridge_pack(
            _int(n), _int(d), _of(x, "F"), ctypes.c_double(factor), _int(rows), _of(words),
            _of(scales),
        )  # fmt: skip
        return Packed(words, scales, rows, columns, (n, d))

    def packed_times(self, x: Packed, w: Singles) -> Singles:
        result, sums = _aligned_zeros(x.rows), _padded(w, x.columns)
        ones = np.ones(x.columns, dtype=np.float32)
        self._library.bridge_packed(*_matrix(x), _of(ones), None, _of(sums), _of(result))
        return result[: x.shape[0]]

    def packed_correlate(self, x: Packed, r: Singles) -> Singles:
        sums, r = np.empty(x.columns, dtype=np.float32), _padded(r, x.rows)
        self._library.bridge_packed(*_matrix(x), None, _of(r), _of(sums), None)
        return sums[: x.shape[1]]

    def packed_columns(self, x: Packed, indices: Indices) -> Singles:
        result: Singles = np.empty((x.shape[0], len(indices)), dtype=np.float32, order="F")
        self._library.bridge_columns(
            _int(x.shape[0]), _int(x.rows), _of(x.words), _of(x.scales), _int(len(indices)),
            _of(indices), _of(result, "F"),
        )  # fmt: skip
        return result

    def solve(
        self, x: Packed, weights: Singles, inverse: Inverse, right: Singles, accuracy: float,
        most: int,
    ) -> tuple[Singles, Singles, bool]:  # fmt: skip
        (n, d), m = x.shape, len(inverse.k)
        weights, residual = _padded(weights, x.columns), _padded(right, x.rows)
        solution = _aligned_zeros(x.rows)
        products, work = _aligned_zeros(x.columns), _aligned_zeros(3 * x.rows + x.columns + m)
        done = self._library.bridge_solve(
            *_matrix(x), _of(weights), _int(n), _int(m), _of(inverse.h, "F"), _of(inverse.k),
            ctypes.c_double(inverse.rest), ctypes.c_double(accuracy), _int(most),
            _of(residual), _of(solution), _of(products), _of(work),
        )  # fmt: skip
        return solution[:n], products[:d], done >= 0


class Packed(NamedTuple):
    """A matrix with 16 bits for each number, padded with zeros to whole cache lines."""

    words: NDArray[np.uint32]
    scales: Singles  # of the columns
    rows: int
    columns: int
    shape: tuple[int, int]


def _aligned_zeros(count: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Return 32-bit zeros at the start of a cache line, which the kernels read faster."""
    buffer = np.zeros(count + _LINE, dtype=dtype)
    start = -buffer.ctypes.data % (4 * _LINE) // 4
    return buffer[start : start + count]


def _padded(values: Singles, count: int) -> Singles:
    result = _aligned_zeros(count)
    result[: len(values)] = values
    return result


def _matrix(x: Packed) -> tuple[Any, ...]:
    """Return the arguments for a packed matrix."""
    return _int(x.rows), _int(x.columns), _of(x.words), _of(x.scales)


def _penalty(terms: Terms) -> Any:
    return ctypes.byref(terms.as_c)


def _int(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def _of(array: Any, order: str = "C") -> ctypes.c_void_p:
    """Return the address of a contiguous array."""
    if not array.flags[f"{order}_CONTIGUOUS"]:
        raise ValueError(f"the kernels need a contiguous array ({order} order)")
    return ctypes.c_void_p(array.ctypes.data)
