"""Find the equations of the Lorenz system in noisy data, with p = 1/2, Lasso and STLSQ.

    python examples/lorenz.py [picture.png]

Each derivative is a sum of a few of the 20 monomials up to degree 3, which sparse regression
selects. The true system has seven terms. Every method has 25 strengths to choose from and the same
rule: of the models whose error on held-out samples is at most 5 % above the lowest, take the one
with the fewest terms.
"""

from __future__ import annotations

import sys
import warnings
from itertools import combinations_with_replacement

import numpy as np
import pysindy
from scipy.integrate import solve_ivp
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import lasso_path

from pdecay.sklearn import BridgeRegressor

METHODS = ("p = 1/2", "Lasso", "STLSQ")
NOISES = (0.01, 0.03, 0.1, 0.3, 1.0)  # of the derivatives, relative to their standard deviations
STEP = 0.02
NAMES = ["".join(c) for k in range(4) for c in combinations_with_replacement("xyz", k)]
EXPONENTS = np.array([[name.count(c) for c in "xyz"] for name in NAMES])
TRUTH = [{"x": -10, "y": 10}, {"x": 28, "y": -1, "xz": -1}, {"z": -8 / 3, "xy": 1}]


def true_coefficients() -> np.ndarray:
    return np.array([[row.get(name, 0.0) for name in NAMES] for row in TRUTH])


def monomials(states: np.ndarray) -> np.ndarray:
    return np.prod(states[..., None, :] ** EXPONENTS, axis=-1)


def simulate(coefficients: np.ndarray, seconds: float, start: np.ndarray) -> np.ndarray:
    times = np.arange(0, seconds, STEP)

    def flow(_: float, state: np.ndarray) -> np.ndarray:
        return coefficients @ monomials(state)

    return solve_ivp(flow, (0, seconds), start, t_eval=times, rtol=1e-6, atol=1e-6).y.T


def measure(noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return states and noisy derivatives."""
    rng = np.random.default_rng(seed)
    states = simulate(true_coefficients(), 10.0, rng.uniform((-8, -8, 17), (8, 8, 33)))
    slopes = monomials(states) @ true_coefficients().T
    return states, slopes + noise * slopes.std(axis=0) * rng.standard_normal(slopes.shape)


def candidates(method: str, features: np.ndarray, slopes: np.ndarray) -> list[np.ndarray]:
    """Return the coefficients for 25 strengths; features have unit variance and mean zero."""
    if method == "STLSQ":
        thresholds = np.geomspace(1e-3, 1, 25) * slopes.std()
        fits = [pysindy.STLSQ(t, alpha=1e-6, max_iter=100) for t in thresholds]
        return [fit.fit(features, slopes[:, None]).coef_[0] for fit in fits]
    if method == "Lasso":
        return list(lasso_path(features, slopes, alphas=25, eps=1e-4, max_iter=20000)[1].T)
    # The monomials are strongly correlated: begin with all terms, and increase lam.
    model = BridgeRegressor(0.5, warm_start=True, n_starts=1, tol=1e-5, max_iter=2000)
    model.coef_ = np.linalg.lstsq(features, slopes, rcond=None)[0]
    strengths = np.geomspace(1e-7, 0.1, 25) * slopes.std() ** 1.5
    return [model.set_params(lam=lam).fit(features, slopes).coef_ for lam in strengths]


def identify(method: str, states: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """Return the coefficients of the monomials for each derivative."""
    raw = monomials(states)
    means, scales = raw.mean(axis=0), raw.std(axis=0) + (raw.std(axis=0) == 0)
    features = (raw - means) / scales
    fit = np.arange(len(raw)) % 10 < 7  # blocks of seven samples to fit, three to compare
    found = []
    for slope in slopes.T:
        paths = candidates(method, features[fit], slope[fit] - slope[fit].mean())
        # A fit of the selected terms alone removes the shrinkage, for all methods.
        models = [refit(w != 0, raw[fit], slope[fit]) for w in paths]
        errors = [((slope - raw @ w)[~fit] ** 2).mean() for w in models]
        good = [w for w, e in zip(models, errors, strict=True) if e <= 1.05 * min(errors)]
        found.append(min(good, key=np.count_nonzero))
    return np.array(found)


def refit(used: np.ndarray, features: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Return the least-squares coefficients of the selected features."""
    w = np.zeros(len(used))
    w[used] = np.linalg.lstsq(features[:, used], slope, rcond=None)[0]
    return w


def score(found: np.ndarray) -> tuple[float, int]:
    """Return the F1 score of the selected terms and their number."""
    truth = true_coefficients() != 0
    hits = ((found != 0) & truth).sum()
    return 2 * hits / ((found != 0).sum() + truth.sum()), int((found != 0).sum())


def main(picture: str | None = None, seeds: int = 5) -> dict[str, list[tuple[float, float]]]:
    """Return for each method the mean F1 score and number of terms at each noise."""
    # With all terms the problem is almost singular, and fits at tiny strengths are stopped early.
    warnings.simplefilter("ignore", ConvergenceWarning)
    warnings.filterwarnings("ignore", module="pysindy")
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    for noise in NOISES:
        data = [measure(noise, seed) for seed in range(seeds)]
        for name in METHODS:
            scores = [score(identify(name, *sample)) for sample in data]
            results[name].append(tuple(np.mean(scores, axis=0).tolist()))
            f1, terms = results[name][-1]
            print(f"noise {noise:<5} {name:8} F1 {f1:.2f}, {terms:.1f} terms (true: 7)")
    if picture:
        draw(picture, results)
    return results


def draw(picture: str, results: dict[str, list[tuple[float, float]]]) -> None:
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(10, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, colour in zip(METHODS, ("#08519c", "#777777", "#b58900"), strict=True):
        f1, terms = zip(*results[name], strict=True)
        left.plot(NOISES, f1, "o-", color=colour, label=name)
        middle.plot(NOISES, terms, "o-", color=colour)
    left.set(ylim=(0, 1.05), ylabel="F1 score of the selected terms")
    left.legend(frameon=False)
    middle.axhline(7, color="black", linewidth=0.8, linestyle=":")
    middle.set(ylabel="selected terms (dotted: true)", ylim=(0, None))
    for axes in (left, middle):
        axes.set(xscale="log", xlabel="noise")
    start = np.array([-8.0, 7.0, 27.0])
    found = identify("p = 1/2", *measure(0.1, 0))
    for coefficients, colour, label in (
        (true_coefficients(), "black", "true"), (found, "#3182bd", "p = 1/2, noise 0.1"),
    ):  # fmt: skip
        path = simulate(coefficients, 8.0, start)
        right.plot(path[:, 0], path[:, 2], color=colour, linewidth=0.8, label=label)
    right.set(xlabel="x", ylabel="z")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:2])
