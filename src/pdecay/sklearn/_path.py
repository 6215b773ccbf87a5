"""Regularisation paths and cross-validation of bridge regression."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from sklearn.model_selection import check_cv
from sklearn.utils import check_X_y
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import validate_data

from pdecay._core.penalty import Penalty
from pdecay._core.validation import check_count, check_number
from pdecay._utils.imports import safe_path
from pdecay.sklearn._kernels import kernels
from pdecay.sklearn._regressor import (
    BridgeRegressor,
    Data,
    as_penalty,
    check_solver_settings,
    sample_shares,
    warn_not_converged,
)
from pdecay.sklearn._solver import LeastSquares
from pdecay.sklearn._terms import Floats, Terms, entry_strength

_BISECTIONS = 60


class BridgePath(NamedTuple):
    """Solutions for decreasing lam."""

    lams: Floats
    """The strengths, or with `penalty` the factors of its strengths, (n_lams,)."""
    coefs: Floats
    """The coefficients, (n_features, n_lams)."""
    intercepts: Floats
    """The intercepts, (n_lams,)."""
    objectives: Floats
    """The minima that were found, (n_lams,)."""


def bridge_path(
    X: Any,  # noqa: N803
    y: Any,
    *,
    p: float = 0.5,
    penalty: Penalty | None = None,
    lams: Any = None,
    n_lams: int = 100,
    eps: float = 1e-3,
    sample_weight: Any = None,
    fit_intercept: bool = True,
    n_starts: int = 3,
    tol: float = 1e-8,
    max_iter: int = 10000,
) -> BridgePath:
    """Fit :class:`BridgeRegressor` for a sequence of decreasing lam.

    Each solution is a start of the next one.

    Args:
        X, y, sample_weight: as in :meth:`BridgeRegressor.fit`.
        p, fit_intercept, n_starts, tol, max_iter: as in :class:`BridgeRegressor`.
        penalty: a penalty instead of p. The path multiplies it by the values in `lams`.
        lams: the strengths. By default `n_lams` values from the smallest one at which zero is a
            fixed point of the solver (for p > 1: at which coefficients are small) down to `eps`
            times that value.
        n_lams: the number of strengths if `lams` is None.
        eps: the ratio of the smallest to the largest strength if `lams` is None.

    Example:
        >>> path = bridge_path(np.eye(3), [3.0, 2.0, 1.0], p=1, lams=[0.5, 0.1],
        ...                    fit_intercept=False)
        >>> path.coefs.round(3)
        array([[1.5, 2.7],
               [0.5, 1.7],
               [0. , 0.7]])
    """
    base = as_penalty(p, 1.0, penalty)
    check_solver_settings(n_starts, tol, max_iter)
    X, y = check_X_y(X, y, accept_sparse="csc", dtype=np.float64, y_numeric=True)
    data = Data(X, y, sample_weight, fit_intercept)
    grid = lam_grid(data.problem, base, lams, n_lams, eps)
    return _fit_path(data, base, grid, n_starts, tol, max_iter)


def _fit_path(
    data: Data, base: Penalty, lams: Floats, n_starts: int, tol: float, max_iter: int
) -> BridgePath:
    problem, start = data.problem, None
    solutions = []
    for lam in lams:
        found = problem.solve_from_several(Terms(base, lam), start, n_starts, tol, max_iter)
        start = found.w
        solutions.append(found)
    step = max((found.step for found in solutions), default=0.0)
    if step > tol:
        warn_not_converged("bridge_path", max_iter, step, tol)
    coefs = np.stack([found.w for found in solutions], axis=1)
    intercepts = np.array([data.intercept(found.w) for found in solutions])
    return BridgePath(lams, coefs, intercepts, np.array([found.objective for found in solutions]))


def lam_grid(problem: LeastSquares, base: Penalty, lams: Any, n_lams: int, eps: float) -> Floats:
    """Return the strengths of a path in decreasing order."""
    if lams is not None:
        values = [check_number("lams", float(lam)) for lam in np.ravel(lams)]
        if not values:
            raise ValueError("lams must have at least one value, got none")
        return np.array(sorted(values, reverse=True))
    check_count("n_lams", n_lams)
    if not 0 < check_number("eps", eps) < 1:
        raise ValueError(f"eps must be above 0 and below 1, got {eps!r}")
    largest = _largest_lam(problem, base)
    return np.asarray(np.geomspace(largest, largest * eps, n_lams))


def _largest_lam(problem: LeastSquares, base: Penalty) -> float:
    """Return the smallest factor of the penalty at which zero is a fixed point."""
    used = problem.design.norms > 0
    norms, correlation = problem.design.norms[used], np.abs(problem.correlation[used])
    pairs = Terms(base).pairs
    if not correlation.any() or not pairs:
        return 1.0
    correlation = np.maximum(correlation, 1e-300)
    largest = [float(np.max(entry_strength(p, norms, correlation))) / lam for p, lam in pairs]
    high = min(largest)  # each term alone is enough
    if len(pairs) == 1:
        return high * (1 + 1e-9)
    low, cut = high * 1e-6, np.zeros_like(norms)
    for _ in range(_BISECTIONS):
        middle = float(np.sqrt(low * high))
        steps = kernels().steps(Terms(base, middle), norms, cut, np.zeros_like(norms), correlation)
        low, high = (middle, high) if steps.any() else (low, middle)
    return high


class BridgeRegressorCV(BridgeRegressor):
    """Bridge regression with p and lam chosen by cross-validation.

    Args:
        p: the norm, or a sequence of norms to choose from.
        penalty: a penalty instead of p; lam multiplies it.
        lams: the strengths to choose from; by default `n_lams` values for each p.
        n_lams, eps: as in :func:`bridge_path`.
        cv: the folds: a number, a splitter or an iterable of splits; None means 5 folds.
        n_jobs: the number of processes, as in scikit-learn.
        fit_intercept, n_starts, tol, max_iter: as in :class:`BridgeRegressor`.

    Attributes:
        p_: the chosen p (None with `penalty`).
        lam_: the chosen strength.
        lams_: the strengths that were compared, (n_p, n_lams).
        mse_path_: the mean squared errors, (n_p, n_lams, n_folds); NaN for folds without weight.
        coef_, intercept_, ...: those of :class:`BridgeRegressor`, fitted to all data.
    """

    def __init__(
        self,
        p: Any = 0.5,
        *,
        penalty: Penalty | None = None,
        lams: Any = None,
        n_lams: int = 50,
        eps: float = 1e-3,
        cv: Any = None,
        n_jobs: int | None = None,
        fit_intercept: bool = True,
        n_starts: int = 3,
        tol: float = 1e-8,
        max_iter: int = 10000,
    ) -> None:
        self.p = p
        self.penalty = penalty
        self.lams = lams
        self.n_lams = n_lams
        self.eps = eps
        self.cv = cv
        self.n_jobs = n_jobs
        self.fit_intercept = fit_intercept
        self.n_starts = n_starts
        self.tol = tol
        self.max_iter = max_iter

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Choose p and lam by cross-validation, then fit to all data.

        Args:
            X, y: as in :meth:`BridgeRegressor.fit`.
            sample_weight: weights of the samples, (n,), in the fits and in the errors.
        """
        given: Any = self.p
        several = np.ndim(given) and self.penalty is None
        candidates: list[Any] = list(given) if several else [given]
        bases = [as_penalty(p, 1.0, self.penalty) for p in candidates]
        if not bases:
            raise ValueError("p must have at least one value, got none")
        check_solver_settings(self.n_starts, self.tol, self.max_iter)
        X, y = validate_data(
            self, X, y, accept_sparse="csc", dtype=np.float64,
            y_numeric=True,
        )  # fmt: skip
        weights = sample_shares(sample_weight, X)
        problem = Data(X, y, weights, self.fit_intercept).problem
        grids = [lam_grid(problem, base, self.lams, self.n_lams, self.eps) for base in bases]
        folds = list(check_cv(self.cv).split(X, y))
        solver = (self.fit_intercept, self.n_starts, self.tol, self.max_iter)
        with safe_path():  # joblib uses `python -m`
            errors = Parallel(n_jobs=self.n_jobs)(
                delayed(_fold_errors)(X, y, weights, fold, bases, grids, solver) for fold in folds
            )
        self.lams_, self.mse_path_ = np.array(grids), np.stack(errors, axis=-1)
        shares = np.array([weights[test].sum() for _, test in folds])
        used = shares > 0
        mean = self.mse_path_[:, :, used] @ (shares[used] / shares.sum())
        best, where = np.unravel_index(np.argmin(mean), mean.shape)
        self.p_ = None if self.penalty is not None else float(candidates[best])
        self.lam_ = float(self.lams_[best, where])
        return self._fit(X, y, weights, Terms(bases[best], self.lam_), None)


def _fold_errors(
    x: Any, y: Floats, weights: Floats, fold: Any, bases: list[Penalty], grids: list[Floats],
    solver: tuple[bool, int, float, int],
) -> Floats:  # fmt: skip
    """Return the mean squared errors on the test part of a fold, (n_p, n_lams)."""
    train, test = fold
    fit_intercept, n_starts, tol, max_iter = solver
    data = Data(x[train], y[train], weights[train], fit_intercept)
    errors = []
    for base, grid in zip(bases, grids, strict=True):
        path = _fit_path(data, base, grid, n_starts, tol, max_iter)
        residuals = y[test][:, None] - x[test] @ path.coefs - path.intercepts
        total = weights[test].sum()
        errors.append(weights[test] @ residuals**2 / total if total else np.full(len(grid), np.nan))
    return np.array(errors)
