"""Linear systems with the matrix ``I + X diag(weights) X'``.

Conjugate gradients solve them with a copy of X in low precision: an iteration takes as long as
reading X. The Newton steps that need the systems correct the errors. If the iterations converge
slowly, or the Newton steps with their results do, the systems are solved with the exact X from then
on: factorised, or by conjugate gradients if they are too large.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import linalg

from pdecay.sklearn._design import Design
from pdecay.sklearn._python_kernels import Inverse, Singles, conjugate_gradients
from pdecay.sklearn._terms import Floats

_LARGEST = 3000  # of the rows of a factorised matrix, which then has 72 MB
_FEWEST_ITERATIONS = 30
_FACTORISATION = 3  # rows / iterations at which a factorisation takes as long
_MOST_HEAVY, _HEAVY = 128, 3  # most features in the preconditioner; also relative to sqrt(d)
_CHANGE = 3.0  # of the weights, up to which a preconditioner is used again
_SMALL = 1e-8


class Systems:
    """Systems ``(I + X diag(weights) X') x = right`` for changing weights.

    Args:
        design: the features X.
    """

    def __init__(self, design: Design) -> None:
        self.design = design
        self.smaller = min(design.shape)
        self.exact = False
        self._gram: Floats | None = None
        self._last = (np.empty(0, dtype=np.int64), np.empty(0), self._no_inverse())
        # Single precision must not overflow.
        largest = float(np.sqrt(design.norms.max(initial=0.0)))
        self.scale = 1.0 if _SMALL < largest < 1 / _SMALL or not largest else largest
        self.x = design.rough(1 / self.scale)

    def times(self, w: Floats) -> Floats:
        """Return ``X w`` in low precision."""
        size = float(np.abs(w).max(initial=0.0)) or 1.0  # so that small numbers do not underflow
        products = self.x.times((w / size).astype(np.float32))
        return np.asarray(products, dtype=np.float64) * (size * self.scale)

    def correlate(self, r: Floats) -> Floats:
        """Return ``X' r`` in low precision."""
        size = float(np.linalg.norm(r)) or 1.0  # so that small numbers do not underflow
        products = self.x.correlate((r / size).astype(np.float32))
        return np.asarray(products, dtype=np.float64) * (size * self.scale)

    def solve(self, weights: Floats, right: Floats, accuracy: float) -> tuple[Floats, Floats]:
        """Return a solution x and ``X' x``.

        The residual of x is at most `accuracy` times the right side, up to the errors of X.
        """
        if not self.exact:
            x, products, converged = self._conjugate_gradients(weights, right, accuracy)
            if converged:
                return x, products
            self.exact = True
        if self.smaller <= _LARGEST:
            x = self._factorise(weights, right)
        else:
            x = self._exact_conjugate_gradients(weights, right, accuracy)
        return x, self.design.correlate(x)

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

    def _exact_conjugate_gradients(self, weights: Floats, right: Floats, accuracy: float) -> Floats:
        def product(u: Any) -> tuple[Any, Any]:
            sums, image = self.design.through(u, np.zeros_like(weights), weights)
            return image, sums

        size = float(np.linalg.norm(right)) or 1.0
        inverse, start = self._preconditioner(weights), right / size
        most = max(_FEWEST_ITERATIONS, self.smaller // _FACTORISATION)
        return np.asarray(size * conjugate_gradients(product, inverse, start, accuracy, most)[0])

    def _preconditioner(self, weights: Floats) -> Inverse:
        """Return an approximate inverse: exact for the heaviest features, a number for the others.

        Near p = 1 a few features have almost all of the weight. Without them the matrix is close
        to a multiple of the identity.
        """
        n, d = self.design.shape
        share = weights * self.design.norms
        heavy, last, inverse = self._last
        if len(heavy) and np.abs(np.log(weights[heavy] / last)).max() < np.log(_CHANGE):
            return inverse
        heavy = np.flatnonzero(share > max(1, n / d) * (1 + share.sum() / n))
        most = min(_MOST_HEAVY, int(_HEAVY * np.sqrt(d)))
        if len(heavy) > most:
            heavy = heavy[np.argpartition(-share[heavy], most)[:most]]
        rest = 1 + (share.sum() - share[heavy].sum()) / n
        if not (len(heavy) and np.isfinite(rest)):
            return self._no_inverse()
        # By the Woodbury identity, with the heavy columns H: K = (H' H + diag(rest / weights))^-1.
        h = self.x.columns(heavy)
        matrix = (h.T @ h).astype(np.float64)
        matrix.flat[:: len(heavy) + 1] += rest / (weights[heavy] * self.scale**2)
        factor, failed = linalg.lapack.dpotrf(matrix, overwrite_a=True)
        if failed:
            return self._no_inverse()
        upper, _ = linalg.lapack.dpotri(factor, overwrite_c=True)
        k = np.triu(upper) + np.triu(upper, 1).T
        self._last = (heavy, weights[heavy], Inverse(h, k.astype(np.float32, order="C"), rest))
        return self._last[2]

    def _no_inverse(self) -> Inverse:
        h: Singles = np.empty((self.design.shape[0], 0), dtype=np.float32, order="F")
        return Inverse(h, np.empty((0, 0), dtype=np.float32), 1.0)

    def _factorise(self, weights: Floats, right: Floats) -> Floats:
        """Solve by the smaller of two matrices; return zeros if it cannot be factorised."""
        n, d = self.design.shape
        if n <= d:
            matrix = self.design.outer(weights)
            matrix.flat[:: n + 1] += 1.0
            return _solve_positive(matrix, right)
        if self._gram is None:
            every = np.arange(d)
            self._gram = self.design.gram(every, every)
        roots = np.sqrt(weights)
        matrix = self._gram * roots * roots[:, None]
        matrix.flat[:: d + 1] += 1
        inner = roots * _solve_positive(matrix, roots * self.design.correlate(right))
        return self.design.residual(right, inner)


def _solve_positive(matrix: Floats, right: Floats) -> Floats:
    """Solve a system with a positive definite matrix, which is not changed; zeros if it fails."""
    factor, failed = linalg.lapack.dpotrf(matrix.T)  # the view is in column order: no copy
    return np.asarray(np.zeros_like(right) if failed else linalg.lapack.dpotrs(factor, right)[0])
