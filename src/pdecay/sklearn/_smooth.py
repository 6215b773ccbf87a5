"""Newton's method for penalties with every p > 1, where no coefficient is zero.

At the minimum of ``||y - X w||^2 / 2 + R(w)`` a vector t satisfies two equations::

    t = y - X w,        R'(w_j) = x_j' t  for every feature j.

:func:`minimise` solves them for w and t. With ``W = 1 / R''(w)``, a Newton step is one linear
system with the matrix ``I + X diag(W) X'``, which has one row for each sample.

- If some p is at most 2, the second equation is kept exact: ``w_j`` is the derivative of the
  conjugate R* at ``x_j' t``. This is Newton's method for the dual problem, the minimum of
  ``||t||^2 / 2 - y' t + sum_j R*(x_j' t)``, with a line search.
- If every p is above 2, that derivative is infinitely steep at zero. Then w and ``u = X' t`` are
  both linearised. A step that leads to the pair ``(w_j, u_j)`` is followed by the projection to the
  pair with the same ``w_j + u_j / c`` that satisfies the second equation: ``w_j`` is the prox of
  ``w_j + u_j / c``. This is much closer to the solution where a small coefficient changes by more
  than its own size.

Products with X are computed in single precision, of changes only. They are computed again in double
precision when the sum of the rounding errors could matter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdecay.sklearn._design import Design
from pdecay.sklearn._kernels import kernels
from pdecay.sklearn._systems import Systems
from pdecay.sklearn._terms import Floats, Terms

_MOST_STEPS = 50
_SHRINK, _MOST_SHRINKS = 1.25, 120  # multiples of the residual that are tried as a start
_HALVINGS = 30
_DECREASE = 1e-4  # of the decrease that the slope promises
_ROUNDING = 1e-14
_ACCURACY = 0.1  # of the first linear systems; the later ones are more accurate
_POWER = 1.5  # for p > 2: power of the last decrease that is the accuracy of the next system
_NEAR = 4  # times the limit from which on the coordinate steps are computed
_TARGET = 2  # accuracy of the last linear systems, relative to the limit
_SINGLE = 1e-6  # relative error of a product in single precision
_EXACT = 100  # residuals are at least this many times larger than the sum of their errors
# For p > 2, where R'' is zero at zero: least curvature, relative to its mean and to the mean L_j.
_LEAST_CURVATURE, _FLAT = 0.05, 1e-12


class Point(NamedTuple):
    """Coefficients with their residual ``y - X w`` and its products ``X' (y - X w)``."""

    w: Floats
    r: Floats
    q: Floats


def minimise(
    design: Design,
    y: Floats,
    correlation: Floats,
    terms: Terms,
    w: Floats,
    limit: float,
    most_steps: int,
) -> tuple[Point, int]:
    """Take Newton steps from w until no coordinate step is above the limit.

    Args:
        design: the features.
        y: the targets.
        correlation: ``X' y``.
        terms: the penalty; every p is above 1.
        w: the first coefficients.
        limit: the largest coordinate step, measured as ``sqrt(L_j) * |change of w_j|``.
        most_steps: the largest number of Newton steps.

    Returns:
        The last coefficients and the number of steps. If no step is possible or there are too
        many, they are not yet the minimum.
    """
    if not correlation.any():  # zero is the minimum
        return Point(np.zeros_like(w), y, correlation), 0
    dual = terms.smallest_p <= 2
    used = design.norms > 0
    roots = np.sqrt(np.where(used, design.norms, 1.0))
    scale = float(np.linalg.norm(y))
    # For p > 2 conjugate gradients converge slowly with fewer features than samples.
    systems = Systems(design, iterate=dual or design.shape[1] >= design.shape[0])
    t, u, w = _start(design, systems, y, correlation, terms, w)
    s, middle = y, np.zeros_like(w)  # s = y - X middle, up to `error`
    error, size = _SINGLE * scale, 0.1 * scale
    for steps in range(min(most_steps, _MOST_STEPS) + 1):
        curvature, mismatch, following = _linearise(terms, w, u, design.norms)
        change = systems.times(following - middle)
        s, middle, before, size = s - change, following, size, float(np.linalg.norm(s - change - t))
        error += _SINGLE * float(np.linalg.norm(change))
        if size <= _EXACT * error:
            u = design.correlate(t)
            w = np.where(used, terms.conjugate_slope(u), 0.0) if dual else w
            curvature, mismatch, middle = _linearise(terms, w, u, design.norms)
            s, error = design.residual(y, middle), 0.0
            size = float(np.linalg.norm(s - t))
        left = size + float(np.abs(mismatch / roots).max(initial=0.0))
        if left <= _NEAR * limit or steps == most_steps:
            r = design.residual(y, w)
            q = design.correlate(r)
            # A coordinate step is at most the gradient divided by sqrt(L_j).
            if np.abs((terms.slope(w) - q)[used] / roots[used]).max(initial=0.0) <= limit:
                return Point(w, r, q), steps
        if not np.isfinite(left):
            break
        # Newton's method converges quadratically on the dual problem, and more slowly for p > 2.
        accuracy = size / scale if dual else (size / before) ** _POWER
        accuracy = max(min(_ACCURACY, accuracy), min(_TARGET * limit / (size or 1.0), 0.5))
        step, products = systems.solve(1 / curvature, s - t, accuracy)
        error += _SINGLE * float(np.linalg.norm(step))
        if dual:
            found = _line_search(y, terms, (t, u, w), (step, products), -float((s - t) @ step))
            if found is None:
                break
            t, u, w = found
        else:
            t, u = t + step, u + products
            c = np.full_like(w, curvature.mean())
            moved = w + (products - mismatch) / curvature
            w = kernels().prox(terms, moved + u / c, 1 / c, moved)
        w = np.where(used, w, 0.0)
    r = design.residual(y, w)
    return Point(w, r, design.correlate(r)), steps


