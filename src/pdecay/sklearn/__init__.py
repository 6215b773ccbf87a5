"""Bridge regression: linear models with p-norm penalties for scikit-learn.

>>> import numpy as np
>>> from pdecay.sklearn import BridgeRegressor
>>> X = np.eye(4)
>>> BridgeRegressor(p=0, lam=0.1, fit_intercept=False).fit(X, [3.0, 0.1, 0, -2]).coef_
array([ 3.,  0.,  0., -2.])

:class:`BridgeRegressor` and :class:`BridgeClassifier` fit one model, :class:`BridgeRegressorCV`
chooses p and lam by cross-validation, and :func:`bridge_path` fits many lam. The penalty
``(lam / p) * sum |w|^p`` is the Lasso at p = 1 and ridge at p = 2. Below 1 it selects fewer
features and shrinks the selected ones less. This package does not import torch.
"""

from pdecay.sklearn._classifier import BridgeClassifier
from pdecay.sklearn._path import BridgePath, BridgeRegressorCV, bridge_path
from pdecay.sklearn._regressor import BridgeRegressor

__all__ = ["BridgeClassifier", "BridgePath", "BridgeRegressor", "BridgeRegressorCV", "bridge_path"]
