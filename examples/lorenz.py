"""Find the equations of the Lorenz system in noisy data, with p = 1/2, Lasso and STLSQ.

    python examples/lorenz.py

Sparse regression selects the terms of each derivative from the 19 monomials of degree 1 to 3. Each
method takes the fewest terms whose held-out error is at most 5 % above its lowest, of 25 strengths.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from pysindy import STLSQ
from scipy.integrate import solve_ivp
from sklearn.linear_model import lasso_path
from sklearn.preprocessing import PolynomialFeatures, scale

from pdecay.sklearn import BridgeRegressor

NOISES = (0.01, 0.03, 0.1, 0.3, 1.0)  # of the derivatives, relative to their standard deviations
TRUE_TERMS = [0, 1], [0, 1, 5], [2, 4]  # of x', y' and z', among x, y, z, xx, xy, xz, ...


def lorenz(time: float, state: np.ndarray) -> np.ndarray:
    x, y, z = state
    return np.array([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])


def select(method: str, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Return the columns of x that a method selects, for each of 25 strengths."""
    if method == "STLSQ":
        path = [STLSQ(t, alpha=1e-6).fit(x, y[:, None]).coef_[0] for t in np.geomspace(1e-3, 1, 25)]
    elif method == "Lasso":
        path = lasso_path(x, y, alphas=25, eps=1e-4, max_iter=20000)[1].T
    else:  # the columns are strongly correlated: begin with all of them, and increase lam
        model = BridgeRegressor(0.5, warm_start=True, n_starts=1, tol=1e-5, max_iter=2000)
        model.coef_ = np.linalg.lstsq(x, y, rcond=None)[0]
        path = [model.set_params(lam=lam).fit(x, y).coef_ for lam in np.geomspace(1e-7, 0.1, 25)]
    return [np.flatnonzero(w) for w in path]


def count_wrong(method: str, noise: float, seed: int) -> int:
    """Return the number of terms that a method adds to the true ones or misses."""
    rng = np.random.default_rng(seed)
    start, times = rng.uniform((-8, -8, 17), (8, 8, 33)), np.arange(0, 10, 0.02)
    states = solve_ivp(lorenz, (0, 10), start, t_eval=times, rtol=1e-6, atol=1e-6).y
    slopes = lorenz(0, states).T
    slopes += noise * slopes.std(axis=0) * rng.standard_normal(slopes.shape)
    x = PolynomialFeatures(3, include_bias=False).fit_transform(states.T)
    fit = np.arange(len(x)) % 10 < 7  # seven samples to fit, then three held out
    wrong = 0
    for y, truth in zip(slopes.T, TRUE_TERMS, strict=True):
        models = select(method, scale(x)[fit], scale(y[fit]))
        # Least squares with the selected terms removes the shrinkage of their coefficients.
        fits = [x[:, m] @ np.linalg.lstsq(x[fit][:, m], y[fit], rcond=None)[0] for m in models]
        errors = [np.mean((y - fitted)[~fit] ** 2) for fitted in fits]
        good = [m for m, error in zip(models, errors, strict=True) if error <= 1.05 * min(errors)]
        wrong += len(set(min(good, key=len)) ^ set(truth))
    return wrong


def main(picture: str = "lorenz.png", seeds: int = 5) -> dict[str, list[float]]:
    """Return for each method the mean number of wrong terms at each noise."""
    warnings.simplefilter("ignore", UserWarning)  # fits at tiny strengths do not converge
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    results: dict[str, list[float]] = {"p = 1/2": [], "Lasso": [], "STLSQ": []}
    for method, means in results.items():
        for noise in NOISES:
            means.append(float(np.mean([count_wrong(method, noise, s) for s in range(seeds)])))
            print(f"{method:7}  noise {noise:<4}  {means[-1]:4.1f} wrong terms")
        axes.semilogx(NOISES, means, "o-", label=method)
    axes.set(xlabel="noise of the derivatives", ylabel="wrong terms")
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=150)
    return results


if __name__ == "__main__":
    main()
