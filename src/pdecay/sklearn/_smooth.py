"""Newton's method for penalties with every p > 1 and more features than samples.

No coefficient is zero then, and coordinate descent would visit all features in every one of many
sweeps. Newton steps need one linear system with as many unknowns as samples:

- If some p is at most 2, the dual problem is smooth: minimise
  ``|t|^2 / 2 - y' t + sum_j R*(x_j' t)`` over t, with the conjugate R* of the penalty. Its solution
  is the residual, and ``w_j`` is the derivative of R* at ``x_j' t``.
- If every p is above 2, the problem itself is twice differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from scipy import linalg

from pdecay.sklearn._design import Design
from pdecay.sklearn._terms import Floats, Terms

_SHARES = 41  # multiples of the residual that are tried as a start
_HALVINGS = 40
_DECREASE = 1e-4  # of the decrease that the slope promises
_LEAST_CURVATURE = 1e-8  # relative to the largest column norm: p > 2 has none at zero


def newton_iterates(design: Design, y: Floats, terms: Terms, w: Floats) -> Iterator[Floats]:
    """Yield the coefficients after each Newton step from w, until no step is possible."""
    return (_dual_iterates if terms.smallest_p <= 2 else _primal_iterates)(design, y, terms, w)


def _dual_iterates(design: Design, y: Floats, terms: Terms, w: Floats) -> Iterator[Floats]:
    t = design.residual(y, w)
    u = design.correlate(t)
    # Near p = 1 the conjugate is a large power: the best multiple of the residual avoids overflow.
    shares = np.geomspace(1.0, 0.01, _SHARES)
    with np.errstate(over="ignore", invalid="ignore"):
        values = [s * s * (t @ t) / 2 - s * (y @ t) + terms.conjugate(s * u).sum() for s in shares]
    share = shares[int(np.argmin(np.nan_to_num(values, nan=np.inf)))]
    t, u = share * t, share * u
    w = terms.conjugate_slope(u)
    while True:
        gradient = t - design.residual(y, w)
        with np.errstate(divide="ignore", over="ignore"):
            weights = np.where(w != 0, 1 / terms.curvature(np.where(w != 0, w, 1.0)), 0.0)
        if not np.isfinite(weights).all():
            return
        step = _solve(design, weights, -gradient)
        change = design.correlate(step)

        def value(length: float, t: Floats = t, u: Floats = u, s: Floats = step) -> float:
            point = t + length * s
            conjugate = terms.conjugate(u + length * change).sum()  # noqa: B023
            return float(point @ point / 2 - y @ point + conjugate)

        length = _line_search(value, float(gradient @ step))
        if not length:
            return
        t, u = t + length * step, u + length * change
        w = terms.conjugate_slope(u)
        yield w


def _primal_iterates(design: Design, y: Floats, terms: Terms, w: Floats) -> Iterator[Floats]:
    none = np.zeros_like(y)
    while True:
        r = design.residual(y, w)
        gradient = terms.slope(w) - design.correlate(r)
        diagonal = terms.curvature(w) + _LEAST_CURVATURE * float(design.norms.max())
        # (X' X + D)^-1 by a system of the size of X D^-1 X'.
        first = gradient / diagonal
        inner = _solve(design, 1 / diagonal, -design.residual(none, first))
        step = design.correlate(inner) / diagonal - first
        change = -design.residual(none, step)

        def value(length: float, r: Floats = r, w: Floats = w, s: Floats = step) -> float:
            rest = r - length * change  # noqa: B023
            return float(rest @ rest / 2) + terms.value(w + length * s)

        length = _line_search(value, float(gradient @ step))
        if not length:
            return
        w = w + length * step
        yield w


def _solve(design: Design, weights: Floats, right: Floats) -> Floats:
    """Solve ``(I + X diag(weights) X') x = right``."""
    matrix = design.outer(weights)
    matrix.flat[:: len(matrix) + 1] += 1.0
    try:
        return np.asarray(linalg.solve(matrix, right, assume_a="pos", overwrite_a=True))
    except linalg.LinAlgError:
        return np.zeros_like(right)


def _line_search(value: Callable[[float], float], slope: float) -> float:
    """Return a step length that decreases the value; 0 if there is none."""
    start, length = value(0.0), 1.0
    for _ in range(_HALVINGS):
        if slope < 0 and value(length) <= start + _DECREASE * length * slope:
            return length
        length /= 2
    return 0.0
