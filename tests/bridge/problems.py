"""Random regression and classification problems with correlated features."""

from __future__ import annotations

import numpy as np
from scipy import special


def regression(n=120, d=200, rho=0.5, k=8, noise=0.3, seed=0):
    rng = np.random.default_rng(seed)
    x = correlated(rng, n, d, rho)
    w, k = np.zeros(d), min(k, d)
    w[rng.choice(d, k, replace=False)] = rng.choice([-1, 1], k) * rng.uniform(0.5, 1.5, k)
    return x, x @ w + 2.0 + noise * rng.standard_normal(n), w


def classification(n=200, d=40, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    x = correlated(rng, n, d, 0.5) + 0.5
    w = np.where(rng.random((classes, d)) < 0.15, rng.standard_normal((classes, d)), 0.0)
    noise = rng.gumbel(size=(n, classes))
    return x, (2 * x @ w.T + noise).argmax(axis=1)


def correlated(rng, n, d, rho):
    x = rng.standard_normal((n, d))
    for j in range(1, d):
        x[:, j] = rho * x[:, j - 1] + np.sqrt(1 - rho**2) * x[:, j]
    return x


def regression_objective(model, x, y, penalty, weights=None):
    squares = (y - model.predict(x)) ** 2
    return np.average(squares, weights=weights) / 2 + float(penalty.value(model.coef_))


def logistic_objective(model, x, y, penalty):
    scores = x @ model.coef_.T + model.intercept_
    if scores.shape[1] == 1:
        scores = np.hstack([np.zeros_like(scores), scores])
    labels = np.searchsorted(model.classes_, y)
    losses = special.logsumexp(scores, axis=1) - scores[np.arange(len(y)), labels]
    return losses.mean() + float(penalty.value(model.coef_))
