"""BridgeRegressor: known answers, optimality, input forms and errors."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import ElasticNet, Lasso, LinearRegression, Ridge
from sklearn.model_selection import GridSearchCV

from pdecay import Lp
from pdecay.sklearn import BridgeRegressor
from pdecay.sklearn._design import DenseDesign
from pdecay.sklearn._systems import Systems

from .problems import regression, regression_objective

PENALTIES = [
    Lp(0, 0.05),
    Lp(0.3, 0.1),
    Lp(0.5, 0.1),
    Lp(0.5, 0.05) + Lp(2, 0.1),
    Lp(0.3, 0.05) + Lp(0.7, 0.05),
    Lp(1, 0.1),
    Lp(1, 0.05) + Lp(2, 0.1),
    Lp(1.5, 0.1),
    Lp(1.2, 0.1) + Lp(3, 0.1),
    Lp(2, 0.1),
    Lp(3, 0.1),
]
CONVEX = [penalty for penalty in PENALTIES if min(p for p, _ in penalty.pairs()) >= 1]


@pytest.mark.parametrize("shape", [(120, 200), (300, 40)])
@pytest.mark.parametrize("alpha", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["lasso", "ridge", "elastic net"])
def test_equals_scikit_learn(shape, alpha, weighted, kind):
    x, y, _ = regression(*shape)
    n = len(y)
    weights = np.random.default_rng(1).uniform(0.1, 2.0, n) if weighted else None
    total = n if weights is None else weights.sum()
    tight = {"tol": 1e-12, "max_iter": 100000}
    penalty, other = {
        "lasso": (Lp(1, alpha), Lasso(alpha, **tight)),
        "ridge": (Lp(2, alpha), Ridge(total * alpha)),
        "elastic net": (
            Lp(1, 0.3 * alpha) + Lp(2, 0.7 * alpha),
            ElasticNet(alpha, l1_ratio=0.3, **tight),
        ),
    }[kind]
    ours = BridgeRegressor(penalty=penalty).fit(x, y, weights)
    other.fit(x, y, weights)
    value = regression_objective(ours, x, y, penalty, weights)
    assert value <= regression_objective(other, x, y, penalty, weights) * (1 + 1e-8)
    assert ((ours.coef_ != 0) == (other.coef_ != 0)).all()
    np.testing.assert_allclose(ours.coef_, other.coef_, atol=1e-5)
    assert ours.objective_ == pytest.approx(value)


def test_p_and_lam_equal_the_penalty():
    x, y, _ = regression()
    one = BridgeRegressor(0.7, 0.2).fit(x, y)
    other = BridgeRegressor(penalty=Lp(0.7, 0.2)).fit(x, y)
    assert (one.coef_ == other.coef_).all()


def test_without_penalty_equals_least_squares():
    x, y, _ = regression(100, 20)
    ours = BridgeRegressor(1, 0.0).fit(x, y)
    np.testing.assert_allclose(ours.coef_, LinearRegression().fit(x, y).coef_, atol=1e-6)
    assert np.isnan(ours.dual_gap_)


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_no_coefficient_can_be_improved(penalty):
    x, y, _ = regression()
    model = BridgeRegressor(penalty=penalty).fit(x, y)
    assert model.optimality_ <= model.tol
    best = regression_objective(model, x, y, penalty)
    residual = y - model.predict(x)
    rng = np.random.default_rng(0)
    for j in [*np.flatnonzero(model.coef_)[:10], *rng.choice(len(model.coef_), 10)]:
        for value in (0.0, *(model.coef_[j] + rng.standard_normal(20) * 0.2)):
            w = model.coef_.copy()
            w[j] = value
            change = (value - model.coef_[j]) * (x[:, j] - x[:, j].mean())
            moved = ((residual - change) ** 2).mean() / 2 + float(penalty.value(w))
            assert moved >= best * (1 - 1e-12)


@pytest.mark.parametrize("penalty", CONVEX, ids=str)
@pytest.mark.parametrize("shape", [(120, 200), (200, 30)])
def test_dual_gap_bounds_the_distance_to_the_minimum(penalty, shape):
    x, y, _ = regression(*shape)
    exact = BridgeRegressor(penalty=penalty, tol=1e-12).fit(x, y)
    assert abs(exact.dual_gap_) <= 1e-9 * exact.objective_
    rough = BridgeRegressor(penalty=penalty, tol=1e-2).fit(x, y)
    assert rough.dual_gap_ >= rough.objective_ - exact.objective_ - 1e-12


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_sparse_and_dense_features_give_the_same(penalty, fit_intercept):
    x, y, _ = regression(80, 50)
    x = np.where(np.abs(x) > 1, x + 1, 0.0)
    x[:, 3] = 0.0
    weights = np.random.default_rng(1).uniform(0.0, 2.0, len(y))
    make = BridgeRegressor(penalty=penalty, fit_intercept=fit_intercept)
    dense = clone(make).fit(x, y, weights)
    for form in (sparse.csr_array, sparse.csc_matrix, sparse.coo_array):
        found = clone(make).fit(form(x), y, weights)
        np.testing.assert_allclose(found.coef_, dense.coef_, atol=1e-6)
        np.testing.assert_allclose(found.predict(form(x)), dense.predict(x), atol=1e-6)
    assert dense.coef_[3] == 0


@pytest.mark.parametrize("p", [1.05, 1.5, 2, 2.5, 3])
@pytest.mark.parametrize("lam", [0.1, 1e-3])
@pytest.mark.parametrize("shape", [(60, 150), (150, 60)])
def test_newton_steps_reach_the_minimum(p, lam, shape):
    x, y, _ = regression(*shape, rho=0.9)
    x = np.where(np.abs(x) > 0.5, x, 0.0)
    dense = BridgeRegressor(p, lam).fit(x, y)
    found = BridgeRegressor(p, lam).fit(sparse.csr_array(x), y)
    assert dense.n_iter_ < 200
    assert dense.dual_gap_ <= max(1e-9 * dense.objective_, 1e-11 * y.var())
    # Above 2 the penalty is flat near zero, so that small coefficients are less determined.
    np.testing.assert_allclose(found.coef_, dense.coef_, atol=1e-6 if p <= 2 else 3e-5)


@pytest.mark.parametrize("p", [1 + 1e-12, 1 + 1e-9, 1 + 1e-6, 1.0001, 1.003, 1.01])
@pytest.mark.parametrize("lam", [1e-6, 1e-3, 0.1])
@pytest.mark.parametrize("shape", [(30, 2), (30, 20)])
def test_p_just_above_1_is_close_to_the_lasso(p, lam, shape):
    x, y, _ = regression(*shape, k=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = BridgeRegressor(p=p, lam=lam).fit(x, y)
    lasso = BridgeRegressor(p=1, lam=lam).fit(x, y)
    value = regression_objective(model, x, y, Lp(p, lam))
    assert value <= regression_objective(lasso, x, y, Lp(p, lam)) * (1 + 1e-9)
    assert 0 <= model.dual_gap_ < np.inf


def test_newton_steps_that_diverge_are_not_used():
    x, y = np.full((10, 2), 1e5), 143178 + np.arange(10.0)
    model = BridgeRegressor(p=1.015, lam=0.0086, fit_intercept=False).fit(x, y)
    np.testing.assert_allclose(model.predict(x), y.mean(), rtol=1e-4)


@pytest.mark.parametrize("penalty", [Lp(1.5, 0.01), Lp(2, 0.01), Lp(3, 0.01)], ids=str)
@pytest.mark.parametrize("shape", [(60, 150), (150, 60)])
@pytest.mark.parametrize("make", [np.asarray, sparse.csc_array])
def test_factorised_and_iterated_systems_give_the_same(monkeypatch, penalty, shape, make):
    x, y, _ = regression(*shape)
    found = BridgeRegressor(penalty=penalty).fit(make(x), y)
    monkeypatch.setattr("pdecay.sklearn._systems._FEWEST_ITERATIONS", 1)
    monkeypatch.setattr("pdecay.sklearn._systems._FACTORISATION", 10**6)
    factorised = BridgeRegressor(penalty=penalty).fit(make(x), y)
    assert factorised.objective_ == pytest.approx(found.objective_, rel=1e-9)
    np.testing.assert_allclose(factorised.coef_, found.coef_, atol=3e-5)
    assert factorised.optimality_ <= factorised.tol


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("p", [1.5, 2, 3])
def test_features_beyond_the_range_of_single_precision(scale, p):
    x, y, _ = regression(60, 150)
    near = BridgeRegressor(p, 0.1).fit(x, y)
    far = BridgeRegressor(p, 0.1 * scale**p).fit(x * scale, y)
    np.testing.assert_allclose(far.coef_ * scale, near.coef_, atol=1e-6)


@pytest.mark.parametrize("p", [0.5, 1])
@pytest.mark.parametrize("make", [np.asarray, sparse.csr_array])
def test_residual_mode_equals_gram_mode(monkeypatch, p, make):
    x, y, _ = regression(60, 40)
    with_gram = BridgeRegressor(p, 0.05, n_starts=1).fit(make(x), y)
    monkeypatch.setattr("pdecay.sklearn._solver._LARGEST_GRAM", 0)
    without = BridgeRegressor(p, 0.05, n_starts=1, max_iter=100000).fit(make(x), y)
    assert without.objective_ == pytest.approx(with_gram.objective_, rel=1e-2 if p < 1 else 1e-9)


@pytest.mark.parametrize("p", [0.5, 1.5])
def test_sparse_features_with_duplicate_entries(p):
    x, y, _ = regression(60, 20)
    entries = sparse.csc_array(x)
    twice = sparse.csc_array(
        (np.repeat(entries.data / 2, 2), np.repeat(entries.indices, 2), 2 * entries.indptr),
        shape=x.shape,
    )
    model = BridgeRegressor(p, 0.1).fit(twice, y)
    np.testing.assert_allclose(model.coef_, BridgeRegressor(p, 0.1).fit(x, y).coef_, atol=1e-7)


@pytest.mark.parametrize("make", [sparse.coo_array, sparse.csr_matrix, sparse.csc_array])
def test_sparse_features_with_64_bit_indices(make):
    x, y, _ = regression(60, 20)
    wide = make(x)
    for name in ("indices", "indptr", "coords"):
        if hasattr(wide, name):
            old = getattr(wide, name)
            new = old.astype(np.int64) if name != "coords" else [a.astype(np.int64) for a in old]
            setattr(wide, name, new)
    model = BridgeRegressor().fit(wide, y)
    np.testing.assert_array_equal(model.coef_, BridgeRegressor().fit(make(x), y).coef_)
    np.testing.assert_array_equal(model.predict(wide), model.predict(make(x)))


@pytest.mark.parametrize("lam", [1e-6, 1e-3])
def test_almost_equal_features_with_p_above_2(lam):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 1)) + 1e-3 * rng.standard_normal((300, 40))
    y = x @ rng.standard_normal(40) + rng.standard_normal(300)
    model = BridgeRegressor(3, lam, fit_intercept=False).fit(x, y)
    gradient = x.T @ (x @ model.coef_ - y) / 300 + lam * model.coef_ * np.abs(model.coef_)
    assert np.abs(gradient).max() <= 1e-7


@pytest.mark.parametrize("weight", [1.0, 100.0, 1e6])
@pytest.mark.parametrize("largest", [0, 3000])
def test_systems_with_the_exact_features(monkeypatch, weight, largest):
    monkeypatch.setattr("pdecay.sklearn._systems._LARGEST", largest)  # 0: conjugate gradients
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 1)) + 1e-2 * rng.standard_normal((60, 15))
    systems = Systems(DenseDesign(x, np.ones(60), None))
    systems.exact = True
    weights, right = weight * rng.uniform(1, 2, 15), rng.standard_normal(60)
    found, products = systems.solve(weights, right, 1e-4)
    exact = np.linalg.solve(np.eye(60) + (x * weights) @ x.T, right)
    np.testing.assert_allclose(found, exact, atol=1e-2 * np.abs(exact).max())
    np.testing.assert_allclose(products, x.T @ found, atol=1e-12)


def test_integer_weights_equal_repeated_samples():
    x, y, _ = regression(40, 10)
    counts = np.random.default_rng(0).integers(0, 4, 40)
    one = BridgeRegressor(0.5, 0.05).fit(x, y, counts)
    other = BridgeRegressor(0.5, 0.05).fit(np.repeat(x, counts, axis=0), np.repeat(y, counts))
    np.testing.assert_allclose(one.coef_, other.coef_, atol=1e-7)


def test_large_weights_do_not_overflow():
    x, y, _ = regression(60, 20)
    model = BridgeRegressor().fit(x, y, np.full(60, 1e308))
    np.testing.assert_array_equal(model.coef_, BridgeRegressor().fit(x, y, np.ones(60)).coef_)


def test_warm_start_continues_from_the_last_fit():
    x, y, _ = regression()
    model = BridgeRegressor(1, 0.05, warm_start=True).fit(x, y)
    first, coef = model.n_iter_, model.coef_
    again = model.fit(x, y)
    assert again.n_iter_ < first
    np.testing.assert_allclose(again.coef_, coef, atol=1e-9)
    model.set_params(p=0.5).fit(x, y)
    model.fit(x[:, :7], y)  # other features: starts over
    assert model.coef_.shape == (7,)


def test_more_starts_find_lower_objectives():
    ratios = []
    for seed in range(8):
        x, y, _ = regression(100, 300, rho=0.95, k=10, seed=seed)
        one, several = (BridgeRegressor(0.5, 0.1, n_starts=k).fit(x, y).objective_ for k in (1, 3))
        ratios.append(several / one)
    assert np.mean(ratios) < 0.99
    assert np.median(ratios) < 1
    assert max(ratios) < 1.03


def test_finds_exactly_the_true_features():
    x, y, w = regression(150, 400, rho=0.7, noise=0.5)
    for lam in (0.03, 0.06):
        assert ((BridgeRegressor(0.5, lam).fit(x, y).coef_ != 0) == (w != 0)).all()
        assert np.count_nonzero(BridgeRegressor(1, lam).fit(x, y).coef_) > 30


def test_constant_and_equal_columns():
    x, y, _ = regression(50, 6)
    x[:, 1] = 3.3
    x[:, 2] = x[:, 0]
    for p in (0.5, 1, 1.5, 2):
        model = BridgeRegressor(p, 0.01).fit(x, y)
        assert model.coef_[1] == 0
        assert np.isfinite(model.coef_).all()


@pytest.mark.parametrize("p", [0.5, 1.5, 2])
@pytest.mark.parametrize("lam", [0, 1e-12])
def test_constant_columns_of_many_samples(p, lam):
    feature = np.random.default_rng(0).standard_normal(300_000)
    x = np.stack([np.full_like(feature, 0.1), feature, np.full_like(feature, 1e6 / 3)], axis=1)
    model = BridgeRegressor(p=p, lam=lam).fit(x, feature + 3.3)
    assert model.coef_[0] == model.coef_[2] == 0
    np.testing.assert_allclose(model.intercept_, 3.3, rtol=1e-6)


def test_large_offsets_do_not_matter():
    x, y, _ = regression()
    near = BridgeRegressor(0.5, 0.1).fit(x, y)
    far = BridgeRegressor(0.5, 0.1).fit(x + 1e5, y - 1e5)
    np.testing.assert_allclose(far.coef_, near.coef_, atol=1e-6)


@pytest.mark.parametrize("p", [0.5, 1.5, 3, 10])
@pytest.mark.parametrize("value", [4.0, 0.1])  # the mean of many 0.1 is rounded
def test_constant_target_gives_zeros(p, value):
    x, _, _ = regression()
    model = BridgeRegressor(p, 0.1).fit(x, np.full(len(x), value))
    np.testing.assert_allclose(model.coef_, 0.0, atol=1e-12)
    assert model.intercept_ == pytest.approx(value)
    assert model.n_iter_ >= 1


def test_target_orthogonal_to_the_features_gives_zeros():
    x = np.vstack([np.eye(20), np.zeros((5, 20))])
    y = np.r_[np.zeros(20), np.ones(5)]
    for p in (1.5, 2.5):
        model = BridgeRegressor(p, 0.1, fit_intercept=False).fit(x, y)
        assert not model.coef_.any()
        assert model.optimality_ == 0


@pytest.mark.parametrize("penalty", [Lp(2.5, 0.1) + Lp(4, 0.1), Lp(3, 0.1), Lp(6, 0.01)], ids=str)
@pytest.mark.parametrize("shape", [(60, 150), (150, 60)])
def test_warm_start_with_zeros_above_p_2_reaches_the_minimum(penalty, shape):
    x, y, _ = regression(*shape)
    cold = BridgeRegressor(penalty=penalty).fit(x, y)
    warm = BridgeRegressor(1, 0.1, warm_start=True).fit(x, y)
    assert (warm.coef_ == 0).any()
    warm.set_params(penalty=penalty).fit(x, y)
    assert warm.objective_ == pytest.approx(cold.objective_, rel=1e-9)
    assert warm.optimality_ <= warm.tol


def test_too_few_sweeps_warn_with_advice():
    x, y, _ = regression(rho=0.95)
    with pytest.warns(ConvergenceWarning, match=r"max_iter=3.*StandardScaler.*increase max_iter"):
        model = BridgeRegressor(1, 1e-3, max_iter=3).fit(x, y)
    assert model.optimality_ > model.tol
    assert np.isfinite(model.coef_).all()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"p": -1}, ValueError, "p must be finite and >= 0, got -1"),
        ({"p": np.nan}, ValueError, "p must be finite"),
        ({"p": "1"}, TypeError, "p must be a number, got '1'"),
        ({"lam": -0.1}, ValueError, "lam must be finite and >= 0, got -0.1"),
        ({"lam": np.inf}, ValueError, "lam must be finite"),
        ({"penalty": 3}, TypeError, "penalty must be None, an Lp or a sum of Lp, got 3"),
        ({"n_starts": 0}, ValueError, "n_starts must be"),
        ({"tol": -1}, ValueError, "tol must be"),
        ({"max_iter": 1.5}, TypeError, "max_iter must be"),
    ],
)
def test_bad_settings_raise_in_fit(settings, error, message):
    x, y, _ = regression(20, 3)
    with pytest.raises(error, match=message):
        BridgeRegressor(**settings).fit(x, y)


def test_bad_data_raises_the_errors_of_scikit_learn():
    x, y, _ = regression(20, 3)
    model = BridgeRegressor()
    for bad in (np.nan, np.inf):
        broken = x.copy()
        broken[0, 0] = bad
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            model.fit(broken, y)
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            model.fit(x, np.where(np.arange(20) == 3, bad, y))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.fit(x, y[:-1])
    with pytest.raises(ValueError, match="0 feature"):
        model.fit(x[:, :0], y)
    with pytest.raises(ValueError, match="0 sample"):
        model.fit(x[:0], y[:0])
    with pytest.raises(ValueError, match="Expected 2D array"):
        model.fit(x[:, 0], y)
    with pytest.raises(ValueError, match="y should be a 1d array"):
        model.fit(x, np.stack([y, y], axis=1))
    with pytest.raises(ValueError, match="Negative values"):
        model.fit(x, y, -np.ones(20))
    with pytest.raises(ValueError, match="non-zero"):
        model.fit(x, y, np.zeros(20))
    with pytest.raises(NotFittedError):
        BridgeRegressor().predict(x)
    model.fit(x, y)
    with pytest.raises(ValueError, match="expecting 3 features"):
        model.predict(x[:, :2])


def test_grid_search_over_penalties():
    x, y, _ = regression(60, 20)
    grid = {"penalty": [Lp(1, 0.1), Lp(0.5, 0.1) + Lp(2, 0.01)]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        assert GridSearchCV(BridgeRegressor(), grid).fit(x, y).best_score_ > 0.8


def test_numbers_whose_squares_overflow_are_refused():
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20.0)
    with pytest.raises(ValueError, match="squares of y overflows"):
        BridgeRegressor().fit(x, 1e160 * y)
    for matrix in (1e160 * x, sparse.csc_array(1e160 * x)):
        with pytest.raises(ValueError, match="squares of column 0 of X overflows"):
            BridgeRegressor().fit(matrix, y)
