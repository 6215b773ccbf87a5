"""Least squares with a p-norm penalty: working sets around coordinate descent.

:class:`LeastSquares` minimises ``||y - X w||^2 / 2 + R(w)``. It repeats three steps:

1. Compute for every feature the change that one exact coordinate step would make. Stop if none is
   larger than the tolerance: w is a fixed point.
2. Choose the working set: the non-zero coefficients and the features with the largest changes.
3. Run coordinate descent on the working set. A small set uses its Gram matrix, which later calls
   reuse. Coordinate descent converges slowly at the end, so Newton steps on the non-zero
   coefficients follow. They are accepted if they lower the objective.

Penalties with every p above 1 are minimised by Newton's method first (see `_smooth.py`).

Steps are measured as changes of the prediction relative to ``||y||``, so the tolerance has no unit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import linalg
from threadpoolctl import ThreadpoolController

from pdecay.sklearn._design import Design
from pdecay.sklearn._kernels import kernels
from pdecay.sklearn._python_kernels import Indices
from pdecay.sklearn._smooth import minimise
from pdecay.sklearn._terms import Floats, Terms, relax

_FIRST_SET = 48  # the smallest working set
_NEAR = 0.9  # features with this share of the correlation that enters are added in advance
_GROWTH = 2  # size of the working set, relative to the number of non-zero coefficients
_LARGEST_GRAM = 3000  # features; the matrix then takes 72 MB
_SWEEPS = 16  # sweeps of coordinate descent before each Newton step
_INNER = 100_000  # a working set is solved until its steps are this many times smaller
_ROUGH, _ROUGH_SWEEPS = 1e-3, 1000  # tolerance and largest number of sweeps for starting points
_LASSO_ROUGH = 0.03  # tolerance of the Lasso, which only selects features
# Below this p Newton's method for p > 1 overflows: R' is practically a step, and most minimisers
# are zero in double precision. Coordinate descent is as fast there.
_SMOOTH = 1.01
_EXCHANGES, _FEW_SWEEPS = 5, 4  # features to replace per start, and the sweeps without each
# Starting points: sequences of p between 1 and the given p, as shares of the distance to it.
_SHARES = ((2 / 3, 1 / 3), (1 / 2,), (5 / 6, 2 / 3, 1 / 2, 1 / 3, 1 / 6))


@functools.cache
def _thread_controller() -> ThreadpoolController:
    return ThreadpoolController()


def single_threaded() -> Any:
    """Return a context in which BLAS uses one thread.

    The matrices are small. A second thread saves little, and slows the solver down if other
    processes use the processor.
    """
    return _thread_controller().limit(limits=1, user_api="blas")


@dataclass
class Solution:
    """Coefficients and measures of their quality."""

    w: Floats
    r: Floats  # the residual y - X w
    q: Floats  # X' r
    objective: float
    sweeps: int  # of coordinate descent, Newton steps for p > 1 included
    step: float  # the largest remaining coordinate step, relative to ||y||

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
        self.sweeps = 0  # of all calls
        self._active: Indices = np.empty(0, dtype=np.int64)
        self._is_active = np.zeros(design.shape[1], dtype=bool)
        self._gram: Floats = np.empty((0, 0))
        self._last_cut: tuple[Terms | None, Floats] = (None, np.empty(0))

    def objective(self, terms: Terms, w: Floats, r: Floats) -> float:
        """Return ``||r||^2 / 2 + R(w)``."""
        return float(r @ r) / 2 + terms.value(w)

    def solve(
        self, terms: Terms, start: Floats | None = None, tol: float = 1e-6, max_sweeps: int = 10000
    ) -> Solution:
        """Minimise from one start, until no coordinate step is larger than the tolerance."""
        with single_threaded():
            return self._solve(terms, start, tol, max_sweeps)

    def _solve(self, terms: Terms, start: Floats | None, tol: float, max_sweeps: int) -> Solution:
        design, norms = self.design, self.design.norms
        w = np.zeros(design.shape[1]) if start is None else np.where(norms > 0, start, 0.0)
        cut = terms.cut(norms)
        limit = tol * self.scale
        r, q = self._residual(w)
        sweeps = 0
        if terms.pairs and terms.smallest_p >= _SMOOTH:
            # Newton's method can fail at extreme scales. Coordinate descent never does, but it
            # would not come back from coefficients of 1e45.
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                point, sweeps = minimise(
                    design, self.y, self.correlation, terms, w, limit, max_sweeps
                )
                after = self.objective(terms, point.w, point.r)
            if after <= self.objective(terms, w, r):
                w, r, q = point
        while True:
            steps = kernels().steps(terms, norms, cut, w, q)
            step = float(steps.max(initial=0.0))
            if step <= limit or sweeps >= max_sweeps:
                self.sweeps += sweeps
                return Solution(w, r, q, self.objective(terms, w, r), sweeps, step / self.scale)
            columns = self._working_set(w, steps, np.abs(q), cut * norms)
            inner = max(limit / 4, step / _INNER)
            budget = max_sweeps - sweeps
            if self._use_gram(columns):
                self._extend(columns)
                part = w[self._active]
                sweeps += self._descend(terms, part, q[self._active], inner, budget)
                w[self._active] = part
            else:
                r = np.array(r)
                sweeps += design.descend(terms, columns, cut, w, r, budget, inner)[0]
            r, q = self._residual(w)

    def _residual(self, w: Floats) -> tuple[Floats, Floats]:
        """Return the residual ``y - X w`` and its products with the features."""
        if not w.any():
            return self.y, self.correlation
        r = self.design.residual(self.y, w)
        return r, self.design.correlate(r)

    def solve_from_several(
        self, terms: Terms, start: Floats | None, n_starts: int, tol: float, max_sweeps: int
    ) -> Solution:
        """Minimise from several starts and return the solution with the lowest objective.

        A convex penalty needs one start. For p < 1 the starts are `start` (default: zero), the
        Lasso, solutions for p between 1 and the given p, and zero. To save time, the starts are
        compared on the features in the Gram matrix only, which includes those of the Lasso. The
        best solution is improved by exchanging features, then minimised over all features.
        """
        if terms.convex or n_starts == 1:
            return self.solve(terms, start, tol, max_sweeps)
        with single_threaded():
            return self._solve_from_several(terms, start, n_starts, tol, max_sweeps)

    def _solve_from_several(
        self, terms: Terms, start: Floats | None, n_starts: int, tol: float, max_sweeps: int
    ) -> Solution:
        norms = self.design.norms[self.design.norms > 0]
        if not len(norms):
            return self._solve(terms, start, tol, max_sweeps)
        norm = float(np.median(norms))
        lasso = self._solve(relax(terms, 1.0, norm), start, _LASSO_ROUGH, max_sweeps)
        begin = np.zeros_like(lasso.w) if start is None else start
        outside = ((begin != 0) | (lasso.w != 0)) & ~self._is_active
        if outside.any():  # too many features for a Gram matrix
            solutions = [self._solve(terms, w, tol, max_sweeps) for w in (begin, lasso.w)]
            return min(solutions, key=lambda solution: solution.objective)
        first, selected = begin[self._active], lasso.w[self._active]
        found = [self._solve_active(terms, first), self._solve_active(terms, selected)]
        for share in _SHARES[: max(n_starts - 2, 0)]:
            part = selected
            for one in share:
                part = self._solve_active(relax(terms, one, norm), part)
            found.append(self._solve_active(terms, part))
        if start is not None:
            found.append(self._solve_active(terms, np.zeros_like(first)))
        best = min(found[:n_starts], key=lambda part: self._active_objective(terms, part))
        part = self._exchange(terms, best, _EXCHANGES * n_starts)
        # Usually no other feature enters. Then the next product with all features is the last.
        self.sweeps += self._descend(
            terms, part, self._active_products(part), tol * self.scale / 4, max_sweeps
        )
        w = np.zeros_like(begin)
        w[self._active] = part
        return self._solve(terms, w, tol, max_sweeps)

    def _solve_active(self, terms: Terms, start: Floats) -> Floats:
        """Minimise roughly over the features of the Gram matrix; return their coefficients."""
        part = start.copy()
        self.sweeps += self._descend(
            terms, part, self._active_products(part), _ROUGH * self.scale, _ROUGH_SWEEPS
        )
        return part

    def _active_products(self, part: Floats) -> Floats:
        """Return ``X' r`` for coefficients that are zero outside the Gram matrix."""
        return np.asarray(self.correlation[self._active] - self._gram @ part)

    def _active_objective(self, terms: Terms, part: Floats, q: Floats | None = None) -> float:
        """Return the objective of coefficients that are zero outside the Gram matrix."""
        q = self._active_products(part) if q is None else q
        fit = part @ (self.correlation[self._active] + q)
        return (self.scale**2 - float(fit)) / 2 + terms.value(part)

    def _exchange(self, terms: Terms, part: Floats, count: int) -> Floats:
        """Try to replace the least important features of a solution by others.

        If a feature that is correlated with a true one was selected first, coordinate steps cannot
        replace it. A few sweeps without it let the true feature enter.
        """
        gram, cut, tol = self._gram, self._active_cut(terms), _ROUGH * self.scale
        q = self._active_products(part)
        lowest = self._active_objective(terms, part, q)
        importance = np.where(part != 0, np.diagonal(gram) * part**2, np.inf)
        order = np.argsort(importance)[: min(count, np.count_nonzero(part))]
        for k in order:
            if not part[k]:  # removed by an exchange before
                continue
            without = cut.copy()
            without[k] = np.inf
            moved, products = part.copy(), q + gram[k] * part[k]
            moved[k] = 0.0
            sweeps, _ = kernels().gram(terms, gram, without, moved, products, _FEW_SWEEPS, tol)
            self.sweeps += sweeps
            returns = abs(products[k]) > cut[k] * gram[k, k]
            if returns and not moved[part == 0].any():  # no other feature took its place
                continue
            sweeps, _ = kernels().gram(terms, gram, cut, moved, products, _SWEEPS, tol)
            self.sweeps += sweeps
            objective = self._active_objective(terms, moved, products)
            if objective < lowest:
                part, q, lowest = moved, products, objective
        return part

    def dual_gap(self, terms: Terms, found: Solution) -> float:
        """Return the duality gap of a solution for a convex penalty, and NaN for another one.

        It bounds how far the objective is above its minimum.
        """
        if not terms.convex or not terms.pairs:
            return float("nan")
        product, square = float(self.y @ found.r), float(found.r @ found.r)
        lowest = np.inf
        for share in terms.dual_shares(found.q):
            value = share * product - share**2 * square / 2 - terms.conjugate_sum(share * found.q)
            lowest = min(lowest, found.objective - value)
        return max(float(lowest), 0.0)

    def _working_set(self, w: Floats, steps: Floats, q: Floats, limit: Floats) -> Indices:
        """Return the non-zero coefficients and the features with the largest steps, best first.

        Features with a correlation q just below the limit for a step follow. They are likely to be
        needed next, and a larger set takes less time than another product with X.
        """
        size = max(_FIRST_SET, int(_GROWTH * np.count_nonzero(w)))
        score = np.where(w != 0, np.inf, steps / self.scale + (steps > 0))
        near = (score == 0) & (q > _NEAR * limit) & (limit > 0)
        score[near] = q[near] / limit[near] / 2
        candidates = np.flatnonzero(score > 0)
        if len(candidates) > size:
            candidates = candidates[np.argpartition(-score[candidates], size)[:size]]
        return candidates[np.argsort(-score[candidates], kind="stable")]

    def _use_gram(self, columns: Indices) -> bool:
        return bool(len(columns) <= min(_LARGEST_GRAM, max(500, 2 * self.design.shape[0])))

    def _extend(self, columns: Indices) -> None:
        new = columns[~self._is_active[columns]]
        if len(self._active) + len(new) > _LARGEST_GRAM:  # drop features that are out of use
            self._active, self._gram, new = new[:0], np.empty((0, 0)), columns
            self._is_active[:] = False
            self._last_cut = (None, np.empty(0))
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
        self._is_active[new] = True

    def _descend(self, terms: Terms, part: Floats, q: Floats, tol: float, budget: int) -> int:
        """Minimise over the features of the Gram matrix; update `part` and its ``q = X' r``."""
        done = 0
        while done < budget:
            sweeps, step = kernels().gram(
                terms, self._gram, self._active_cut(terms), part, q,
                min(_SWEEPS, budget - done), tol,
            )  # fmt: skip
            done += sweeps
            if step <= tol or done >= budget:
                break
            self._newton(terms, part, q)
        return done

    def _active_cut(self, terms: Terms) -> Floats:
        """Return the prox thresholds of the features in the Gram matrix, cached."""
        if self._last_cut[0] is not terms or len(self._last_cut[1]) != len(self._active):
            self._last_cut = (terms, terms.cut(np.diagonal(self._gram)))
        return self._last_cut[1]

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
        # Stop before the first sign change, because the slope of the penalty jumps there.
        with np.errstate(divide="ignore", invalid="ignore"):
            ways = np.where(step * before < 0, -before / step, np.inf)
        length = min(1.0, 0.9 * float(ways.min(initial=np.inf)))
        step *= length
        change = step @ (gram @ step) / 2 - q[used] @ step
        change += terms.value(before + step) - terms.value(before)
        if change < 0:
            w[used] = before + step
            q -= self._gram[:, used] @ step