def _linearise(terms: Terms, w: Floats, u: Floats, norms: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the curvature of R at w, ``R'(w) - u`` and the w at which the linearised R' is u."""
    with np.errstate(divide="ignore"):  # infinite at zero for p < 2
        curvature = terms.curvature(w)
    if terms.smallest_p <= 2:  # w is exact
        return curvature, np.zeros_like(w), w
    least = max(_LEAST_CURVATURE * curvature.mean(), _FLAT * norms.mean())
    curvature = np.maximum(curvature, least)
    mismatch = np.where(norms > 0, terms.slope(w) - u, 0.0)
    return curvature, mismatch, w - mismatch / curvature


def _start(
    design: Design, systems: Systems, y: Floats, correlation: Floats, terms: Terms, w: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the first t, ``X' t`` and w."""
    t = design.residual(y, w) if w.any() else y
    u = design.correlate(t) if w.any() else correlation
    if terms.smallest_p <= 2:
        share = _lowest_multiple(y, terms, t, u)
        t, u = share * t, share * u
        w = terms.conjugate_slope(u)
    elif not w.any():
        # Ridge regression with the curvature of R at coefficients of equal size that explain y.
        size = np.linalg.norm(y) / np.sqrt(design.norms.sum())
        curvature = max(terms.slope(np.array([size]))[0] / size, _FLAT * design.norms.mean())
        t, u = systems.solve(np.full_like(w, 1 / curvature), y, _ACCURACY)
        w = u / curvature
    return t, u, np.where(design.norms > 0, w, 0.0)


def _lowest_multiple(y: Floats, terms: Terms, t: Floats, u: Floats) -> float:
    """Return the share of t, with ``u = X' t``, that has the lowest dual objective.

    Near p = 1 the conjugate is a large power, which overflows for t itself.
    """
    square, product = float(t @ t), float(y @ t)
    if len(terms.pairs) == 1:  # the conjugate is a power of the share
        ((p, lam),) = terms.pairs
        unit = lam / (float(np.abs(u).max()) or 1.0)
        at_unit = terms.conjugate(unit * u).sum()
    best, lowest, share = 1.0, np.inf, np.float64(1.0)  # a power of it may overflow
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(_MOST_SHRINKS):
            if len(terms.pairs) == 1:
                conjugate = at_unit * (share / unit) ** (p / (p - 1))
            else:
                conjugate = terms.conjugate(share * u).sum()
            value = share**2 * square / 2 - share * product + conjugate
            if value > lowest:  # the objective is convex
                break
            if np.isfinite(value):
                best, lowest = share, value
            share /= _SHRINK
    return float(best)


def _line_search(
    y: Floats,
    terms: Terms,
    point: tuple[Floats, Floats, Floats],
    step: tuple[Floats, Floats],
    slope: float,
) -> tuple[Floats, Floats, Floats] | None:
    """Return the point after a step that decreases the dual objective; None if there is none."""

    def value(t: Floats, u: Floats, w: Floats) -> float:
        return float(t @ t / 2 - y @ t + u @ w) - terms.value(w)  # R*(u) = u' w - R(w)

    with np.errstate(over="ignore", invalid="ignore"):
        start, length = value(*point), 1.0
        for _ in range(_HALVINGS):
            t, u = (a + length * b for a, b in zip(point, step, strict=False))
            w = terms.conjugate_slope(u)
            if value(t, u, w) <= start + _DECREASE * length * slope + _ROUNDING * abs(start):
                return t, u, w
            length /= 2
    return None
