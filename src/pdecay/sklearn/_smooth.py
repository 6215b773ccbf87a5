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
  than its own size. The others are left as they are. c is what ``u_j`` loses if ``w_j`` grows by
  one and the other coefficients follow.

The steps use a copy of X in low precision. The exact X is needed from time to time only: products
with it are known for one w and t, and the copy is accurate enough for the changes since then. Once
the equations hold up to the errors of the copy, the products are computed again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdecay.sklearn._design import Design
from pdecay.sklearn._systems import Systems
from pdecay.sklearn._terms import Floats, Terms

_MOST_STEPS = 100
_SHRINK, _MOST_SHRINKS = 1.25, 120  # multiples of the residual that are tried as a start
_HALVINGS = 30
_DECREASE = 1e-4  # of the decrease that the slope promises
_ROUNDING = 1e-14
_ROUGH = 3e-4  # decrease of the residual until it is computed with the exact X again
_ACCURACY = 0.1  # of the first linear system
_LEAST_ACCURACY = 0.05  # of the others
_SLOW, _MOST_SLOW = 0.5, 2  # exact residuals with a smaller decrease until the copy is given up
_NEAR = 4  # times the limit from which on the coordinate steps are computed
_TARGET = 0.5  # accuracy of the last linear systems, relative to the goal
# For p > 2, where R'' is zero at zero: least curvature, relative to its mean, to the unexplained
# share of L_j and to the mean L_j.
_LEAST_CURVATURE, _LEAST_SHARE, _FLAT = 0.02, 0.05, 1e-12
_SHARE_CHANGE = 0.1  # at which the iteration for the share ends
_FEW_STEPS = 12  # after which the share is halved in each step
_NEARBY = 0.1  # changes, relative to the coefficient, up to which it is not projected
_PROJECTION_STEPS = 2
_SMALL = 1e-3  # least u_j in the start, relative to the mean


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
    used = design.norms > 0
    roots = np.sqrt(np.where(used, design.norms, 1.0))
    if np.abs(correlation / roots)[used].max(initial=0.0) <= limit:  # zero is the minimum
        return Point(np.zeros_like(w), y, correlation), 0
    dual = terms.smallest_p <= 2
    scale = float(np.linalg.norm(y))
    systems = Systems(design)
    t, u, w = _start(design, systems, y, terms, w)
    known, known_fit = np.zeros_like(w), np.zeros_like(y)  # the last exact product with X
    fresh = exact = False  # whether to compute exactly now, and whether this has happened
    steps = slow = 0
    accuracy = _ACCURACY * min(1.0, max(abs(p - 2) for p, _ in terms.pairs))
    size = exact_size = scale
    goal = max(_ROUGH * scale, limit)
    while True:
        curvature, slope = _curvature(terms, w, design.norms), terms.slope(w)
        if not dual:
            # Correlated features explain more of each other, and many steps are a sign of it.
            share = _unexplained_share(design, 1 / curvature) / 2 ** max(0, steps - _FEW_STEPS)
            unexplained = share * design.norms
            curvature = np.maximum(curvature, _LEAST_SHARE * unexplained)
        weights = np.where(used, 1 / curvature, 0.0)
        # The w at which the linearised R' is u.
        base = w - weights * slope
        if fresh:
            u, fitted = design.through(t, base, weights)
        middle = base + weights * u
        if fresh:
            known, known_fit, exact = middle, fitted, True
        else:
            fitted = known_fit + systems.times(middle - known)
        right = y - fitted - t
        before, size = size, float(np.linalg.norm(right))
        mismatch = np.where(used, slope - u, 0.0)
        left = size + float(np.abs(mismatch / roots).max(initial=0.0))
        last = not np.isfinite(left) or steps >= min(most_steps, _MOST_STEPS)
        if fresh:
            if left <= _NEAR * limit or last:
                r = y - fitted
                q = design.correlate(r) if systems.exact else u + systems.correlate(r - t)
                # A coordinate step is at most the gradient divided by sqrt(L_j).
                gradient = (terms.slope(middle) - q)[used] / roots[used]
                if last or np.abs(gradient).max(initial=0.0) <= limit:
                    return Point(middle, r, q), steps
            slow += size > _SLOW * exact_size
            if slow == _MOST_SLOW:
                systems.exact = True
            exact_size, goal = size, max(_ROUGH * size, limit)
        elif size <= goal or last:
            fresh = True
            continue
        if steps:
            # The share of the residual that the next step leaves: as that of the last step, which
            # its linear system did not explain, times the decrease.
            decrease = size / (before or 1.0)  # the residual is 0 for a perfect fit
            accuracy = abs(decrease - accuracy) * decrease ** (1 if dual else 0.5)
        accuracy = max(min(accuracy, _LEAST_ACCURACY), min(_TARGET * goal / (size or 1.0), 0.5))
        step, products = systems.solve(weights, right, accuracy)
        steps += 1
        if systems.exact and not fresh:  # its solutions are those of the exact equations
            fresh, size = True, scale
            continue
        fresh = systems.exact
        if dual and exact == systems.exact:  # products and the equations have the same X
            t, u = _line_search(y, terms, (t, u), (step, products), -float(right @ step))
        else:
            t, u = t + step, u + products
        if dual:
            w = terms.conjugate_slope(u)
        else:
            moved = w + (products - mismatch) * weights
            far = np.abs(moved - w) > _NEARBY * np.abs(w)
            c = np.maximum(unexplained[far], curvature.mean())
            w = moved.copy()
            w[far] = _project(terms, moved[far] + u[far] / c, c)
        w = np.where(used, w, 0.0)


