"""Least squares with a p-norm penalty: working sets around coordinate descent.

:class:`LeastSquares` minimises ``||y - X w||^2 / 2 + R(w)``. It repeats three steps:

1. Compute for every feature the change that one exact coordinate step would make. Stop if none is
   larger than the tolerance: w is a fixed point.
2. Add the features with the largest changes to the working set.
3. Run coordinate descent on the working set. While the set is small this uses its Gram matrix, which
   is kept for later calls. Between runs, a Newton step on the non-zero coefficients, accepted if it
   lowers the objective and changes no sign, removes the slow tail of coordinate descent.

All sizes are relative to ``||y||``, so that the tolerance has no unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import linalg

from pdecay.sklearn._design import Design
from pdecay.sklearn._kernels import kernels
from pdecay.sklearn._python_kernels import Indices
from pdecay.sklearn._terms import Floats, Terms

_FIRST_SET = 32  # the smallest working set
_LARGEST_GRAM = 3000  # features; the matrix then has 72 MB
_SWEEPS = 16  # of coordinate descent before a Newton step
_PRECISION = 1e-13  # objectives closer than this (relative) count as equal


@dataclass
class Solution:
    """Coefficients with their residual vector, objective, work and accuracy."""

    w: Floats
    r: Floats
    objective: float
    sweeps: int
    step: float  # the largest coordinate step that is left, relative to ||y||

    def converged(self, tol: float) -> bool:
        """Whether no coordinate step is larger than the tolerance."""
        return self.step <= tol


class LeastSquares:
    """A least-squares problem that is solved for several penalties and starts.

    Args:
        design: the scaled and centred features.
        y: the scaled and centred targets.
    """

    def __init__(self, design: Design, y: Floats) -> None:
        self.design, self.y = design, y
        self.scale = float(np.linalg.norm(y)) or 1.0
        self.correlation = design.correlate(y)
        self._active: Indices = np.empty(0, dtype=np.int64)
        self._gram: Floats = np.empty((0, 0))

    def objective(self, terms: Terms, w: Floats, r: Floats) -> float:
        """Return ``||r||^2 / 2 + R(w)``."""
        return float(r @ r) / 2 + terms.value(w)

    def solve(
        self, terms: Terms, start: Floats | None = None, tol: float = 1e-6, max_sweeps: int = 10000
    ) -> Solution:
        """Minimise from one start; the result is a fixed point of all coordinate steps."""
        design, norms = self.design, self.design.norms
        w = np.zeros(design.shape[1]) if start is None else np.where(norms > 0, start, 0.0)
        cut = terms.cut(norms)
        limit = tol * self.scale
        sweeps = 0
        while True:
            if w.any():
                r = design.residual(self.y, w)
                q = design.correlate(r)
            else:
                r, q = self.y, self.correlation
            steps = kernels().steps(terms, norms, cut, w, q)
            step = float(steps.max(initial=0.0))
            if step <= limit or sweeps >= max_sweeps:
                return Solution(w, r, self.objective(terms, w, r), sweeps, step / self.scale)
            columns = self._working_set(w, steps)
            inner = max(limit / 2, step / 30)
            budget = max_sweeps - sweeps
            if self._use_gram(columns):
                sweeps += self._descend_gram(terms, columns, w, q, inner, budget)
            else:
                r = np.array(r)
                sweeps += design.descend(terms, columns, cut, w, r, budget, inner)[0]

    def solve_active(self, terms: Terms, start: Floats, tol: float, max_sweeps: int) -> Floats:
        """Minimise over the features of the current Gram matrix only; return the coefficients."""
        w = np.zeros_like(start)
        w[self._active] = start[self._active]
        q = self.correlation[self._active] - self._gram @ w[self._active]
        self._descend(terms, w, q, tol * self.scale, max_sweeps)
        return w

    def active_objective(self, terms: Terms, w: Floats) -> float:
        """Return the objective of coefficients that are zero outside the current Gram matrix."""
        part = w[self._active]
        fit = part @ (self._gram @ part) / 2 - self.correlation[self._active] @ part
        return float(self.scale**2 / 2 + fit) + terms.value(part)

    def _working_set(self, w: Floats, steps: Floats) -> Indices:
        """Return the non-zero coefficients and the features with the largest steps, best first."""
        used = int(np.count_nonzero(w))
        size = max(_FIRST_SET, 2 * used)
        score = np.where(w != 0, np.inf, steps)
        candidates = np.flatnonzero(score > 0)
        if len(candidates) > size:
            candidates = candidates[np.argpartition(-score[candidates], size)[:size]]
        return candidates[np.argsort(-score[candidates], kind="stable")]

    def _use_gram(self, columns: Indices) -> bool:
        return len(columns) <= min(_LARGEST_GRAM, max(500, 2 * self.design.shape[0]))

    def _descend_gram(
        self, terms: Terms, columns: Indices, w: Floats, q: Floats, tol: float, budget: int
    ) -> int:
        """Add the columns to the Gram matrix and minimise over all its features."""
        self._extend(columns)
        return self._descend(terms, w, np.ascontiguousarray(q[self._active]), tol, budget)

    def _extend(self, columns: Indices) -> None:
        new = columns[~np.isin(columns, self._active)]
        if len(self._active) + len(new) > _LARGEST_GRAM:  # drop features that are out of use
            self._active, self._gram, new = new[:0], np.empty((0, 0)), columns
        if not len(new):
            return
        old = len(self._active)
        size = old + len(new)
        gram = np.empty((size, size))
        gram[:old, :old] = self._gram
        gram[old:, old:] = self.design.gram(new, new)
        if old:
            gram[:old, old:] = self.design.gram(self._active, new)
            gram[old:, :old] = gram[:old, old:].T
        self._active, self._gram = np.concatenate([self._active, new]), gram

    def _descend(self, terms: Terms, w: Floats, q: Floats, tol: float, budget: int) -> int:
        """Minimise over the features of the Gram matrix; update w and q (``X' r`` of those)."""
        part = w[self._active]
        cut = terms.cut(np.diagonal(self._gram))
        done = 0
        while done < budget:
            sweeps, step = kernels().gram(
                terms, self._gram, cut, part, q, min(_SWEEPS, budget - done), tol
            )
            done += sweeps
            if step <= tol:
                break
            self._newton(terms, part, q)
        w[self._active] = part
        return done

    def _newton(self, terms: Terms, w: Floats, q: Floats) -> None:
        """Take a Newton step on the non-zero coefficients if it lowers the objective."""
        used = np.flatnonzero(w)
        before = w[used]
        gram = self._gram[np.ix_(used, used)]
        hessian = gram + np.diag(terms.curvature(before))
        try:
            factor = linalg.cho_factor(hessian, overwrite_a=True, check_finite=False)
        except linalg.LinAlgError:  # not convex here, or two equal columns
            return
        step = linalg.cho_solve(factor, q[used] - terms.slope(before), check_finite=False)
        # Stay within 90 % of the way to the next sign change: the slope jumps there.
        with np.errstate(divide="ignore", invalid="ignore"):
            ways = np.where(step * before < 0, -before / step, np.inf)
        length = min(1.0, 0.9 * float(ways.min(initial=np.inf)))
        step *= length
        change = step @ (gram @ step) / 2 - q[used] @ step
        change += terms.value(before + step) - terms.value(before)
        if change < 0:
            w[used] = before + step
            q -= self._gram[:, used] @ step
