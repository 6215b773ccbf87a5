"""The penalty as the solvers use it: one strength for each p, its derivatives and its conjugate.

:class:`Terms` holds ``R(w) = sum_k (lam_k / p_k) * sum_j |w_j|^p_k`` as plain numbers. The
terms with p = 0, 1 and 2 have closed forms in every computation: their strengths are `l0`, `l1` and
`l2`. `p` and `lam` hold the other terms.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdecay._core.penalty import Lp, Penalty

Floats = NDArray[np.float64]

_ROUNDING = 1 - 1e-12  # keeps a bound valid after rounding
_SMALL_SHARE = 1e-3  # "practically zero" for p > 1, where no coefficient is exactly zero
_MOST_STEPS = 50
_STEP_LIMIT = 1e-9  # Newton's method converges quadratically: the next step is exact


class _CPenalty(ctypes.Structure):
    """The struct `penalty` of bridge.c."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("l0", "l1", "l2", "ratio", "limit")),
        ("count", ctypes.c_int64),
        ("p", ctypes.c_void_p),
        ("lam", ctypes.c_void_p),
    ]


class Terms:
    """A penalty with the strengths of equal p added up.

    Args:
        penalty: an Lp or a sum of Lp.
        factor: a number >= 0 that multiplies all strengths.
    """

    def __init__(self, penalty: Penalty, factor: float = 1.0) -> None:
        strengths: dict[float, float] = {}
        for p, lam in penalty.pairs():
            strengths[p] = strengths.get(p, 0.0) + factor * lam
        self.pairs = [(p, lam) for p, lam in sorted(strengths.items()) if lam > 0]
        self.l0, self.l1, self.l2 = (strengths.get(p, 0.0) for p in (0.0, 1.0, 2.0))
        others = [(p, lam) for p, lam in self.pairs if p not in (0.0, 1.0, 2.0)]
        self.p = np.array([p for p, _ in others])
        self.lam = np.array([lam for _, lam in others])
        # For one term with p < 1 the prox jumps: its smallest non-zero value is ratio * x, at
        # lam * x^(p-2) = limit.
        self.ratio, self.limit = 0.0, 0.0
        if len(others) == 1 and others[0][0] < 1:
            self.ratio, self.limit = jump(others[0][0])
        self.smallest_p = self.pairs[0][0] if self.pairs else 1.0
        self.largest_p = self.pairs[-1][0] if self.pairs else 1.0

    @property
    def convex(self) -> bool:
        """Whether every p is at least 1."""
        return self.smallest_p >= 1

    @property
    def sparse(self) -> bool:
        """Whether minimisers have exact zeros, which holds if some p is at most 1."""
        return bool(self.pairs) and self.smallest_p <= 1

    @functools.cached_property
    def as_c(self) -> _CPenalty:
        """The struct that the C kernels take; it points into this object's arrays."""
        return _CPenalty(
            self.l0, self.l1, self.l2, self.ratio, self.limit,
            len(self.p), self.p.ctypes.data, self.lam.ctypes.data,
        )  # fmt: skip

    def value(self, w: Floats) -> float:
        """Return R(w)."""
        size = np.abs(w[w != 0])
        return float(sum(lam / (p or 1) * (size**p).sum() for p, lam in self.pairs))

    def slope(self, w: Floats) -> Floats:
        """Return the derivative of R at non-zero coefficients."""
        size = np.abs(w)
        total = np.zeros_like(size)
        for p, lam in self.pairs:
            if p:
                total += lam * size ** (p - 1)
        return np.sign(w) * total

    def curvature(self, w: Floats) -> Floats:
        """Return the second derivative of R at non-zero coefficients."""
        size = np.abs(w)
        total = np.zeros_like(size)
        for p, lam in self.pairs:
            if p not in (0.0, 1.0):
                total += lam * (p - 1) * size ** (p - 2)
        return total

    def cut(self, norms: Floats) -> Floats:
        """Return for each squared column norm a bound below which the prox is 0.

        It is the exact threshold, up to rounding, unless several terms have p not in {0, 1, 2}.
        """
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            t = 1 / norms
            scale = 1 + t * self.l2
            result: Floats = t * self.l1
            if self.l0 and not len(self.p):
                result = result + scale * np.sqrt(2 * self.l0 * t / scale)
            elif self.limit and not self.l0:
                (p,), (lam,) = self.p, self.lam
                result = result + scale * (lam * t / scale / self.limit) ** (1 / (2 - p))
        return np.where(norms > 0, result * _ROUNDING, 0.0)

    def conjugate(self, u: Floats) -> Floats:
        """Return ``sup_t u * t - R(t)`` elementwise, for a convex penalty with some p > 1."""
        t = np.abs(self.conjugate_slope(u))
        excess = np.clip(np.abs(u) - self.l1, 0.0, None)
        values = [lam / p * t**p for p, lam in self.pairs if p > 1]
        return np.asarray(excess * t - np.sum(values, axis=0))

    def conjugate_sum(self, u: Floats) -> float:
        """Return the sum of the conjugate; infinity if it overflows."""
        if self.largest_p == 1:  # the caller has made |u| <= lam, where the conjugate is 0
            return 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(self.conjugate(u).sum())
        return total if np.isfinite(total) else np.inf

    def dual_shares(self, u: Floats) -> list[float]:
        """Return factors of a dual point with products u that may have the smallest duality gap.

        At the minimum the factor is 1. Near p = 1 the conjugate is a large power of |u| / lam, so
        that a small error makes the gap useless; a factor that makes |u| at most the sum of all
        lam bounds it. For p = 1 alone the conjugate is finite with this factor only.
        """
        most = float(np.abs(u).max(initial=0.0))
        share = min(1.0, sum(lam for _, lam in self.pairs) / most if most else 1.0)
        return [share] if self.largest_p == 1 else [1.0, share]

    def conjugate_slope(self, u: Floats) -> Floats:
        """Return the t of the supremum ``sup_t u * t - R(t)``: the conjugate's derivative."""
        excess = np.clip(np.abs(u) - self.l1, 0.0, None)
        powers = [(p - 1, lam) for p, lam in self.pairs if p > 1]
        # The supremum is where the derivative sum_k lam_k * t^(p_k - 1) equals the excess. No term
        # is above the excess, which bounds t.
        bound: Floats = np.min([(excess / lam) ** (1 / q) for q, lam in powers], axis=0)
        if len(powers) == 1:
            return np.sign(u) * bound
        # Newton's method in log t: the logarithm of the derivative is convex and increases there,
        # so that the steps from the bound all go down.
        t = bound
        for _ in range(_MOST_STEPS):
            with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 where t is 0
                parts = [lam * t**q / excess for q, lam in powers]
                total = np.sum(parts, axis=0)
                slope = sum(q * part for (q, _), part in zip(powers, parts, strict=True))
                step = np.where(t > 0, total * np.log(total) / slope, 0.0)
            t = t * np.exp(-step)
            if not step.max(initial=0.0) > _STEP_LIMIT:
                break
        return np.sign(u) * t


