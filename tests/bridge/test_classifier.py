"""BridgeClassifier: known answers, optimality, input forms and errors."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from pdecay import Lp
from pdecay.sklearn import BridgeClassifier

from .problems import classification, logistic_objective

PENALTIES = [
    Lp(0, 0.01),
    Lp(0.5, 0.01),
    Lp(0.5, 0.01) + Lp(2, 0.01),
    Lp(1, 0.02),
    Lp(1, 0.01) + Lp(2, 0.01),
    Lp(1.5, 0.02),
    Lp(2, 0.02),
    Lp(3, 0.02),
]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("lam", [0.05, 0.005])
@pytest.mark.parametrize("l1_ratio", [0.0, 0.5, 1.0])
def test_equals_scikit_learn(classes, lam, l1_ratio):
    x, y = classification(classes=classes)
    x = (x - x.mean(axis=0)) / x.std(axis=0)  # saga needs it
    penalty = Lp(1, lam * l1_ratio) + Lp(2, lam * (1 - l1_ratio))
    ours = BridgeClassifier(penalty=penalty).fit(x, y)
    solver = "saga" if l1_ratio else "newton-cg"
    other = LogisticRegression(
        C=1 / (len(y) * lam), l1_ratio=l1_ratio, solver=solver, tol=1e-9, max_iter=50000
    ).fit(x, y)
    value = logistic_objective(ours, x, y, penalty)
    assert value == pytest.approx(logistic_objective(other, x, y, penalty), rel=1e-8)
    assert ((ours.coef_ != 0) == (other.coef_ != 0)).all()
    np.testing.assert_allclose(ours.predict_proba(x), other.predict_proba(x), atol=1e-4)
    assert ours.objective_ == pytest.approx(value)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_no_coefficient_can_be_improved(classes, penalty):
    x, y = classification(classes=classes)
    model = BridgeClassifier(penalty=penalty).fit(x, y)
    assert model.optimality_ <= model.tol
    best = logistic_objective(model, x, y, penalty)
    rng = np.random.default_rng(0)
    for _ in range(50):
        k, j = rng.integers(len(model.coef_)), rng.integers(x.shape[1])
        before = model.coef_[k, j]
        # Steps within reach of the quadratic upper bound, by which the solver is optimal.
        model.coef_[k, j] += rng.standard_normal() * 0.01
        assert logistic_objective(model, x, y, penalty) >= best - 1e-12
        model.coef_[k, j] = before


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("penalty", PENALTIES[3:], ids=str)
def test_dual_gap_bounds_the_distance_to_the_minimum(classes, penalty):
    x, y = classification(classes=classes)
    exact = BridgeClassifier(penalty=penalty, tol=1e-8).fit(x, y)
    assert 0 <= exact.dual_gap_ <= 1e-6
    rough = BridgeClassifier(penalty=penalty, tol=3e-2).fit(x, y)
    assert rough.dual_gap_ >= rough.objective_ - exact.objective_ - 1e-4
    assert np.isnan(BridgeClassifier(0.5, 0.1).fit(x, y).dual_gap_)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("p", [0.5, 1, 1.5])
def test_sparse_and_dense_features_give_the_same(classes, p):
    x, y = classification(classes=classes)
    x = np.where(np.abs(x) > 0.5, x, 0.0)
    weights = np.random.default_rng(0).uniform(0.0, 2.0, len(y))
    dense = BridgeClassifier(p, 0.02).fit(x, y, weights)
    found = BridgeClassifier(p, 0.02).fit(sparse.csr_array(x), y, weights)
    assert found.objective_ == pytest.approx(dense.objective_, rel=1e-2 if p < 1 else 1e-9)
    if p >= 1:
        np.testing.assert_allclose(found.predict_proba(x), dense.predict_proba(x), atol=1e-4)


def test_small_p_keeps_fewer_features_than_the_lasso():
    x, y = classification(400, 60)
    lasso = BridgeClassifier(1, 0.04).fit(x, y)
    bridge = BridgeClassifier(0.5, 0.01).fit(x, y)
    assert np.count_nonzero(bridge.coef_) <= np.count_nonzero(lasso.coef_) / 2
    assert bridge.score(x, y) >= lasso.score(x, y)


def test_separable_data_stays_finite():
    x = np.linspace(-1, 1, 40)[:, None]
    model = BridgeClassifier(1, 1e-4).fit(x, x[:, 0] > 0)
    assert np.isfinite(model.coef_).all()
    assert model.score(x, x[:, 0] > 0) == 1


def test_warm_start_needs_fewer_steps():
    x, y = classification(classes=3)
    model = BridgeClassifier(1, 0.01, warm_start=True).fit(x, y)
    first, objective = model.n_iter_, model.objective_
    model.fit(x, y)
    assert model.n_iter_ < first
    assert model.objective_ == pytest.approx(objective, rel=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("p", [0.5, 1, 2])
def test_sparse_features_with_large_means_converge(p, classes):
    x, y = classification(n=100, d=10, classes=classes)
    x[:, :3] += 1e5
    for lam in (1e-3, 1e-4):
        model = BridgeClassifier(p, lam).fit(sparse.csr_matrix(x), y)
        assert model.optimality_ <= model.tol
        value = logistic_objective(model, x, y, Lp(p, lam))
        assert value == pytest.approx(model.objective_, rel=1e-7)
        if p >= 1:
            assert value == pytest.approx(BridgeClassifier(p, lam).fit(x, y).objective_, rel=1e-6)


def test_warns_if_rounding_errors_stop_the_solver():
    rng = np.random.default_rng(0)
    x = sparse.csr_matrix(rng.normal([1e6, 0.0], 1.0, (60, 2)))
    model = BridgeClassifier(1, 1e-4, tol=1e-15)
    with pytest.warns(ConvergenceWarning, match="largest remaining step"):
        model.fit(x, np.arange(60) % 2)
    assert model.n_iter_ < model.max_iter


@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix])
@pytest.mark.parametrize("intercept", [True, False])
def test_warm_start_on_data_in_which_a_used_feature_is_constant(form, intercept):
    x, y = classification(classes=2)
    model = BridgeClassifier(1, 0.001, fit_intercept=intercept, warm_start=True).fit(form(x), y)
    used = int(np.abs(model.coef_[0]).argmax())
    assert model.coef_[0, used]
    x[:, used] = 2.0 if intercept else 0.0
    model.fit(form(x), y)
    assert model.coef_[0, used] == 0
    value = logistic_objective(model, x, y, Lp(1, 0.001))
    assert model.objective_ == pytest.approx(value, rel=1e-9)
    cold = BridgeClassifier(1, 0.001, fit_intercept=intercept).fit(form(x), y)
    assert value == pytest.approx(cold.objective_, rel=1e-6)


def test_log_probabilities_match_probabilities():
    for classes in (2, 3):
        x, y = classification(classes=classes)
        model = BridgeClassifier(1, 0.02).fit(x, y)
        np.testing.assert_allclose(np.exp(model.predict_log_proba(x)), model.predict_proba(x))
        np.testing.assert_allclose(model.predict_proba(x).sum(axis=1), 1.0)


def test_too_few_steps_warn_with_advice():
    x, y = classification()
    with pytest.warns(ConvergenceWarning, match="BridgeClassifier did not converge in max_iter=1"):
        BridgeClassifier(1, 0.001, max_iter=1).fit(x, y)


def test_errors():
    x, y = classification()
    with pytest.raises(ValueError, match="only one class"):
        BridgeClassifier().fit(x, np.zeros(len(y)))
    with pytest.raises(ValueError, match="Unknown label type"):
        BridgeClassifier().fit(x, np.random.default_rng(0).standard_normal(len(y)))
    with pytest.raises(ValueError, match="p must be finite"):
        BridgeClassifier(p=-1).fit(x, y)
    with pytest.raises(ValueError, match="lam must be finite"):
        BridgeClassifier(lam=-1).fit(x, y)
    with pytest.raises(ValueError, match="NaN"):
        BridgeClassifier().fit(np.where(x > 2, np.nan, x), y)