def _project(terms: Terms, z: Floats, c: Floats) -> Floats:
    """Return the w with ``w + R'(w) / c = z`` to about two digits, if every p is above 2."""
    size = np.abs(z)
    bounds = [(c * size / lam) ** (1 / (p - 1)) for p, lam in terms.pairs]
    w = np.min([size, *bounds], axis=0)
    # R' is convex: Newton's method comes down from the bound.
    for _ in range(_PROJECTION_STEPS):
        w = w - (w + terms.slope(w) / c - size) / (1 + terms.curvature(w) / c)
    return np.asarray(np.sign(z) * w)


def _curvature(terms: Terms, w: Floats, norms: Floats) -> Floats:
    """Return the curvature of R at w; if every p is above 2, it is bounded below."""
    with np.errstate(divide="ignore", over="ignore"):  # infinite at zero for p < 2
        curvature = terms.curvature(w)
    if terms.smallest_p <= 2:
        return curvature
    least = max(_LEAST_CURVATURE * curvature.mean(), _FLAT * norms.mean())
    return np.asarray(np.maximum(curvature, least))


def _unexplained_share(design: Design, weights: Floats) -> float:
    """Return the share of a column that the other features cannot explain, on average.

    If ``w_j`` changes by e, the other coefficients follow, and ``x_j' t`` changes by -e c with
    ``c = x_j' M^-1 x_j`` and ``M = I + X diag(W) X'`` without feature j. For independent features,
    c is ``L_j`` times the mean eigenvalue of ``M^-1``, which is the fixed point of this iteration
    (Marchenko and Pastur).
    """
    size = weights * design.norms
    share, before = 1.0, np.inf
    while share < (1 - _SHARE_CHANGE) * before:
        share, before = 1 / (1 + float((size / (1 + share * size)).sum()) / design.shape[0]), share
    return share


def _start(
    design: Design, systems: Systems, y: Floats, terms: Terms, w: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the first t, ``X' t`` and w."""
    t = y - systems.times(w) if w.any() else y
    u = systems.correlate(t)
    if terms.smallest_p <= 2:
        share = _lowest_multiple(y, terms, t, u)
        t, u = share * t, share * u
        w = terms.conjugate_slope(u)
    elif not w[design.norms > 0].all():  # no solution for a similar penalty
        # Ridge regression with the curvature of R at coefficients of equal size that explain y.
        size = np.linalg.norm(y) / np.sqrt(design.norms.sum())
        curvature = max(terms.slope(np.array([size]))[0] / size, _FLAT * design.norms.mean())
        t, u = systems.solve(np.full_like(w, 1 / curvature), y, _ACCURACY)
        # R* is a concave function of u^2. With its tangent instead, the dual problem is a linear
        # system, whose solution has a lower dual objective.
        sizes = np.maximum(np.abs(u), _SMALL * np.abs(u).mean())
        t, u = systems.solve(terms.conjugate_slope(sizes) / sizes, y, _ACCURACY)
        w = terms.conjugate_slope(u)
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
    point: tuple[Floats, Floats],
    step: tuple[Floats, Floats],
    slope: float,
) -> tuple[Floats, Floats]:
    """Return t and u after a step that decreases the dual objective, or before it."""

    def value(t: Floats, u: Floats) -> float:
        w = terms.conjugate_slope(u)
        return float(t @ t / 2 - y @ t + u @ w) - terms.value(w)  # R*(u) = u' w - R(w)

    with np.errstate(over="ignore", invalid="ignore"):
        start, length = value(*point), 1.0
        for _ in range(_HALVINGS):
            t, u = (a + length * b for a, b in zip(point, step, strict=True))
            if value(t, u) <= start + _DECREASE * length * slope + _ROUNDING * abs(start):
                return t, u
            length /= 2
    return point
