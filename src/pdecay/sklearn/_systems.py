"""Linear systems with the matrix ``I + X diag(weights) X'``.

Conjugate gradients in single precision solve them: an iteration reads X once, in half the memory,
and the Newton steps that need the systems correct the rounding errors. If they do not converge in
the time of a factorisation, the systems are factorised from then on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import linalg

from pdecay.sklearn._design import Design, SingleDense
from pdecay.sklearn._python_kernels import Inverse, Singles
from pdecay.sklearn._terms import Floats

_LARGEST = 3000  # of the rows of a factorised matrix, which then has 72 MB
_FEWEST_ITERATIONS = 30
_FACTORISATION = 8  # iterations / rows at which a factorisation takes as long
_MOST_HEAVY = 128  # features in the preconditioner
_SMALL = 1e-8
# The eigenvalues of the matrix are at least 1. Up to this trace of the rest, the rounding errors of
# single precision change them by less than 1 %.
_SINGLE_TRACE = 1e5


class Systems:
    """Systems ``(I + X diag(weights) X') x = right`` for changing weights.

    Args:
        design: the features X.
        iterate: whether to begin with conjugate gradients, and not with factorisations.
    """

    def __init__(self, design: Design, iterate: bool) -> None:
        self.design = design
        self.smaller = min(design.shape)
        self.iterate = iterate or self.smaller > _LARGEST
        self._single_gram: Singles | None = None
        self._double_gram: Floats | None = None
        # Scaled only if single precision could overflow: scaling takes as long as an iteration.
        largest = float(np.sqrt(design.norms.max(initial=0.0)))
        self.scale = 1.0 if _SMALL < largest < 1 / _SMALL or not largest else largest
        self.x = design.single(1 / self.scale)

    def times(self, w: Floats) -> Floats:
        """Return ``X w`` in single precision."""
        size = float(np.abs(w).max(initial=0.0)) or 1.0  # so that small numbers do not underflow
        products = self.x.times((w / size).astype(np.float32))
        return np.asarray(products, dtype=np.float64) * (size * self.scale)

    def correlate(self, r: Floats) -> Floats:
        """Return ``X' r`` in single precision."""
        size = float(np.linalg.norm(r)) or 1.0  # so that small numbers do not underflow
        products = self.x.correlate((r / size).astype(np.float32))
        return np.asarray(products, dtype=np.float64) * (size * self.scale)

    def solve(self, weights: Floats, right: Floats, accuracy: float) -> tuple[Floats, Floats]:
        """Return a solution x and ``X' x``.

        The residual of x is at most `accuracy` times the right side.
        """
        if self.iterate:
            x, products, converged = self._conjugate_gradients(weights, right, accuracy)
            if converged or self.smaller > _LARGEST:
                return x, products
            self.iterate = False
        return self._factorise(weights, right)

    def _conjugate_gradients(
        self, weights: Floats, right: Floats, accuracy: float
    ) -> tuple[Floats, Floats, bool]:
        size = float(np.linalg.norm(right)) or 1.0
        x, products, converged = self.x.solve(
            (weights * self.scale**2).astype(np.float32),
            self._preconditioner(weights),
            (right / size).astype(np.float32),
            accuracy,
            max(_FEWEST_ITERATIONS, self.smaller // _FACTORISATION),
        )
        if not (np.isfinite(x.sum()) and np.isfinite(products.sum())):  # overflow
            x, products = np.zeros_like(x), np.zeros_like(products)
        return size * x.astype(np.float64), size * self.scale * products.astype(float), converged

    def _preconditioner(self, weights: Floats) -> Inverse:
        """Return an approximate inverse: exact for the heaviest features, a number for the others.

        Near p = 1 a few features have almost all of the weight. Without them the matrix is close
        to a multiple of the identity.
        """
        n, d = self.design.shape
        share = weights * self.design.norms
        heavy = np.flatnonzero(share > max(1, n / d) * (1 + share.sum() / n))
        if len(heavy) > _MOST_HEAVY:
            heavy = heavy[np.argpartition(-share[heavy], _MOST_HEAVY)[:_MOST_HEAVY]]
        rest = 1 + (share.sum() - share[heavy].sum()) / n
        if len(heavy) and np.isfinite(rest):
            # By the Woodbury identity: P = X U^-1 with U' U = X' X + diag(rest / weights).
            x = self.x.columns(heavy)
            matrix = (x.T @ x).astype(np.float64)
            matrix.flat[:: len(heavy) + 1] += rest / (weights[heavy] * self.scale**2)
            factor, failed = linalg.lapack.dpotrf(matrix, overwrite_a=True)
            if not failed:
                p = linalg.blas.strsm(1.0, factor.astype(np.float32), x, side=1, overwrite_b=True)
                return Inverse(p, rest)
        return Inverse(np.empty((n, 0), dtype=np.float32, order="F"), 1.0)

    def _factorise(self, weights: Floats, right: Floats) -> tuple[Floats, Floats]:
        """Solve by the smaller of two matrices; return zeros if it cannot be factorised."""
        n, d = self.design.shape
        if n <= d:
            matrix = self.design.outer(weights)
            matrix.flat[:: n + 1] += 1.0
            x = np.asarray(_solve_positive(matrix, right))
            return x, self.design.correlate(x)
        roots = np.sqrt(weights)
        gram = self._gram(weights)
        single = gram.dtype == np.float32
        products = self.correlate(right) if single else self.design.correlate(right)
        scaled = (roots * self.scale).astype(np.float32) if single else roots
        matrix = gram * scaled
        matrix *= scaled[:, None]
        matrix.flat[:: d + 1] += 1
        inner = roots * _solve_positive(matrix, (roots * products).astype(gram.dtype))
        x = right - self.times(inner) if single else self.design.residual(right, inner)
        return x, self.design.correlate(x)

    def _gram(self, weights: Floats) -> Any:
        """Return ``X' X``, in single precision if its rounding errors are small enough.

        Single precision takes half the time. A sparse X needs double precision, because centring
        its products cancels digits.
        """
        trace = float(weights @ self.design.norms)
        if isinstance(self.x, SingleDense) and trace <= _SINGLE_TRACE:
            if self._single_gram is None:
                self._single_gram = self.x.gram()
            return self._single_gram
        if self._double_gram is None:
            every = np.arange(self.design.shape[1])
            self._double_gram = self.design.gram(every, every)
        return self._double_gram


def _solve_positive(matrix: Any, right: Any) -> Any:
    """Solve a system with a positive definite matrix, which is not changed; zeros if it fails."""
    potrf, potrs = linalg.get_lapack_funcs(("potrf", "potrs"), (matrix,))
    factor, failed = potrf(matrix.T)  # the transposed view is in column order: no copy
    return np.zeros_like(right) if failed else potrs(factor, right)[0]
