"""Exact proximal operators of the p-norm penalty.

The decay step of this package is the proximal step of a surrogate: the penalty at a fixed auxiliary
variable. This module computes the proximal step of the penalty itself,

    prox(w) = argmin_u  (lam / p) * |u|^p + (u - w)^2 / 2 .

It keeps the sign of w, so only magnitudes matter. With ``x = |w|`` and ``u >= 0``, u is 0 or a root
of ``u + lam * u^(p-1) = x``. In a sum of norms, the terms with p = 0, 1 and 2, whose lam are l0, l1
and l2, have closed forms:

- p = 2 is a division: x, l0, l1 and every other lam are divided by 1 + l2;
- p = 1 is a shift: x becomes max(x - l1, 0);
- p = 0 is a constant cost of u != 0: u is kept only if it lowers the objective by more than l0.

The remaining equation has one power, or several if the sum has several other terms. In units of x
it is ``r + a * r^(p-1) = 1`` with ``r = u / x`` and ``a = lam * x^(p-2)``. Its accuracy does not
depend on the scale of the weights.

References:
    Xu, Chang, Xu and Zhang, L1/2 regularization: a thresholding representation theory, 2012.
    Marjanovic and Solo, On lq optimization and matrix completion, 2012 (the threshold for p < 1).
    Outmezguine and Levi, Decoupled Weight Decay for Any p Norm, 2024, appendix B.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdecay._core.arrays import namespace
from pdecay._core.penalty import Array, Penalty, magnitude
from pdecay._core.validation import check_number

Strength = Any  # a number >= 0, or an array of them that broadcasts against the weights

# Number of weights that each CPU core processes at a time, so that intermediates fit its cache.
_PIECE = 1 << 15


def lp(w: Array, p: float, lam: Strength) -> Array:
    """Return the exact proximal operator of ``(lam / p) * |w|^p``, elementwise.

    The result is ``argmin_u (lam / p) * |u|^p + (u - w)^2 / 2``. At p = 0 the penalty is
    ``lam * [u != 0]``, as in :meth:`Penalty.value`, and the operator is the hard threshold at
    ``sqrt(2 * lam)``. At p = 1 it is the soft threshold at lam; at p = 2 it is ``w / (1 + lam)``.
    For p < 1 it is discontinuous: weights up to and including a threshold become 0.

    p = 0, 1/2, 2/3, 1, 3/2, 2 and 3 have closed forms; other p use Newton's iteration. Both are
    accurate to a few units in the last place. Half precision is computed in single precision. For
    complex weights the magnitude shrinks. The result is a new array with the dtype of w and has no
    gradient.

    Args:
        w: a numpy array or torch tensor.
        p: the norm, a number >= 0.
        lam: its strength, a number >= 0 or an array of them; where it is 0, w is unchanged.

    Example:
        >>> lp(np.array([-3.0, 0.5, 2.0]), p=1, lam=1.0)
        array([-2.,  0.,  1.])
    """
    return _prox(w, {check_number("p", p): _strength("lam", lam)})


def penalty_prox(penalty: Penalty, w_tilde: Array, lr: Strength) -> Array:
    """Return the proximal step of a penalty: ``argmin_u lr * R(u) + |u - w_tilde|^2 / 2``.

    The decay step ``penalty.factor(w_old, lr) * w_tilde`` approximates it. The proximal step does
    not need ``w_old``. It is exact for every sum of norms: the left side of the equation is convex
    in the logarithm of u, so it has at most two roots, and only the larger can be the minimum.

    Args:
        penalty: an :class:`Lp` or a sum of them.
        w_tilde: the weights after the optimizer's own update.
        lr: the learning rate, with its schedule; a number or a tensor on the weights' device.

    Example:
        >>> from pdecay import Lp
        >>> penalty_prox(Lp(1, 0.5) + Lp(2, 1.0), np.array([-3.5, 0.5]), lr=1.0)
        array([-1.5,  0. ])
    """
    if not isinstance(penalty, Penalty):
        raise TypeError(f"penalty_prox needs an Lp or a sum of Lp, got {penalty!r}")
    rate = _strength("lr", lr)
    strengths: dict[float, Strength] = {}
    for p, lam in penalty.pairs():
        if lam:
            strengths[p] = strengths.get(p, 0.0) + rate * lam
    return _prox(w_tilde, strengths)


def _strength(name: str, value: Strength) -> Strength:
    """Check a number; return an array unchecked, since reading it would wait for its device."""
    if hasattr(value, "dtype") and not isinstance(value, numbers.Real):
        return value.detach() if isinstance(value, Tensor) else value
    return check_number(name, value)


def _prox(w: Array, strengths: dict[float, Strength]) -> Array:
    """Return the proximal operator of ``sum_p (strengths[p] / p) * |w|^p``."""
    w = _floating(w)
    strengths = {p: lam for p, lam in strengths.items() if not _is_zero(lam)}
    if not strengths:
        return w.clone() if isinstance(w, Tensor) else w.copy()
    size = _PIECE * torch.get_num_threads()
    by_pieces = type(w) is Tensor and w.device.type == "cpu" and w.numel() > size
    if not by_pieces or any(getattr(lam, "ndim", 0) for lam in strengths.values()):
        return _prox_of_piece(w, strengths)
    result = torch.empty(w.shape, dtype=w.dtype, device="cpu")
    for piece, out in zip(w.reshape(-1).split(size), result.view(-1).split(size), strict=True):
        out.copy_(_prox_of_piece(piece, strengths))
    return result


def _prox_of_piece(w: Array, strengths: dict[float, Strength]) -> Array:
    x = magnitude(w)
    xp = namespace(x)
    listed = {p: _like(lam, x) for p, lam in strengths.items()}
    total = sum(listed.values())
    with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
        u = _minimiser(x, listed)
        # Set subnormal results to 0, as `magnitude` does for weights. The comparison also replaces
        # NaN, the result of 0/0 where a term underflowed.
        u = xp.where(u >= float(xp.finfo(x.dtype).smallest_normal), u, 0.0)
        # Rounding must not let a weight grow. Weights that are not finite are unchanged.
        u = xp.where((u < x) & (x < math.inf), u, x)
        if xp.isdtype(w.dtype, "real floating"):
            result = xp.where(w < 0, -u, u)
            result = xp.where(u == 0, 0.0, result)  # +0.0, never -0.0
        else:
            result = w * xp.where(x > 0, u / x, 0.0)
        result = xp.astype(result, w.dtype)
        return result if isinstance(total, float) else xp.where(total > 0, result, w)


def _minimiser(x: Array, strengths: dict[float, Strength]) -> Array:
    """Return the minimising u for each magnitude x; undefined where x is 0 or not finite."""
    xp = namespace(x)
    l0, l1, l2 = (strengths.get(p, 0.0) for p in (0.0, 1.0, 2.0))
    strengths = {p: lam for p, lam in strengths.items() if p not in (0.0, 1.0, 2.0)}
    if not _is_zero(l1):
        x = xp.clip(x - l1, 0.0, None)
    if not _is_zero(l2):
        x = x / (1 + l2)
        l0 = l0 / (1 + l2)
        strengths = {p: lam / (1 + l2) for p, lam in strengths.items()}
    if not strengths:
        u, gain = x, 0.5
    elif len(strengths) == 1:
        ((p, lam),) = strengths.items()
        u = _single(x, p, lam)
        if not _is_zero(l0):
            r = u / x
            gain = r * (1 - r / 2 - (1 - r) / p)
    else:
        u, gain = _several(x, strengths)
    if _is_zero(l0):
        return u
    # Compared with u = 0, the objective is lower by x^2 * gain. Compare roots: x^2 may underflow.
    return xp.where(x * (2 * gain) ** 0.5 > (2 * l0) ** 0.5, u, 0.0)


def _single(x: Array, p: float, lam: Strength) -> Array:
    """Return the minimiser for one term, p not in {0, 1, 2}."""
    xp = namespace(x)
    if p > 1:
        return _ABOVE_1.get(p, _newton_above_1)(x, p, lam)
    # At the threshold the objective has the same value as at u = 0. With the stationarity condition
    # this gives r = 2 (1 - p) / (2 - p) there. All roots above the threshold are thus in [r, 1],
    # away from the singularity at 0, where the equation's derivative is at least 1 - p / 2.
    r = 2 * (1 - p) / (2 - p)
    threshold = p / (2 - p) * r ** (1 - p)
    a = _share(x, x, p, lam)
    u = _BELOW_1.get(p, _newton_below_1)(a, p) * x
    return xp.where(a < threshold, u, 0.0)


def _half(a: Array, p: float) -> Array:
    """Solve ``r + a * r^(-1/2) = 1``: with z = sqrt(r), the cubic z^3 - z + a = 0, by Vieta."""
    xp = _math(a)
    return 4 / 3 * xp.cos(xp.acos(-(27**0.5) / 2 * xp.clip(a, None, 0.3)) / 3) ** 2


def _two_thirds(a: Array, p: float) -> Array:
    """Solve ``r + a * r^(-1/3) = 1``: with z = r^(1/3), the quartic z^4 - z + a = 0, by Ferrari.

    ``z^4 - z + a = (z^2 + m)^2 - 2 m (z + 1/(4m))^2`` if m^3 - a m - 1/8 = 0; its factor with the
    larger roots is z^2 - n z + m - 1/(2n), with n = sqrt(2m).
    """
    a = namespace(a).clip(a, None, 0.4)  # the threshold is at 2^(-4/3)
    k = (1 / 16 + (1 / 256 - a**3 / 27) ** 0.5) ** (1 / 3)
    n = (2 * k + 2 * a / (3 * k)) ** 0.5
    z = (n + (2 / n - n**2) ** 0.5) / 2
    return z**3


def _newton_below_1(a: Array, p: float) -> Array:
    """Return the larger root of ``r + a * r^(p-1) = 1``, p < 1; convex, so start from r = 1."""
    t = namespace(a).ones_like(a)
    return _newton(1.0, a, p, t)


def _three_halves(x: Array, p: float, lam: Strength) -> Array:
    """Solve ``u + lam * u^(1/2) = x``, a quadratic in sqrt(u), without cancellation."""
    return (2 * x / (lam + _hypot(lam, 2 * x**0.5))) ** 2


def _three(x: Array, p: float, lam: Strength) -> Array:
    """Solve ``u + lam * u^2 = x``, a quadratic in u, without cancellation or overflow."""
    return 2 * x / (1 + _hypot(1.0, 2 * lam**0.5 * x**0.5))


def _newton_above_1(x: Array, p: float, lam: Strength) -> Array:
    """Return the root of ``u + lam * u^(p-1) = x``, p > 1.

    Neither term can exceed x, so the root is below both ``x`` and ``(x / lam)^(1 / (p-1))``. In
    units of this upper bound, no power can overflow and the root is not far below 1.
    """
    xp = _math(x)
    bound = xp.minimum(x, _root(x, p, lam))
    # The two terms at u = bound, in units of x. The larger is 1 up to the rounding of `bound`. That
    # rounding matters: for p close to 1, bound is a high power of x / lam.
    c = bound / x
    b = _share(bound, x, p, lam)
    t = xp.ones_like(x)
    if p < 2:
        # Concave: Newton's iteration increases towards the root. Start from its first step, which
        # is below the root, or from a lower bound: the slope in log u is at least p - 1.
        first = 1 - (c + b - 1) / (c + (p - 1) * b)
        t = xp.maximum(first, (c + b) ** (-1 / (p - 1)))
    return bound * _newton(c, b, p, t)


def _newton(c: Array | float, b: Array, p: float, t: Array) -> Array:
    """Solve ``c * t + b * t^(p-1) = 1`` by Newton's iteration.

    From a start on the safe side of the root, convergence is monotone and quadratic. The number of
    steps is the measured maximum over all c and b.
    """
    single = namespace(t).finfo(t.dtype).bits == 32
    for _ in range((6 if single else 7) + math.ceil(math.log(min(max(p / 4, 1.0), 1e16)))):
        power = b * t ** (p - 1)
        t = t - t * (c * t + power - 1) / (c * t + (p - 1) * power)
    return t


def _several(x: Array, strengths: dict[float, Strength]) -> tuple[Array, Array]:
    """Return the minimiser for several terms, none with p in {0, 1, 2}, and its gain over u = 0.

    Newton's iteration in y = log u solves ``log(u + sum_k lam_k * u^(p_k - 1)) = log x``. The left
    side is convex in y (log-sum-exp of linear functions). From the right of both roots, the
    iteration decreases to the larger root. If there is no root, it stops where the slope is no
    longer positive; there the objective is above its value at u = 0.
    """
    xp = _math(x)
    bound = x
    for p, lam in strengths.items():
        if p > 1:
            bound = xp.minimum(bound, _root(x, p, lam))
    c = bound / x
    shares = [(p, _share(bound, x, p, lam)) for p, lam in strengths.items()]
    t = xp.ones_like(x)
    for _ in range(_several_steps(strengths)):
        powers = [(p - 1, b * t ** (p - 1)) for p, b in shares]
        total = c * t + sum(power for _, power in powers)
        slope = c * t + sum(q * power for q, power in powers)
        t = t * xp.where(slope > 0, total ** (-total / slope), 1.0)
    u, r = bound * t, c * t
    gain = r * (1 - r / 2 - sum(b * t ** (p - 1) / p for p, b in shares))
    if min(strengths) < 1:
        u = xp.where(gain > 0, u, 0.0)
    return u, xp.clip(gain, 0.0, None)


def _several_steps(strengths: dict[float, Strength]) -> int:
    """Return the number of iterations, measured as in `_newton`; p close to 1 needs more."""
    nearest = min(abs(p - 1) for p in strengths)
    return 10 + math.ceil(math.log(1 / min(max(nearest, 1e-16), 1.0)))


def _root(x: Array, p: float, lam: Strength) -> Array:
    """Return u with ``lam * u^(p-1) = x``, p > 1, nearly: the power is rounded.

    For p > 2, x / lam may overflow or underflow although u does not.
    """
    power = 1 / (p - 1)
    return (x / lam) ** power if p < 2 else x**power / lam**power


def _share(u: Array, x: Array, p: float, lam: Strength) -> Array:
    """Return ``lam * u^(p-1)`` in units of x; only the result itself can overflow or underflow."""
    if p < 2:
        return lam / x * u ** (p - 1)
    return (lam**0.5 / x**0.5 * u ** ((p - 1) / 2)) ** 2


_BELOW_1: dict[float, Callable[[Array, float], Array]] = {1 / 2: _half, 2 / 3: _two_thirds}
_ABOVE_1: dict[float, Callable[[Array, float, Strength], Array]] = {3 / 2: _three_halves, 3: _three}


def _math(x: Array) -> Any:
    """Return the namespace with the mathematical functions of the array's framework."""
    return torch if isinstance(x, Tensor) else namespace(x)


def _hypot(first: Strength, second: Array) -> Array:
    xp = _math(second)
    return xp.hypot(xp.ones_like(second) * first, second)


def _floating(w: Array) -> Array:
    """Convert the weights to a floating-point array without gradient."""
    if isinstance(w, Tensor):
        w = w.detach()
        return w if w.is_floating_point() or w.is_complex() else w.to(torch.float64)
    if not hasattr(w, "__array_namespace__"):
        w = np.asarray(w)
    xp = namespace(w)
    known = ("real floating", "complex floating")
    return w if xp.isdtype(w.dtype, known) else xp.astype(w, xp.float64)


def _like(lam: Strength, x: Array) -> Strength:
    """Convert an array of strengths to the precision of the weights; keep a number."""
    return lam if isinstance(lam, float) else namespace(x).astype(lam, x.dtype)


def _is_zero(lam: Strength) -> bool:
    return isinstance(lam, float) and lam == 0
