"""Newton's method for penalties with every p > 1, where no coefficient is zero.

At the minimum of ``||y - X w||^2 / 2 + R(w)`` a vector t satisfies two equations::

    t = y - X w,        R'(w_j) = x_j' t  for every feature j.

:func:`minimise` solves them for w and t. With ``W = 1 / R''(w)``, a Newton step is one linear
system with the matrix ``I + X diag(W) X'``, which has one row for each sample.

- If some p is at most 2, the second equation is kept exact: ``w_j`` is the derivative of the
  conjugate R* at ``x_j' t``. This is Newton's method for the dual problem, the minimum of
  ``||t||^2 / 2 - y' t + sum_j R*(x_j' t)``, with a line search.
- If every p is above 2, that derivative is infinitely steep at zero. The second equation is then
  linearised as it stands, and w is updated beside t.

Early steps compute in single precision. Double precision follows when rounding errors matter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pdecay.sklearn._design import Design
from pdecay.sklearn._systems import Systems
from pdecay.sklearn._terms import Floats, Terms

_MOST_STEPS = 50
_SHRINK, _MOST_SHRINKS = 1.25, 120  # multiples of the residual that are tried as a start
_HALVINGS = 30
_DECREASE = 1e-4  # of the decrease that the slope promises
_ROUNDING = 1e-14
_ACCURACY = 0.1  # of the first linear systems; the later ones are more accurate
_NEAR = 4  # times the limit from which on the coordinate steps are computed
_TARGET = 1  # accuracy of the last linear systems, relative to the limit
_SINGLE = 1e-5  # accuracy, relative to y, from which on single precision is not enough
_LEAST_CURVATURE = 3e-4  # for p > 2, relative to the column norms: R'' is zero at zero


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
    dual = terms.smallest_p <= 2
    used = design.norms > 0
    roots = np.sqrt(np.where(used, design.norms, 1.0))
    least = 0.0 if dual else _LEAST_CURVATURE * design.norms
    scale = float(np.linalg.norm(y))
    # For p > 2 conjugate gradients converge slowly with fewer features than samples.
    systems = Systems(design, iterate=dual or design.shape[1] >= design.shape[0])
    precise = bool(w.any())  # whether double precision is needed; a given w may be accurate
    t, u = _start(design, y, correlation, terms, w)
    w = np.where(used, terms.conjugate_slope(u), 0.0)
    size = np.inf
    for steps in range(min(most_steps, _MOST_STEPS) + 1):
        if precise and size > _SINGLE * scale:  # the last step of u had rounding errors
            u = design.correlate(t)
            w = np.where(used, terms.conjugate_slope(u), 0.0) if dual else w
        mismatch = np.zeros_like(w) if dual else np.where(used, terms.slope(w) - u, 0.0)
        weights = _inverse_curvature(terms, w, least)
        middle = w - weights * mismatch
        right = (design.residual(y, middle) if precise else y - systems.times(middle)) - t
        size = float(np.linalg.norm(right))
        left = size + float(np.abs(mismatch / roots).max(initial=0.0))
        if left <= _NEAR * limit or steps == most_steps:
            r = right + t if dual and precise else design.residual(y, w)
            q = design.correlate(r)
            # A coordinate step is at most the gradient divided by sqrt(L_j).
            if np.abs((terms.slope(w) - q)[used] / roots[used]).max(initial=0.0) <= limit:
                return Point(w, r, q), steps
        accuracy = max(min(_ACCURACY, size / scale), min(_TARGET * limit / (size or 1.0), 0.5))
        precise = precise or accuracy * size <= _SINGLE * scale
        step, change = systems.solve(weights, right, accuracy)
        if not np.isfinite(left):
            break
        if dual:
            found = _line_search(y, terms, (t, u, w), (step, change), -float(right @ step))
            if found is None:
                break
            t, u, w = found
        else:
            t, u, w = t + step, u + change, w + weights * (change - mismatch)
        w = np.where(used, w, 0.0)
    r = design.residual(y, w)
    return Point(w, r, design.correlate(r)), steps


def _start(
    design: Design, y: Floats, correlation: Floats, terms: Terms, w: Floats
) -> tuple[Floats, Floats]:
    """Return the multiple t of the residual with the lowest dual objective, and ``X' t``.

    Near p = 1 the conjugate is a large power, which overflows for the residual itself.
    """
    t = design.residual(y, w) if w.any() else y
    u = design.correlate(t) if w.any() else correlation
    square, product = float(t @ t), float(y @ t)
    best, lowest, share = 1.0, np.inf, 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(_MOST_SHRINKS):
            value = share**2 * square / 2 - share * product + terms.conjugate(share * u).sum()
            if value > lowest:  # the objective is convex
                break
            if np.isfinite(value):
                best, lowest = share, value
            share /= _SHRINK
    return best * t, best * u


def _inverse_curvature(terms: Terms, w: Floats, least: Any) -> Floats:
    """Return ``1 / max(R''(w), least)``; 0 where R'' is infinite at zero."""
    with np.errstate(divide="ignore"):
        inverse = 1 / np.maximum(terms.curvature(w), least)
    return np.where(np.isfinite(inverse), inverse, 0.0)


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
