"""The kernels of bridge.c in Python and numpy, for machines without a C compiler.

They do the same arithmetic and are the reference that the tests compare the C code with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from pdecay.sklearn._terms import Floats, Terms

Indices = NDArray[np.int64]
Singles = NDArray[np.float32]

_MOST_STEPS = 100
_STEP_LIMIT = 1e-9


class PythonKernels:
    """Coordinate descent in Python; the methods are those of :class:`CompiledKernels`."""

    def prox(self, terms: Terms, x: Floats, t: Floats, start: Floats | None = None) -> Floats:
        """Return ``argmin_u t * R(u) + (u - x)^2 / 2`` elementwise; `start` has guesses of it."""
        guesses = np.zeros_like(x) if start is None else np.abs(start)
        rows = zip(x.tolist(), t.tolist(), guesses.tolist(), strict=True)
        return np.array([math.copysign(prox(terms, abs(a), b, guess), a) for a, b, guess in rows])

    def steps(self, terms: Terms, norms: Floats, cut: Floats, w: Floats, q: Floats) -> Floats:
        """Return ``sqrt(norm) * |change|`` of one coordinate step, for each coordinate."""
        with np.errstate(divide="ignore", invalid="ignore"):
            x = w + q / norms
        result = np.where(norms > 0, np.sqrt(norms) * np.abs(w), 0.0)
        for j in np.flatnonzero((np.abs(x) > cut) & (norms > 0)):
            new = _minimiser(terms, x[j], norms[j], cut[j], w[j])
            result[j] = math.sqrt(norms[j]) * abs(new - w[j])
        return result

    def gram(
        self, terms: Terms, gram: Floats, cut: Floats, w: Floats, q: Floats,
        sweeps: int, tol: float,
    ) -> tuple[int, float]:  # fmt: skip
        """Run sweeps with ``q = X' r``; return their number and the largest last step."""
        norms = np.diagonal(gram)
        largest = 0.0
        for sweep in range(1, sweeps + 1):
            largest = 0.0
            for j in np.flatnonzero(norms > 0):
                x = w[j] + q[j] / norms[j]
                change = _minimiser(terms, x, norms[j], cut[j], w[j]) - w[j]
                if change:
                    w[j] += change
                    q -= change * gram[j]
                    largest = max(largest, math.sqrt(norms[j]) * abs(change))
            if largest <= tol:
                return sweep, largest
        return sweeps, largest

    def dense(
        self, terms: Terms, x: Floats, columns: Indices, norms: Floats, cut: Floats, w: Floats,
        r: Floats, sweeps: int, tol: float,
    ) -> tuple[int, float]:  # fmt: skip
        """Run sweeps over `columns` with the residual r; return their number and the last step."""
        largest = 0.0
        for sweep in range(1, sweeps + 1):
            largest = 0.0
            for j in columns[norms[columns] > 0]:
                step = w[j] + x[:, j] @ r / norms[j]
                change = _minimiser(terms, step, norms[j], cut[j], w[j]) - w[j]
                if change:
                    w[j] += change
                    r -= change * x[:, j]
                    largest = max(largest, math.sqrt(norms[j]) * abs(change))
            if largest <= tol:
                return sweep, largest
        return sweeps, largest

    def sparse(
        self, terms: Terms, x: Any, means: Floats, total: float, columns: Indices, norms: Floats,
        cut: Floats, w: Floats, r: Floats, shift: Floats, sweeps: int, tol: float,
    ) -> tuple[int, float]:  # fmt: skip
        """Run sweeps on a CSC matrix with column means; `shift` is part of the residual."""
        largest = 0.0
        for sweep in range(1, sweeps + 1):
            largest = 0.0
            for j in columns[norms[columns] > 0]:
                part = slice(x.indptr[j], x.indptr[j + 1])
                rows, values = x.indices[part], x.data[part]
                q = values @ r[rows] + shift[0] * means[j] * total
                change = _minimiser(terms, w[j] + q / norms[j], norms[j], cut[j], w[j]) - w[j]
                if change:
                    w[j] += change
                    r[rows] -= change * values
                    shift[0] += change * means[j]
                    largest = max(largest, math.sqrt(norms[j]) * abs(change))
            if largest <= tol:
                return sweep, largest
        return sweeps, largest

    def sparse_products(self, x: Any, values: Floats, r: Floats) -> Floats:
        """Return ``S' r`` for a CSC matrix S with the structure of x and other values."""
        return np.asarray(sparse.csc_array((values, x.indices, x.indptr), shape=x.shape).T @ r)

    def sparse_gram(self, x: Any, rows: Indices, columns: Indices) -> Floats:
        """Return the inner products of two lists of columns of a CSC matrix."""
        return np.asarray((x[:, rows].T @ x[:, columns]).toarray())

    def scale(self, x: Floats, roots: Floats, means: Floats | None) -> tuple[Floats, Floats]:
        """Return ``diag(roots) (X - means)`` in column order and its squared column norms."""
        scaled: Floats = np.empty(x.shape, order="F")
        np.subtract(x, 0.0 if means is None else means, out=scaled)
        scaled *= roots[:, None]
        return scaled, np.einsum("ij,ij->j", scaled, scaled)

    def through(self, x: Floats, t: Floats, base: Floats, weights: Floats) -> tuple[Floats, Floats]:
        """Return ``u = X' t`` and ``X (base + weights * u)``."""
        u = x.T @ t
        return u, x @ (base + weights * u)

    def pack(self, x: Floats, factor: float) -> Any:
        """Return ``factor * X`` for the three methods below, with a relative error of 0.4 %."""
        return (factor * x).astype(np.float32)

    def packed_times(self, x: Any, w: Singles) -> Singles:
        """Return ``X w``."""
        return np.asarray(x @ w)

    def packed_correlate(self, x: Any, r: Singles) -> Singles:
        """Return ``X' r``."""
        return np.asarray(x.T @ r)

    def packed_columns(self, x: Any, indices: Indices) -> Singles:
        """Return some columns of a packed X, in column order."""
        return np.asfortranarray(x[:, indices])

    def solve(
        self, x: Any, weights: Singles, inverse: Inverse, right: Singles, accuracy: float, most: int
    ) -> tuple[Singles, Singles, bool]:
        """Solve a system as :func:`conjugate_gradients` does, with a packed X."""

        def product(u: Singles) -> tuple[Singles, Singles]:
            sums = x.T @ u
            return x @ (weights * sums), sums

        return conjugate_gradients(product, inverse, right, accuracy, most)


