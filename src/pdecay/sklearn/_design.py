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
from pdecay.sklearn._python_kernels import Indices, Singles
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
        self.x: Floats = np.empty(self.shape, order="F")
        if means is None:
            np.multiply(x, roots[:, None], out=self.x)
        else:
            np.subtract(x, means, out=self.x)
            self.x *= roots[:, None]
        self.norms: Floats = np.einsum("ij,ij->j", self.x, self.x)
        if means is not None:  # a constant column leaves rounding errors
            self.norms[self.norms <= 1e-28 * means**2 * (roots @ roots)] = 0.0

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

    def single(self, factor: float) -> SingleDense:
        """Return ``factor * X`` in single precision."""
        x = self.x if factor == 1 else self.x * factor
        return SingleDense(x.astype(np.float32))

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
        scaled = sparse.csc_array(x, dtype=np.float64, copy=True)
        scaled.data *= roots[scaled.indices]
        self.x = scaled
        self.x.indices = self.x.indices.astype(np.int32, copy=False)
        self.x.indptr = self.x.indptr.astype(np.int32, copy=False)
        self.roots = roots
        self.shape = self.x.shape
        self.means = np.zeros(self.shape[1]) if means is None else means
        self.total = float(roots @ roots)
        self.norms: Floats = np.asarray(self.x.multiply(self.x).sum(axis=0)).ravel()
        # Rounding must not make the norm of a constant column positive.
        before = self.norms.copy()
        self.norms -= self.total * self.means**2
        self.norms[self.norms <= 1e-14 * before] = 0.0

    def correlate(self, r: Floats) -> Floats:
        """Return ``X' r``."""
        return np.asarray(self.x.T @ r - self.means * (self.roots @ r))

    def residual(self, y: Floats, w: Floats) -> Floats:
        """Return ``y - X w``."""
        return np.asarray(y - self.x @ w + self.roots * (self.means @ w))

    def gram(self, rows: Indices, columns: Indices) -> Floats:
        """Return the inner products of two lists of columns."""
        products = (self.x[:, rows].T @ self.x[:, columns]).toarray()
        return np.asarray(products - self.total * np.outer(self.means[rows], self.means[columns]))

    def single(self, factor: float) -> SingleSparse:
        """Return ``factor * X`` in single precision."""
        x = (self.x * factor).astype(np.float32)
        return SingleSparse(
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


class SingleDense:
    """A dense X in single precision and column order."""

    def __init__(self, x: Singles) -> None:
        self.x = x

    def times(self, w: Singles) -> Singles:
        """Return ``X w``."""
        return np.asarray(self.x @ w)

    def product(self, weights: Singles, u: Singles) -> tuple[Singles, Singles]:
        """Return ``X diag(weights) X' u`` and ``X' u``."""
        return kernels().product(self.x, weights, u)

    def columns(self, indices: Indices) -> Singles:
        """Return some columns."""
        return np.asarray(self.x[:, indices])


class SingleSparse:
    """A sparse X in single precision, centred as in :class:`SparseDesign`."""

    def __init__(self, x: Any, roots: Singles, means: Singles) -> None:
        self.x, self.roots, self.means = x, roots, means
        self.transposed = x.T

    def times(self, w: Singles) -> Singles:
        """Return ``X w``."""
        return np.asarray(self.x @ w - self.roots * (self.means @ w))

    def product(self, weights: Singles, u: Singles) -> tuple[Singles, Singles]:
        """Return ``X diag(weights) X' u`` and ``X' u``."""
        sums = np.asarray(self.transposed @ u - self.means * (self.roots @ u))
        return self.times(weights * sums), sums

    def columns(self, indices: Indices) -> Singles:
        """Return some columns."""
        return np.asarray(self.x[:, indices].toarray() - np.outer(self.roots, self.means[indices]))


Design = DenseDesign | SparseDesign


def make_design(x: Any, roots: Floats, means: Floats | None) -> Design:
    """Return the design of a dense or sparse matrix."""
    return (SparseDesign if sparse.issparse(x) else DenseDesign)(x, roots, means)
