"""Linear regression with a p-norm penalty (bridge regression) as a scikit-learn estimator."""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from pdecay._core.penalty import Lp, Penalty
from pdecay._core.validation import check_count, check_number
from pdecay.sklearn._design import make_design
from pdecay.sklearn._solver import LeastSquares
from pdecay.sklearn._terms import Floats, Terms


class BridgeRegressor(RegressorMixin, BaseEstimator):
    """Linear regression with the penalty ``(lam / p) * sum |w|^p``, for any p >= 0.

    Minimises, over coefficients w and the intercept b::

        1 / (2 * n) * ||y - X w - b||^2 + (lam / p) * sum_j |w_j|^p .

    p = 1 is the Lasso with ``alpha=lam``; p = 2 is ridge regression with ``alpha=n * lam``; p = 0
    counts the non-zero coefficients with price lam. Coefficients are exactly zero for p <= 1. Below
    1 large coefficients are shrunk less and fewer features are kept than by the Lasso at the same
    error. The objective then has several local minima: the solver compares several starts, and its
    result cannot be improved by changing any one coefficient.

    Args:
        p: the norm, a number >= 0.
        lam: its strength, a number >= 0.
        penalty: an :class:`pdecay.Lp` or a sum of them, instead of p and lam. An elastic net with
            `alpha` and `l1_ratio` is ``Lp(1, alpha * l1_ratio) + Lp(2, alpha * (1 - l1_ratio))``.
        fit_intercept: whether to fit b; it is not penalised.
        n_starts: the number of starting points that are compared for p < 1, from 1 to 5.
        tol: the solver stops when no coordinate step changes the prediction by more than `tol`
            times the norm of the centred y.
        max_iter: the largest number of sweeps over the coefficients from one start.
        warm_start: whether to start from the coefficients of the previous call of `fit`.

    Attributes:
        coef_: the coefficients, (n_features,).
        intercept_: b, a number.
        n_iter_: the number of sweeps of coordinate descent, those of all starts included.
        objective_: the minimum that was found.
        optimality_: the largest coordinate step that is left, in units of `tol`'s definition.
        dual_gap_: for p >= 1 an upper bound of the distance of `objective_` to the minimum; NaN
            for p < 1 and without penalty.
        n_features_in_: the number of features seen in `fit`.
        feature_names_in_: their names, if X has string column names.

    Example:
        >>> import numpy as np
        >>> X = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [3.0, 0.0]])
        >>> BridgeRegressor(p=0.5, lam=0.1).fit(X, 2 * X[:, 0]).coef_.round(2)
        array([1.94, 0.  ])
    """

    def __init__(
        self,
        p: float = 0.5,
        lam: float = 0.01,
        *,
        penalty: Penalty | None = None,
        fit_intercept: bool = True,
        n_starts: int = 3,
        tol: float = 1e-8,
        max_iter: int = 10000,
        warm_start: bool = False,
    ) -> None:
        self.p = p
        self.lam = lam
        self.penalty = penalty
        self.fit_intercept = fit_intercept
        self.n_starts = n_starts
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Fit the coefficients.

        Args:
            X: the features, a dense array or a scipy sparse matrix of shape (n, d).
            y: the targets, (n,).
            sample_weight: weights of the samples, (n,); the objective divides by their sum.
        """
        terms = Terms(as_penalty(self.p, self.lam, self.penalty))
        check_solver_settings(self.n_starts, self.tol, self.max_iter)
        start = getattr(self, "coef_", None) if self.warm_start else None
        X, y = validate_data(
            self, X, y, accept_sparse="csc", dtype=np.float64,
            y_numeric=True,
        )  # fmt: skip
        return self._fit(X, y, sample_weight, terms, start)

    def _fit(self, X: Any, y: Any, weights: Any, terms: Terms, start: Any) -> Self:  # noqa: N803
        """Fit validated data."""
        data = Data(X, y, weights, self.fit_intercept)
        if start is not None and len(start) != X.shape[1]:
            start = None
        problem = data.problem
        found = problem.solve_from_several(terms, start, self.n_starts, self.tol, self.max_iter)
        if not found.converged(self.tol):
            warn_not_converged(type(self).__name__, self.max_iter, found.step, self.tol)
        self.coef_, self.intercept_ = found.w, data.intercept(found.w)
        self.n_iter_, self.objective_ = max(problem.sweeps, 1), found.objective
        self.optimality_ = found.step
        self.dual_gap_ = problem.dual_gap(terms, found)
        return self

    def predict(self, X: Any) -> Floats:  # noqa: N803
        """Return ``X w + b``."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse=("csr", "csc"), dtype=np.float64, reset=False)
        return np.asarray(safe_sparse_dot(X, self.coef_, dense_output=True) + self.intercept_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class Data:
    """Validated data as a least-squares problem without intercept.

    Args:
        x: the features, dense or CSC.
        y: the targets.
        sample_weight: weights of the samples, or None.
        fit_intercept: whether to centre x and y.
    """

    def __init__(self, x: Any, y: Floats, sample_weight: Any, fit_intercept: bool) -> None:
        shares = sample_shares(sample_weight, x)
        roots = np.sqrt(shares)
        y = np.asarray(y, dtype=np.float64)
        self.means = np.asarray(x.T @ shares).ravel() if fit_intercept else None
        self.y_mean = float(shares @ y) if fit_intercept else 0.0
        design = make_design(x, roots, self.means)
        target = roots * (y - self.y_mean)
        with np.errstate(over="ignore"):
            if not np.isfinite(target @ target):
                raise ValueError(
                    f"the sum of the squares of y overflows: |y| is up to {np.abs(y).max():.1e} "
                    "and should be below 1e150; divide y by a constant"
                )
        self.problem = LeastSquares(design, target)

    def intercept(self, w: Floats) -> float:
        """Return the intercept that belongs to the coefficients."""
        return self.y_mean - float(self.means @ w) if self.means is not None else 0.0


def sample_shares(sample_weight: Any, x: Any) -> Floats:
    """Return the samples' weights divided by their sum."""
    weights = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
    if not weights.any():
        raise ValueError("sample_weight must have a positive sum, got only zeros")
    weights = weights / weights.max()  # the sum of large weights may overflow
    return np.asarray(weights / weights.sum())


def as_penalty(p: Any, lam: Any, penalty: Any) -> Penalty:
    """Return the penalty of an estimator's parameters."""
    if penalty is None:
        return Lp(p, lam)
    if not isinstance(penalty, Penalty):
        raise TypeError(f"penalty must be None, an Lp or a sum of Lp, got {penalty!r}")
    return penalty


def check_solver_settings(n_starts: Any, tol: Any, max_iter: Any) -> None:
    """Raise an error if a setting of the solver is not a number in its range."""
    check_count("n_starts", n_starts)
    check_count("max_iter", max_iter)
    check_number("tol", tol)


def warn_not_converged(name: str, max_iter: int, step: float, tol: float) -> None:
    """Warn that the solver stopped before it reached its tolerance, and suggest a remedy."""
    warnings.warn(
        f"{name} did not converge in max_iter={max_iter}: the largest remaining step is "
        f"{step:.1e}, tol is {tol:.1e}. Scale the features to similar size (StandardScaler), "
        "increase max_iter, or choose a larger tol or lam.",
        ConvergenceWarning,
        stacklevel=3,
    )
