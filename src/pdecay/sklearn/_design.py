"""Design matrices: dense or sparse X with its rows scaled and its columns centred.

The solvers minimise ``||y - X w||^2 / 2 + R(w)``. Sample weights and the factor 1/n are part of X
and y: row i is multiplied by the root of its share of the total weight. The intercept is removed by
centring. A sparse X is centred implicitly, so that it stays sparse.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from pdecay.sklearn._kernels import kernels
from pdecay.sklearn._python_kernels import Indices, Inverse, Singles, conjugate_gradients
from pdecay.sklearn._terms import Floats, Terms


class DenseDesign:
    """A dense X, scaled and centred in a copy in column order.

    Args:
        x: the features, (n, d).
        roots: the square roots of the rows' weights.
        means: the vector to subtract from each row before scaling; None subtracts nothing.
    """

    def __init__(self, x: Floats, roots: Floats, means: Floats | None) -> None:
        self.shape: tuple[int, int] = (x.shape[0], x.shape[1])
        self.x, self.norms = kernels().scale(x, roots, means)
        _check_norms(self.norms)
        if means is not None:  # a constant column leaves the rounding errors of its mean
            error = max(1e-14, len(x) * float(np.finfo(np.float64).eps))
            self.norms[self.norms <= error**2 * means**2 * (roots @ roots)] = 0.0

    def correlate(self, r: Floats) -> Floats:
        """Return ``X' r``."""
        result: Floats = self.x.T @ r
        return result

    def residual(self, y: Floats, w: Floats) -> Floats:
        """Return ``y - X w``; the cost is that of the non-zero coefficients."""
        used = np.flatnonzero(w)
        if 2 * len(used) > len(w):
            return np.asarray(y - self.x @ w)
        return np.asarray(y - self.x[:, used] @ w[used])

    def gram(self, rows: Indices, columns: Indices) -> Floats:
        """Return the inner products of two lists of columns."""
        first = self.x[:, rows]
        # The product of a matrix with itself takes half the time.
        second = first if rows is columns else self.x[:, columns]
        return np.asarray(first.T @ second)

    def through(self, t: Floats, base: Floats, weights: Floats) -> tuple[Floats, Floats]:
        """Return ``u = X' t`` and ``X (base + weights * u)``, reading X once."""
        return kernels().through(self.x, t, base, weights)

    def rough(self, factor: float) -> RoughDense:
        """Return ``factor * X`` in lower precision."""
        return RoughDense(kernels().pack(self.x, factor))

    def outer(self, weights: Floats) -> Floats:
        """Return ``X diag(weights) X'``."""
        return np.asarray((self.x * weights) @ self.x.T)

    def descend(
        self, terms: Terms, columns: Indices, cut: Floats, w: Floats, r: Floats,
        sweeps: int, tol: float,
    ) -> tuple[int, float]:  # fmt: skip
        """Run coordinate descent over `columns`; update w and r in place."""
        return kernels().dense(terms, self.x, columns, self.norms, cut, w, r, sweeps, tol)


