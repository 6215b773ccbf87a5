"""bridge_path and BridgeRegressorCV."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import ElasticNetCV, LassoCV, lasso_path

from pdecay import Lp
from pdecay.sklearn import BridgeRegressor, BridgeRegressorCV, bridge_path

from .problems import regression


def test_path_at_p_1_equals_the_lasso_path():
    x, y, _ = regression()
    path = bridge_path(x, y, p=1, n_lams=20, eps=0.01)
    centred, target = x - x.mean(axis=0), y - y.mean()
    alphas, coefs, _ = lasso_path(centred, target, alphas=path.lams, tol=1e-10, max_iter=100000)
    np.testing.assert_allclose(alphas, path.lams)
    np.testing.assert_allclose(coefs, path.coefs, atol=1e-5)


@pytest.mark.parametrize(
    "penalty", [Lp(0, 1), Lp(0.5, 1), Lp(1, 1), Lp(1, 0.5) + Lp(2, 0.5)], ids=str
)
def test_path_begins_where_zero_is_a_fixed_point(penalty):
    x, y, _ = regression()
    lams = bridge_path(x, y, penalty=penalty, n_lams=3).lams
    scaled = [sum(Lp(p, f * lam) for p, lam in penalty.pairs()) for f in (lams[0], 0.99 * lams[0])]
    first, second = (BridgeRegressor(penalty=one, n_starts=1).fit(x, y) for one in scaled)
    assert not first.coef_.any()
    assert second.coef_.any()


def test_path_solutions_equal_single_fits_for_convex_penalties():
    x, y, _ = regression()
    path = bridge_path(x, y, p=1.5, lams=[0.1, 1.0])
    assert path.lams.tolist() == [1.0, 0.1]
    for k, lam in enumerate(path.lams):
        model = BridgeRegressor(1.5, lam).fit(x, y)
        np.testing.assert_allclose(path.coefs[:, k], model.coef_, atol=1e-6)
        assert path.intercepts[k] == pytest.approx(model.intercept_)
        assert path.objectives[k] == pytest.approx(model.objective_)


def test_path_is_not_worse_than_single_starts():
    x, y, _ = regression(rho=0.9)
    path = bridge_path(x, y, p=0.5, n_lams=10, eps=0.01)
    single = [BridgeRegressor(0.5, lam, n_starts=1).fit(x, y).objective_ for lam in path.lams]
    assert np.median(path.objectives / single) <= 1


def test_cv_of_the_lasso_equals_scikit_learn():
    x, y, _ = regression(100, 30)
    ours = BridgeRegressorCV(p=1, n_lams=100).fit(x, y)
    other = LassoCV(alphas=100, tol=1e-8, max_iter=100000).fit(x, y)
    np.testing.assert_allclose(ours.lams_[0], other.alphas_, rtol=1e-6)
    np.testing.assert_allclose(ours.mse_path_[0], other.mse_path_, rtol=1e-4)
    assert ours.lam_ == pytest.approx(other.alpha_)
    np.testing.assert_allclose(ours.coef_, other.coef_, atol=1e-5)


def test_cv_of_the_elastic_net_begins_as_scikit_learn():
    x, y, _ = regression(100, 30)
    ours = BridgeRegressorCV(penalty=Lp(1, 0.5) + Lp(2, 0.5), n_lams=30).fit(x, y)
    other = ElasticNetCV(alphas=30, tol=1e-8, max_iter=100000).fit(x, y)
    assert ours.lam_ == pytest.approx(other.alpha_)
    assert ours.p_ is None


def test_cv_chooses_p_below_1_for_few_large_coefficients():
    x, y, w = regression(noise=1.0)
    model = BridgeRegressorCV(p=[0.5, 1, 2], n_lams=20, eps=1e-2).fit(x, y)
    assert model.p_ == 0.5
    assert model.mse_path_.shape == (3, 20, 5)
    assert np.count_nonzero(model.coef_) <= 2 * np.count_nonzero(w)


def test_cv_takes_sparse_features_weights_and_splitters():
    x, y, _ = regression(60, 20)
    weights = np.random.default_rng(0).uniform(0.5, 1.5, 60)
    splits = [(np.arange(30), np.arange(30, 60)), (np.arange(30, 60), np.arange(30))]
    dense = BridgeRegressorCV(p=1, n_lams=5, cv=splits).fit(x, y, weights)
    found = BridgeRegressorCV(p=1, n_lams=5, cv=splits).fit(sparse.csr_array(x), y, weights)
    np.testing.assert_allclose(found.mse_path_, dense.mse_path_, rtol=1e-6)
    assert dense.mse_path_.shape == (1, 5, 2)


def test_errors():
    x, y, _ = regression(20, 3)
    with pytest.raises(ValueError, match="lams must be finite and >= 0"):
        bridge_path(x, y, lams=[1, -1])
    with pytest.raises(ValueError, match="at least one value"):
        bridge_path(x, y, lams=[])
    with pytest.raises(ValueError, match="eps must be above 0 and below 1"):
        bridge_path(x, y, eps=1)
    with pytest.raises(ValueError, match="p must have at least one value"):
        BridgeRegressorCV(p=[]).fit(x, y)
    with pytest.raises(ValueError, match="p must be finite"):
        BridgeRegressorCV(p=[1, -1]).fit(x, y)
    with pytest.raises(ValueError, match="NaN"):
        bridge_path(np.full_like(x, np.nan), y)


def test_folds_without_weight_are_left_out():
    x, y, _ = regression(60, 20)
    weights = np.repeat([0.0, 1.0], [12, 48])
    model = BridgeRegressorCV(n_lams=5).fit(x, y, weights)
    assert np.isnan(model.mse_path_[..., 0]).all()
    assert np.isfinite(model.mse_path_[..., 1:]).all()
    assert model.lam_ == model.lams_[0, np.nanmean(model.mse_path_[0], axis=-1).argmin()]


def test_processes_import_nothing_from_the_current_folder(tmp_path):
    """joblib starts them by ``python -m``, which searches the current folder first."""
    program, shared = tmp_path / "program.py", tmp_path / "shared"
    program.write_text(
        "import numpy as np\n"
        "from pdecay.sklearn import BridgeRegressorCV\n"
        "x = np.eye(6)\n"
        "BridgeRegressorCV(lams=[0.1], cv=2, n_jobs=2).fit(x, x[0])\n"
    )
    shared.mkdir()
    (shared / "joblib.py").write_text("open('trap', 'w')\n")
    subprocess.run(
        [sys.executable, program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path))},
        cwd=shared,
        timeout=300,
        check=True,
    )
    assert not (shared / "trap").exists()
