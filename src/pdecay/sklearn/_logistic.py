"""The logistic loss with a p-norm penalty, minimised by proximal Newton steps.

The scores of a sample are ``X w_k + b_k``, with one row of coefficients per class, or with a single
row for two classes. One step replaces the loss of one row by its quadratic model, a weighted
least-squares problem for :class:`pdecay.sklearn._solver.LeastSquares`. If the objective does not
decrease, the step is repeated with larger curvature, at last with 1/4 of the weights: the model is
then an upper bound of the loss, so that every step lowers the objective.

As in regression, only a working set of features takes part, and the solver stops when no coordinate
step (with the curvature of the upper bound) is larger than the tolerance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse, special

from pdecay.sklearn._design import make_design
from pdecay.sklearn._kernels import kernels
from pdecay.sklearn._solver import LeastSquares, single_threaded
from pdecay.sklearn._terms import Floats, Terms, relax

_FIRST_SET = 32  # the smallest working set
_LEAST_CURVATURE = 1e-6  # of a sample, relative to its weight; saturated samples have almost none
_ROUGH = 1e-3  # tolerance of starts
_INNER_SWEEPS = 1000
_INTERCEPT_STEPS = 3
_ROUNDING = 1e-13
_BISECTIONS = 55  # halve an interval to the precision of its ends


class State:
    """Coefficients with the scores and the objective that belong to them."""

    def __init__(self, w: Floats, b: Floats, scores: Floats, objective: float) -> None:
        self.w, self.b, self.scores, self.objective = w, b, scores, objective
        self.step = np.inf
        self.iterations = 0


class Logistic:
    """A classification problem that is solved for several penalties and starts.

    Args:
        x: the features, dense or CSC.
        targets: 1 where a sample belongs to a row's class, else 0, (n, rows). One row means two
            classes.
        shares: the weights of the samples, with sum 1.
        fit_intercept: whether to fit b.
    """

    def __init__(self, x: Any, targets: Floats, shares: Floats, fit_intercept: bool) -> None:
        self.fit_intercept = fit_intercept
        means = np.asarray(x.T @ shares).ravel() if fit_intercept else np.zeros(x.shape[1])
        # Centring changes only the intercept. Otherwise an error of the intercept would look like
        # a large gradient of features with large means. A sparse x is centred in its products.
        self.means = means
        self.x = x if sparse.issparse(x) else np.asfortranarray(x - means)
        self.offsets = means if sparse.issparse(x) else np.zeros_like(means)
        self.targets, self.shares = targets, shares
        bound = make_design(x, np.sqrt(shares / 4), means if fit_intercept else None)
        self.norms = bound.norms
        null = self.state(np.zeros((targets.shape[1], x.shape[1])), np.zeros(targets.shape[1]))
        if fit_intercept:
            rate = np.clip(shares @ targets, 1e-12, 1 - 1e-12)
            b = np.log(rate / (1 - rate)) if len(rate) == 1 else np.log(rate)
            null = self.state(null.w, b)
        self.null = null
        self.scale = float(np.sqrt(2 * self._loss(null.scores))) or 1.0

    def state(self, w: Floats, b: Floats, terms: Terms | None = None) -> State:
        """Return the state of coefficients for the centred features."""
        scores = np.asarray(self.x @ w.T) + (b - w @ self.offsets)
        penalty = terms.value(w) if terms else 0.0
        return State(w, b, scores, self._loss(scores) + penalty)

    def solve(self, terms: Terms, start: State, tol: float, max_iter: int) -> State:
        """Minimise from one start."""
        # Constant features are left out; those of a previous fit to other data may have been used.
        now = self.state(np.where(self.norms > 0, start.w, 0.0), start.b.copy(), terms)
        cut = terms.cut(self.norms)
        with single_threaded():
            while True:
                q = self._correlations(now.scores)
                steps = np.stack(
                    [
                        kernels().steps(terms, self.norms, cut, w, np.ascontiguousarray(part))
                        for w, part in zip(now.w, q.T, strict=True)
                    ]
                )
                now.step = max(float(steps.max(initial=0.0)), self._intercept_step(now.scores))
                now.step /= self.scale
                if now.step <= tol or now.iterations >= max_iter:
                    break
                now.iterations += 1
                inner = max(tol / 4, 0.01 * now.step)
                before = now.objective
                for k in range(len(now.w)):
                    self._newton_step(terms, now, k, _working_set(now.w[k], steps[k]), inner)
                if len(now.w) > 1:
                    self._shift(terms, now)
                if not now.objective < before:  # rounding errors are all that is left
                    break
        if self.fit_intercept:
            self._fit_intercepts(terms, now)
        return now

    def solve_from_several(
        self, terms: Terms, start: State | None, n_starts: int, tol: float, max_iter: int
    ) -> State:
        """Minimise from several starts and return the state with the lowest objective."""
        first = start or self.null
        norms = self.norms[self.norms > 0]
        if terms.convex or n_starts == 1 or not len(norms):
            return self.solve(terms, first, tol, max_iter)
        norm = float(np.median(norms))
        found = [self.solve(terms, first, _ROUGH, max_iter)]
        lasso = self.solve(relax(terms, 1.0, norm), first, _ROUGH, max_iter)
        found.append(self.solve(terms, lasso, _ROUGH, max_iter))
        if n_starts > 2:
            middle = self.solve(relax(terms, 0.5, norm), lasso, _ROUGH, max_iter)
            found.append(self.solve(terms, middle, _ROUGH, max_iter))
        if n_starts > 3 and start is not None:
            found.append(self.solve(terms, self.null, _ROUGH, max_iter))
        best = min(found, key=lambda state: state.objective)
        result = self.solve(terms, best, tol, max_iter)
        result.iterations += sum(state.iterations for state in found)
        return result

    def dual_gap(self, terms: Terms, state: State) -> float:
        """Return the duality gap for a convex penalty, and NaN for another one.

        The dual point are the predicted probabilities, moved towards the targets until they are
        feasible. The gap bounds how far the objective is above its minimum.
        """
        if not terms.convex or not terms.pairs:
            return float("nan")
        q = self._correlations(state.scores)
        change = self._probabilities(state.scores) - self.targets
        lowest = np.inf
        for share in terms.dual_shares(q):
            dual = self.targets + share * change
            entropy = special.entr(dual).sum(axis=1)
            if dual.shape[1] == 1:
                entropy = entropy + special.entr(1 - dual[:, 0])
            value = self.shares @ entropy - terms.conjugate_sum(share * q.ravel())
            lowest = min(lowest, state.objective - float(value))
        return max(lowest, 0.0)

    def _loss(self, scores: Floats) -> float:
        if scores.shape[1] == 1:
            losses = np.logaddexp(0.0, scores[:, 0]) - self.targets[:, 0] * scores[:, 0]
        else:
            losses = special.logsumexp(scores, axis=1) - (self.targets * scores).sum(axis=1)
        return float(self.shares @ losses)

    def _probabilities(self, scores: Floats) -> Floats:
        one = scores.shape[1] == 1
        return np.asarray(special.expit(scores) if one else special.softmax(scores, axis=1))

    def _weighted_errors(self, scores: Floats) -> Floats:
        return np.asarray(self.shares[:, None] * (self.targets - self._probabilities(scores)))

    def _correlations(self, scores: Floats) -> Floats:
        """Return the negative gradient with respect to the coefficients, (d, rows)."""
        errors = self._weighted_errors(scores)
        return np.asarray(self.x.T @ errors) - np.outer(self.offsets, errors.sum(axis=0))

    def _intercept_step(self, scores: Floats) -> float:
        """Return the largest step of an intercept with curvature 1/4, as a change of the scores."""
        if not self.fit_intercept:
            return 0.0
        return 2 * float(np.abs(self._weighted_errors(scores).sum(axis=0)).max())

    def _newton_step(self, terms: Terms, now: State, k: int, columns: Any, tol: float) -> None:
        """Minimise the quadratic model of row k over some columns; update the state."""
        errors = self._weighted_errors(now.scores)[:, k]
        chance = self._probabilities(now.scores)[:, k]
        newton = np.maximum(chance * (1 - chance), _LEAST_CURVATURE)
        x, w, offsets = self.x[:, columns], now.w[k, columns], self.offsets[columns]
        old = now.scores[:, k].copy()
        rest = now.objective - self._loss(now.scores) - terms.value(w)
        for blend in (0.0, 0.3, 1.0):
            curvature = self.shares * (newton + blend * (0.25 - newton))
            used = curvature > 0
            target = np.zeros_like(errors)
            target[used] = errors[used] / curvature[used]
            target += x @ w - offsets @ w
            total = curvature.sum()
            means, middle = None, 0.0
            if self.fit_intercept:
                means = np.asarray(x.T @ curvature).ravel() / total
                middle = float(curvature @ target) / total
            roots = np.sqrt(curvature)
            problem = LeastSquares(make_design(x, roots, means), roots * (target - middle))
            limit = tol * self.scale / problem.scale
            new = problem.solve(terms, w, limit, _INNER_SWEEPS).w
            # means and offsets belong to x and to its centred form
            shift = middle - float((means - offsets) @ new) if means is not None else 0.0
            now.scores[:, k] = old + (x @ (new - w) - offsets @ (new - w)) + shift
            objective = self._loss(now.scores) + terms.value(new) + rest
            if objective < now.objective:
                now.w[k, columns] = new
                now.b[k] += shift
                now.objective = objective
                return
        now.scores[:, k] = old

    def _fit_intercepts(self, terms: Terms, now: State) -> None:
        """Minimise over the intercepts alone, which makes the dual point feasible."""
        for _ in range(_INTERCEPT_STEPS):
            chance = self._probabilities(now.scores)
            gradient = self._weighted_errors(now.scores).sum(axis=0)
            weighted = self.shares[:, None] * chance
            hessian = np.diag(weighted.sum(axis=0)) - chance.T @ weighted
            step = np.linalg.lstsq(hessian, gradient, rcond=1e-12)[0]
            new = self.state(now.w, now.b + step, terms)
            # Small steps change the objective by less than its rounding error.
            if not new.objective <= now.objective * (1 + _ROUNDING):
                return
            now.b, now.scores, now.objective = new.b, new.scores, new.objective

    def _shift(self, terms: Terms, now: State) -> None:
        """Add a constant to all classes' coefficients of a feature where it lowers the penalty.

        The probabilities do not change. Newton steps on one class at a time would approach the
        best constant slowly.
        """
        used = np.flatnonzero(now.w.any(axis=0))
        w = now.w[:, used]
        candidates = np.vstack([np.zeros((1, len(used))), w])
        if terms.convex and terms.largest_p > 1:
            candidates = np.vstack([candidates, _best_constant(terms, w)])
        values = np.array([_column_values(terms, w - shift) for shift in candidates])
        best = candidates[values.argmin(axis=0), np.arange(len(used))]
        best[values.min(axis=0) >= values[0]] = 0.0
        if best.any():
            now.w[:, used] = w - best
            moved = self.state(now.w, now.b, terms)
            now.scores, now.objective = moved.scores, moved.objective


def _best_constant(terms: Terms, w: Floats) -> Floats:
    """Return for each column the constant c that minimises the convex penalty of ``w - c``."""
    low, high = w.min(axis=0), w.max(axis=0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        above = terms.slope(w - middle).sum(axis=0) < 0
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.asarray((low + high) / 2)


def _column_values(terms: Terms, w: Floats) -> Floats:
    """Return the penalty of each column."""
    size = np.abs(w)
    total = np.zeros(w.shape[1])
    for p, lam in terms.pairs:
        total += lam / (p or 1) * (size**p if p else size != 0).sum(axis=0)
    return total


def _working_set(w: Floats, steps: Floats) -> Any:
    """Return the non-zero coefficients and the features with the largest steps."""
    size = max(_FIRST_SET, 2 * int(np.count_nonzero(w)))
    score = np.where(w != 0, np.inf, steps)
    candidates = np.flatnonzero(score > 0)
    return np.sort(candidates[np.argsort(-score[candidates], kind="stable")[:size]])