def jump(p: float) -> tuple[float, float]:
    """Return the smallest non-zero ``prox(x) / x`` and its ``lam * x^(p-2)``, for 0 < p < 1.

    At the jump of the prox the objectives of zero and of the non-zero minimum are equal.
    """
    ratio = 2 * (1 - p) / (2 - p)
    return ratio, p / (2 - p) * ratio ** (1 - p)


def entry_strength(p: float, norm: Any, correlation: Any) -> Any:
    """Return the smallest lam at which one coordinate step from 0 stays at 0.

    Args:
        p: the norm. For p > 1 "stays at 0" means at most 1/1000 of the step without penalty.
        norm: the squared column norm(s).
        correlation: the absolute value(s) of the column's product with the residual.
    """
    step = correlation / norm
    if p == 0:
        limit = 0.5
    elif p == 1:
        limit = 1.0
    elif p < 1:
        _, limit = jump(p)
    else:
        limit = (1 - _SMALL_SHARE) * _SMALL_SHARE ** (1 - p)
    return limit * norm * step ** (2 - p)


def relax(terms: Terms, share: float, norm: float) -> Terms:
    """Return the penalty with every p < 1 moved towards 1; share 1 makes it convex.

    The strengths are chosen so that zero coefficients with squared column norm `norm` become
    non-zero at the same correlation with the residual as before.
    """
    level = float(terms.cut(np.array([norm]))[0]) * norm - terms.l1
    if not level > 0:  # several terms with other p: the largest level of a single term
        single = [Terms(Lp(p, lam)).cut(np.array([norm]))[0] for p, lam in terms.pairs if p < 1]
        level = max(single) * norm
    moved: Penalty = sum((Lp(p, lam) for p, lam in terms.pairs if p >= 1), Lp(1.0, 0.0))
    below = [p for p, _ in terms.pairs if p < 1]
    for p in below:
        q = p + (1 - p) * share
        moved = moved + Lp(q, float(entry_strength(q, norm, level)) / len(below))
    return Terms(moved)
