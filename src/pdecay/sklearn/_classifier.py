"""Logistic regression with a p-norm penalty as a scikit-learn estimator."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy import special
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from pdecay._core.penalty import Penalty
from pdecay.sklearn._logistic import Logistic
from pdecay.sklearn._regressor import (
    as_penalty,
    check_solver_settings,
    sample_shares,
    warn_not_converged,
)
from pdecay.sklearn._terms import Floats, Terms


class BridgeClassifier(ClassifierMixin, BaseEstimator):
    """Logistic regression with the penalty ``(lam / p) * sum |w|^p``, for any p >= 0.

    Minimises the mean log loss plus the penalty of all coefficients. Two classes have one row of
    coefficients; more classes have one row each (multinomial). For n samples, scikit-learn's
    ``LogisticRegression(C=1 / (n * lam))`` has the same objective: p = 1 is its L1 penalty, p = 2
    its L2 penalty. The other arguments are those of :class:`BridgeRegressor`.

    Args:
        p, lam, penalty, warm_start: as in :class:`BridgeRegressor`.
        fit_intercept: whether to fit an intercept for each row; it is not penalised.
        n_starts: the number of starting points that are compared for p < 1, from 1 to 4.
        tol: the solver stops when no coordinate step is larger than `tol`, relative to the square
            root of twice the loss without features.
        max_iter: the largest number of Newton steps for each row, from one start.

    Attributes:
        classes_: the class labels.
        coef_: the coefficients, (1, n_features) or (n_classes, n_features).
        intercept_: the intercepts, (1,) or (n_classes,).
        n_iter_: the number of Newton steps, those of all starts included.
        objective_: the minimum that was found.
        optimality_: the largest coordinate step that is left, in units of `tol`'s definition.
        dual_gap_: for p >= 1 an upper bound of the distance of `objective_` to the minimum; NaN
            for p < 1 and without penalty.
        n_features_in_: the number of features seen in `fit`.
        feature_names_in_: their names, if X has string column names.

    Example:
        >>> X = np.array([[-2.0, 1.0], [-1.0, -1.0], [1.0, 1.0], [2.0, -1.0]])
        >>> model = BridgeClassifier(p=1, lam=0.1).fit(X, ["no", "no", "yes", "yes"])
        >>> model.coef_.round(2), model.predict([[3.0, 0.0]])
        (array([[1.78, 0.  ]]), array(['yes'], dtype='<U3'))
    """

    coef_: Floats
    intercept_: Floats

    def __init__(
        self,
        p: float = 0.5,
        lam: float = 0.01,
        *,
        penalty: Penalty | None = None,
        fit_intercept: bool = True,
        n_starts: int = 3,
        tol: float = 1e-7,
        max_iter: int = 1000,
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
            X: as in :meth:`BridgeRegressor.fit`.
            y: the class labels, (n,).
            sample_weight: weights of the samples, (n,); the mean loss is weighted by them.
        """
        terms = Terms(as_penalty(self.p, self.lam, self.penalty))
        check_solver_settings(self.n_starts, self.tol, self.max_iter)
        fitted = self.warm_start and hasattr(self, "coef_")
        previous = (self.coef_, self.intercept_) if fitted else None
        X, y = validate_data(self, X, y, accept_sparse="csc", dtype=np.float64)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "BridgeClassifier needs samples of at least 2 classes, but the data contains only "
                f"one class: {self.classes_[0]!r}"
            )
        targets = np.eye(len(self.classes_))[labels]
        if len(self.classes_) == 2:
            targets = targets[:, 1:]
        problem = Logistic(X, targets, sample_shares(sample_weight, X), self.fit_intercept)
        start = None
        if previous is not None and previous[0].shape == problem.null.w.shape:
            w, b = previous
            start = problem.state(w, b + w @ problem.means, terms)
        found = problem.solve_from_several(terms, start, self.n_starts, self.tol, self.max_iter)
        if found.step > self.tol:  # also where rounding errors stopped the solver
            warn_not_converged(type(self).__name__, self.max_iter, found.step, self.tol)
        self.coef_ = found.w
        self.intercept_ = found.b - found.w @ problem.means
        if len(self.intercept_) > 1:  # a constant changes no probability
            self.intercept_ -= self.intercept_.mean()
        self.n_iter_, self.objective_ = max(found.iterations, 1), found.objective
        self.optimality_ = found.step
        self.dual_gap_ = problem.dual_gap(terms, found)
        return self

    def decision_function(self, X: Any) -> Floats:  # noqa: N803
        """Return the scores ``X w + b``, (n,) for two classes, else (n, n_classes)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse=("csr", "csc"), dtype=np.float64, reset=False)
        scores = np.asarray(safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict_proba(self, X: Any) -> Floats:  # noqa: N803
        """Return the probabilities of the classes, (n, n_classes)."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            chance = special.expit(scores)
            return np.stack([special.expit(-scores), chance], axis=1)
        return np.asarray(special.softmax(scores, axis=1))

    def predict_log_proba(self, X: Any) -> Floats:  # noqa: N803
        """Return the logarithms of the probabilities of the classes, (n, n_classes)."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([special.log_expit(-scores), special.log_expit(scores)], axis=1)
        return np.asarray(special.log_softmax(scores, axis=1))

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """Return the most probable class of each sample."""
        scores = self.decision_function(X)
        best = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[best])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