class SparseDesign:
    """A sparse X in CSC form; ``S - roots * means'`` with the scaled matrix S."""

    def __init__(self, x: Any, roots: Floats, means: Floats | None) -> None:
        if max(x.nnz, *x.shape) > np.iinfo(np.int32).max:
            raise ValueError(
                "a sparse X may have up to 2^31 - 1 rows, columns and entries, got shape "
                f"{x.shape} with {x.nnz} entries"
            )
        scaled = sparse.csc_array(x, dtype=np.float64, copy=True)
        scaled.sum_duplicates()
        scaled.data *= roots[scaled.indices]
        self.x = scaled
        self.x.indices = self.x.indices.astype(np.int32, copy=False)
        self.x.indptr = self.x.indptr.astype(np.int32, copy=False)
        self.roots = roots
        self.shape = self.x.shape
        self.means = np.zeros(self.shape[1]) if means is None else means
        self.total = float(roots @ roots)
        with np.errstate(over="ignore"):
            squares = self.x.data**2
        self.norms = kernels().sparse_products(self.x, squares, np.ones(self.shape[0]))
        _check_norms(self.norms)
        # Rounding must not make the norm of a constant column positive.
        before = self.norms.copy()
        self.norms -= self.total * self.means**2
        self.norms[self.norms <= 1e-14 * before] = 0.0

    def correlate(self, r: Floats) -> Floats:
        """Return ``X' r``."""
        products = kernels().sparse_products(self.x, self.x.data, r)
        return np.asarray(products - self.means * (self.roots @ r))

    def residual(self, y: Floats, w: Floats) -> Floats:
        """Return ``y - X w``."""
        return np.asarray(y - self.x @ w + self.roots * (self.means @ w))

    def gram(self, rows: Indices, columns: Indices) -> Floats:
        """Return the inner products of two lists of columns."""
        products = kernels().sparse_gram(self.x, rows, columns)
        return np.asarray(products - self.total * np.outer(self.means[rows], self.means[columns]))

    def through(self, t: Floats, base: Floats, weights: Floats) -> tuple[Floats, Floats]:
        """Return ``u = X' t`` and ``X (base + weights * u)``."""
        u = self.correlate(t)
        return u, -self.residual(np.zeros_like(t), base + weights * u)

    def rough(self, factor: float) -> RoughSparse:
        """Return ``factor * X`` in lower precision."""
        x = (self.x * factor).astype(np.float32)
        return RoughSparse(
            x, self.roots.astype(np.float32), (self.means * factor).astype(np.float32)
        )

    def outer(self, weights: Floats) -> Floats:
        """Return ``X diag(weights) X'``."""
        product = (self.x @ sparse.diags_array(weights) @ self.x.T).toarray()
        cross = np.outer(self.x @ (weights * self.means), self.roots)
        product -= cross + cross.T
        product += float(weights @ self.means**2) * np.outer(self.roots, self.roots)
        return np.asarray(product)

    def descend(
        self, terms: Terms, columns: Indices, cut: Floats, w: Floats, r: Floats,
        sweeps: int, tol: float,
    ) -> tuple[int, float]:  # fmt: skip
        """Run coordinate descent over `columns`; update w and r in place."""
        shift = np.zeros(1)
        done = kernels().sparse(
            terms, self.x, self.means, self.total, columns, self.norms, cut, w, r, shift,
            sweeps, tol,
        )  # fmt: skip
        r += shift[0] * self.roots
        return done


class RoughDense:
    """A dense X with 16 bits for each number."""

    def __init__(self, packed: Any) -> None:
        self.packed = packed

    def times(self, w: Singles) -> Singles:
        """Return ``X w``."""
        return kernels().packed_times(self.packed, w)

    def correlate(self, r: Singles) -> Singles:
        """Return ``X' r``."""
        return kernels().packed_correlate(self.packed, r)

    def columns(self, indices: Indices) -> Singles:
        """Return some columns, in column order."""
        return kernels().packed_columns(self.packed, indices)

    def solve(
        self, weights: Singles, inverse: Inverse, right: Singles, accuracy: float, most: int
    ) -> tuple[Singles, Singles, bool]:
        """Solve ``(I + X diag(weights) X') x = right`` as :func:`conjugate_gradients` does."""
        return kernels().solve(self.packed, weights, inverse, right, accuracy, most)


class RoughSparse:
    """A sparse X in single precision, centred as in :class:`SparseDesign`."""

    def __init__(self, x: Any, roots: Singles, means: Singles) -> None:
        self.x, self.roots, self.means = x, roots, means
        self.transposed = x.T

    def times(self, w: Singles) -> Singles:
        """Return ``X w``."""
        return np.asarray(self.x @ w - self.roots * (self.means @ w))

    def correlate(self, r: Singles) -> Singles:
        """Return ``X' r``."""
        return np.asarray(self.transposed @ r - self.means * (self.roots @ r))

    def columns(self, indices: Indices) -> Singles:
        """Return some columns, in column order."""
        columns: Singles = self.x[:, indices].toarray(order="F")
        columns -= np.outer(self.roots, self.means[indices])
        return columns

    def solve(
        self, weights: Singles, inverse: Inverse, right: Singles, accuracy: float, most: int
    ) -> tuple[Singles, Singles, bool]:
        """Solve ``(I + X diag(weights) X') x = right`` as :func:`conjugate_gradients` does."""

        def product(u: Singles) -> tuple[Singles, Singles]:
            sums = self.correlate(u)
            return self.times(weights * sums), sums

        return conjugate_gradients(product, inverse, right, accuracy, most)


Design = DenseDesign | SparseDesign


def make_design(x: Any, roots: Floats, means: Floats | None) -> Design:
    """Return the design of a dense or sparse matrix."""
    return (SparseDesign if sparse.issparse(x) else DenseDesign)(x, roots, means)


def _check_norms(norms: Floats) -> None:
    """Raise a ValueError for columns whose sum of squares overflows."""
    if not np.isfinite(norms).all():
        raise ValueError(
            f"the sum of squares of column {int(np.argmin(np.isfinite(norms)))} of X overflows: "
            "its numbers should be below 1e150; scale the features (StandardScaler)"
        )
