"""scikit-learn's own checks."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from pdecay import Lp
from pdecay.sklearn import BridgeClassifier, BridgeRegressor, BridgeRegressorCV


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(
    [
        BridgeRegressor(),
        BridgeRegressor(1),
        BridgeRegressor(penalty=Lp(1, 0.01) + Lp(2, 0.01)),
        BridgeClassifier(),
        BridgeClassifier(2),
        BridgeRegressorCV(n_lams=5, n_starts=2),
    ]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)