class Inverse(NamedTuple):
    """The approximate inverse ``(I - H K H') / rest`` of the matrix of a linear system."""

    h: Singles  # in column order
    k: Singles
    rest: float


def conjugate_gradients(
    product: Callable[[Any], tuple[Any, Any]],
    inverse: Inverse,
    right: Any,
    accuracy: float,
    most: int,
) -> tuple[Any, Any, bool]:
    """Solve ``(I + X diag(weights) X') x = right`` by preconditioned conjugate gradients.

    Args:
        product: returns ``X diag(weights) X' u`` and ``X' u``.
        inverse: the preconditioner.
        right: the right side.
        accuracy: the largest norm of the residual.
        most: the largest number of iterations.

    Returns:
        The solution x, ``X' x`` and whether the residual is small enough.
    """
    r, x, products = right, np.zeros_like(right), None
    direction, before = np.zeros_like(right), np.inf
    for _ in range(most):
        z = (r - inverse.h @ (inverse.k @ (inverse.h.T @ r))) / np.float32(inverse.rest)
        size = float(r @ z)
        if not size > 0:  # rounding errors, or overflow
            break
        direction = z + np.float32(size / before) * direction
        before = size
        image, sums = product(direction)
        image = image + direction
        length = np.float32(size / (float(direction @ image) or 1.0))
        x = x + length * direction
        products = length * sums if products is None else products + length * sums
        r = r - length * image
        if float(np.linalg.norm(r)) <= accuracy:
            return x, products, True
    return x, product(x)[1] if products is None else products, False


def _minimiser(terms: Terms, x: float, norm: float, cut: float, w: float) -> float:
    size = abs(float(x))
    if size <= cut:
        return 0.0
    return math.copysign(prox(terms, size, 1 / float(norm), abs(float(w))), x)


def prox(terms: Terms, x: float, t: float, start: float) -> float:
    """Return ``argmin_u t * R(u) + (u - x)^2 / 2`` for x >= 0; `start` is a guess of it."""
    scale, gain = t / (1 + t * terms.l2), 0.5
    x = (x - t * terms.l1) / (1 + t * terms.l2)
    if not x > 0:
        return 0.0
    u = x
    if len(terms.p) > 1:
        u, gain = _largest_root(terms, x, scale, start)
        if gain <= 0:
            return 0.0
    elif len(terms.p):
        p, lam = float(terms.p[0]), float(terms.lam[0]) * scale
        if p < 1:
            a = lam / x * x ** (p - 1)
            if not a < terms.limit:
                return 0.0
            u = x * _root_below_1(a, p, terms.ratio, start / x)
        else:
            u, _ = _largest_root(terms, x, scale, start)
        r = u / x
        gain = r * (1 - r / 2 - (1 - r) / p)
    if terms.l0 and not x * math.sqrt(2 * max(gain, 0.0)) > math.sqrt(2 * terms.l0 * scale):
        return 0.0
    return min(u, x) if u >= np.finfo(float).smallest_normal else 0.0


def _root_below_1(a: float, p: float, ratio: float, r: float) -> float:
    """Return the larger root of ``r + a * r^(p-1) = 1``, whose left side is convex."""
    if not ratio <= r <= 1:
        r = 1.0
    for _ in range(_MOST_STEPS):
        power = a * r ** (p - 1)
        step = r * (r + power - 1) / (r + (p - 1) * power)
        r -= step
        if abs(step) <= _STEP_LIMIT * r:
            break
    return r


def _largest_root(terms: Terms, x: float, scale: float, start: float) -> tuple[float, float]:
    """Return the largest u with ``u + sum_k lam_k * u^(p_k - 1) = x``, or 0, and its gain.

    Newton's method in log u, in which the logarithm of the left side is convex. The gain is the
    decrease of the objective from u = 0 in units of x^2.
    """
    pairs = [(p - 1, lam * scale) for p, lam in zip(terms.p.tolist(), terms.lam, strict=True)]
    with np.errstate(over="ignore"):  # near p = 1; x is the bound then
        most = min([x, *(float((x / lam) ** (1 / q)) for q, lam in pairs if q > 0)])
    t, gain = (start / most if 0 < start < most else 1.0), 0.0
    for _ in range(_MOST_STEPS):
        r = most / x * t
        powers = [(q, lam / x * (most * t) ** q) for q, lam in pairs]
        total = r + sum(power for _, power in powers)
        slope = r + sum(q * power for q, power in powers)
        gain = r * (1 - r / 2 - sum(power / (q + 1) for q, power in powers))
        if not slope > 0:
            if t == 1 or start <= 0:
                return 0.0, gain
            t, start = 1.0, 0.0  # the start was left of the root: begin again at the right
            continue
        before, t = t, min(t * math.exp(min(-total / slope * math.log(total), 700.0)), 1.0)
        if abs(t - before) <= _STEP_LIMIT * t:
            break
    return most * t, gain
