"""Linear systems with the matrix ``I + X diag(weights) X'``.

Conjugate gradients in single precision solve them: an iteration reads X once, in half the memory,
and the Newton steps that need the systems correct the rounding errors. If they do not converge in
the time of a factorisation, the systems are factorised from then on, in double precision.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import linalg

from pdecay.sklearn._design import Design
from pdecay.sklearn._python_kernels import Singles
from pdecay.sklearn._terms import Floats

_LARGEST = 3000  # of the rows of a factorised matrix, which then has 72 MB
_FEWEST_ITERATIONS = 30
_FACTORISATION = 8  # iterations / rows at which a factorisation takes as long
_MOST_HEAVY = 256  # features in the preconditioner
_SMALL = 1e-8


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
        self._gram: Floats | None = None
        # Scaled only if single precision could overflow: scaling takes as long as an iteration.
        largest = float(np.sqrt(design.norms.max(initial=0.0)))
        self.scale = 1.0 if _SMALL < largest < 1 / _SMALL or not largest else largest
        self.x = design.single(1 / self.scale)

    def times(self, w: Floats) -> Floats:
        """Return ``X w`` in single precision."""
        return np.asarray(self.x.times((w * self.scale).astype(np.float32)), dtype=np.float64)

    def solve(self, weights: Floats, right: Floats, accuracy: float) -> tuple[Floats, Floats]:
        """Return a solution x and ``X' x``.

        The residual of x is at most `accuracy` times the right side.
        """
        if self.iterate:
            x, products, converged = self._conjugate_gradients(weights, right, accuracy)
            if converged or self.smaller > _LARGEST:
                return x, products
            self.iterate = False
        x = self._factorise(weights, right)
        return x, self.design.correlate(x)

    def _conjugate_gradients(
        self, weights: Floats, right: Floats, accuracy: float
    ) -> tuple[Floats, Floats, bool]:
        scaled = (weights * self.scale**2).astype(np.float32)
        size = float(np.linalg.norm(right)) or 1.0
        precondition = self._preconditioner(weights)
        r: Singles = (right / size).astype(np.float32)
        x, products = np.zeros_like(r), np.zeros_like(scaled)
        z = precondition(r)
        direction, product = z, float(r @ z)
        converged = False
        for _ in range(max(_FEWEST_ITERATIONS, self.smaller // _FACTORISATION)):
            image, sums = self.x.product(scaled, direction)
            image = image + direction
            length = np.float32(product / (float(direction @ image) or 1.0))
            x = x + length * direction
            products = products + length * sums
            r = r - length * image
            converged = float(np.linalg.norm(r)) <= accuracy
            if converged:
                break
            z = precondition(r)
            product, before = float(r @ z), product
            if not product > 0:  # rounding errors, or overflow
                break
            direction = z + np.float32(product / before) * direction
        x, products = np.nan_to_num(x), np.nan_to_num(products)
        return size * x.astype(np.float64), size * self.scale * products.astype(float), converged

    def _preconditioner(self, weights: Floats) -> Callable[[Singles], Singles]:
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
        if not len(heavy) or not np.isfinite(rest):
            return lambda r: r
        x = self.x.columns(heavy)
        matrix = (x.T @ x).astype(np.float64)
        matrix.flat[:: len(heavy) + 1] += rest / (weights[heavy] * self.scale**2)
        try:
            factor = linalg.cho_factor(matrix, overwrite_a=True, check_finite=False)
        except linalg.LinAlgError:
            return lambda r: r

        def apply(r: Singles) -> Singles:
            inner = linalg.cho_solve(factor, x.T @ r, check_finite=False).astype(np.float32)
            return np.asarray((r - x @ inner) / np.float32(rest))

        return apply

    def _factorise(self, weights: Floats, right: Floats) -> Floats:
        """Solve in double precision by the smaller of two matrices."""
        n, d = self.design.shape
        try:
            if n <= d:
                matrix = self.design.outer(weights)
                matrix.flat[:: n + 1] += 1.0
                return np.asarray(linalg.solve(matrix, right, assume_a="pos", overwrite_a=True))
            if self._gram is None:
                every = np.arange(d)
                self._gram = self.design.gram(every, every)
            roots = np.sqrt(weights)
            matrix = roots[:, None] * self._gram * roots
            matrix.flat[:: d + 1] += 1.0
            inner = roots * linalg.solve(
                matrix, roots * self.design.correlate(right), assume_a="pos", overwrite_a=True
            )
            return np.asarray(self.design.residual(right, inner))
        except linalg.LinAlgError:
            return np.zeros_like(right)
