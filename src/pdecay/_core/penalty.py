"""The p-norm penalty, its auxiliary variable and the factor of its decay step.

The penalty of a weight vector w is a sum of powers of norms,

    R(w) = sum_k (lam_k / p_k) * sum_i |w_i|^p_k .

With the auxiliary variable ``s = |w|^(p-2)`` it is a weighted square: ``(lam/2) * s * w^2`` plus a
function of s only. Its proximal step at fixed s is a division, which can neither overshoot nor
flip a sign:

    w  <-  w_tilde / (1 + lr * sum_k lam_k * |w_old|^(p_k - 2))

``w_old`` is the weight before and ``w_tilde`` the weight after the optimizer's own update. Every
path of this package, on every framework, either calls :meth:`Penalty.factor` or is tested against
it. The code uses only operators that the arrays of all frameworks have, in place where possible.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdecay._core.arrays import namespace
from pdecay._core.validation import check_number
from pdecay._utils.user_warnings import warn_user

Array = Any  # a numpy array, a torch tensor, or anything else that follows the array API


class Penalty:
    """A sum of :class:`Lp` terms. Built by adding them: ``Lp(0.8, 1e-3) + Lp(2, 2e-3)``."""

    terms: tuple[Lp, ...]

    def value(self, w: Array) -> Array:
        """Return ``R(w) = sum_k (lam_k / p_k) * sum_i |w_i|^p_k``, a scalar of w's framework.

        At p = 0, where lam/p diverges, the value is ``lam`` times the number of non-zeros.
        """
        x = magnitude(w)
        with np.errstate(over="ignore"):
            return sum((term._value(x) for term in self.terms[1:]), self.terms[0]._value(x))

    def s(self, w: Array) -> Array:
        """Return the auxiliary variable at its optimum, ``|w|^(p-2)``; inf at w = 0 for p < 2.

        For a sum it is the mean of the terms' s, weighted by lam. The decay factor is then
        ``1 / (1 + lr * lam * s)`` with lam the sum of all lam.
        """
        with np.errstate(divide="ignore", over="ignore"):
            x = magnitude(w)
            low, _ = _normal_range(x)
            largest = max(term.lam for term in self.terms)
            if len(self.terms) == 1 or not largest:
                shares = [(term.p, 1 / len(self.terms)) for term in self.terms]
            else:  # no share may underflow to 0: 0 times an infinite s is NaN
                total = sum(term.lam / largest for term in self.terms)
                shares = [(t.p, max(t.lam / largest / total, low)) for t in self.terms if t.lam]
            return _weighted_powers(x, shares)

    def factor(self, w_old: Array, lr: float | Array) -> Array:
        """Return the factor, between 0 and 1, that multiplies the weights after the update.

        The factor is ``1 / (1 + lr * sum_k lam_k * |w_old|^(p_k - 2))``, elementwise. For
        half-precision weights it is in single precision, since a factor near 1 would round to 1.
        For complex weights it uses the magnitude.

        Singular points: if ``lr * lam`` is 0, the factor is 1 everywhere, also at w_old = 0.
        Otherwise, the power is infinite at w_old = 0 for p < 2, and the factor is exactly 0.
        """
        # Do not read the value of an lr on a device: that would wait for the device. The order of
        # the checks matters: torch.compile traces no hasattr of a number.
        is_array = not isinstance(lr, float | numbers.Real) and hasattr(lr, "dtype")
        rate = None if is_array else check_number("lr", lr)
        x = _absolute(w_old)
        xp = namespace(x)
        low, high = _normal_range(x)
        # 0 * inf is NaN: leave out terms with weight 0, and clamp weights that would underflow to 0
        # (or overflow) in the precision of w_old.
        shares = [(p, lam if rate is None else rate * lam) for p, lam in self.pairs()]
        weights = [(p, min(max(share, low), high)) for p, share in shares if share]
        if not weights:
            return xp.ones_like(x)
        # Where the power of every subnormal number overflows, the factor is 0 without a flush.
        if (min(p for p, _ in weights) - 2) * math.log(low) <= math.log(high):
            x = _flushed(x)
        if xp is np:
            with np.errstate(divide="ignore", over="ignore"):
                factor = _inverse(x, weights, lr if rate is None else None, (low, high))
        else:  # torch.compile does not trace np.errstate
            factor = _inverse(x, weights, lr if rate is None else None, (low, high))
        return factor if rate is not None else xp.where(lr > 0, factor, 1.0)

    @property
    def absorbs(self) -> bool:
        """Whether zero is a fixed point of the step, as it is if some p < 2 with lam > 0."""
        return any(term.p < 2 and term.lam > 0 for term in self.terms)

    def scaled(self, scale: float) -> Penalty:
        """Return the penalty with every lam multiplied by a number."""
        return Sum(tuple(Lp(term.p, scale * term.lam) for term in self.terms))

    def pairs(self) -> list[list[float]]:
        """Return ``[[p, lam], ...]``, the plain numbers in an optimizer's ``param_groups``."""
        return [[term.p, term.lam] for term in self.terms]

    def __add__(self, other: object) -> Penalty:
        if not isinstance(other, Penalty):
            return NotImplemented
        return Sum(self.terms + other.terms)

    def __radd__(self, other: object) -> Penalty:  # so that sum([...]) works: it starts at 0
        return self if isinstance(other, int) and other == 0 else NotImplemented


@dataclass(frozen=True)
class Lp(Penalty):
    """The penalty ``(lam / p) * sum |w|^p`` for any p >= 0.

    Args:
        p: the norm. For p < 1, weights close to zero become zero whatever their gradient. For
            p = 1, they do so if their gradient is below lam. For 1 < p < 2, weights become small
            but not exactly zero. p = 2 is ordinary weight decay.
        lam: its strength. As in AdamW, the decay is decoupled and multiplied by the learning rate.

    Example:
        >>> Lp(1, 0.1).factor(np.array([0.0, 0.1, 1.0]), lr=1.0)
        array([0.        , 0.5       , 0.90909091])
    """

    p: float
    lam: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", check_number("p", self.p))
        object.__setattr__(self, "lam", check_number("lam", self.lam))

    @property
    def terms(self) -> tuple[Lp, ...]:  # type: ignore[override]  # a field in Penalty
        return (self,)

    def _value(self, x: Array) -> Array:
        if not self.lam:  # 0 times a power that overflows would be NaN
            return (x * 0.0).sum()
        powers = x**self.p if self.p else namespace(x).ones_like(x) * (x != 0)
        low, high = _normal_range(x)  # lam / p overflows for a tiny p: inf * 0 would be NaN
        return min(max(self.lam / (self.p or 1), low), high) * powers.sum()


@dataclass(frozen=True)
class Sum(Penalty):
    """A sum of :class:`Lp` terms (elastic weight decay)."""

    terms: tuple[Lp, ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("a sum of penalties needs at least one Lp term, got none")

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.terms))


# A penalty as configuration files and checkpoints have it, [[p, lam], ...], is accepted, too.
Decay = Penalty | Sequence[Sequence[float]] | None


def as_penalty(decay: object) -> Penalty | None:
    """Convert a user's or a checkpoint's decay to a penalty or None.

    Raises:
        TypeError: if it is neither an Lp, a sum of them, None, nor a list of [p, lam] pairs.
        ValueError: if a p or lam in it is negative or not finite.
    """
    if decay is None:
        return None
    if isinstance(decay, Penalty):
        for p, lam in decay.pairs():
            if 0 < p <= 0.1 and 0.3 <= lam <= 2:
                warn_user(
                    f"Lp({p:g}, {lam:g}) has p = {p:g} and lam = {lam:g}. If they are swapped, "
                    f"write Lp({lam:g}, {p:g}): p is the first argument"
                )
        return decay
    if isinstance(decay, Sequence) and not isinstance(decay, str):
        pairs = list(decay)
        if all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
            terms = tuple(Lp(p, lam) for p, lam in pairs)
            return (Sum(terms) if len(terms) > 1 else terms[0]) if terms else None
    raise TypeError(
        f"a decay must be an Lp, a sum of Lp, None or a list of [p, lam] pairs, got {decay!r}"
    )


def factor_of(w_old: Array, pairs: Sequence[tuple[Array, Array]], lr: float | Array) -> Array:
    """Return :meth:`Penalty.factor` for (p, lam) pairs that may be traced arrays.

    A schedule has no value while ``jax.jit`` traces it. Nothing is checked here: p, lam and lr must
    be at least 0.
    """
    x = magnitude(w_old)
    xp = namespace(x)
    low, high = _normal_range(x)
    total = xp.zeros_like(x)
    with np.errstate(divide="ignore", over="ignore"):
        for p, lam in pairs:
            weight = xp.astype(xp.asarray(lr * lam), x.dtype)
            power = x ** xp.astype(xp.asarray(p - 2.0), x.dtype)
            # 0 * inf is NaN: leave out terms with weight 0
            total = total + xp.where(weight > 0, xp.clip(weight, low, high) * power, 0.0)
    return 1 / (1 + total)


def magnitude(w: Array) -> Array:
    """Return ``|w|`` as a new array in at least single precision, with subnormal numbers set to 0.

    Subnormal weights are about to become 0, and arithmetic on them is many times slower.
    """
    return _flushed(_absolute(w))


def _absolute(w: Array) -> Array:
    if not hasattr(w, "dtype"):
        w = np.asarray(w)
    xp = namespace(w)
    x = xp.abs(w)
    if not xp.isdtype(x.dtype, "real floating"):
        x = xp.astype(x, xp.float64)
    elif xp.finfo(x.dtype).bits < 32:
        x = xp.astype(x, xp.float32)
    return x


def _flushed(x: Array) -> Array:
    """Set subnormal numbers to 0, in place if possible."""
    xp = namespace(x)
    if hasattr(xp, "flush"):
        return xp.flush(x)
    x *= x >= _normal_range(x)[0]
    return x


def _inverse(
    x: Array,
    weights: Sequence[tuple[float, float]],
    lr: Array | None,
    normal_range: tuple[float, float],
) -> Array:
    """Return ``1 / (1 + lr * sum_k weight_k * x^(p_k - 2))`` in x's memory; no lr means 1."""
    total = _weighted_powers(x, weights)
    if lr is not None:
        rates = namespace(lr)
        total *= rates.clip(rates.astype(lr, total.dtype), *normal_range)
    total += 1
    total **= -1
    return total


def _weighted_powers(x: Array, weights: Sequence[tuple[float, float]]) -> Array:
    """Compute ``sum_k weight_k * x^(p_k - 2)`` for pairs (p_k, weight_k), in place in x.

    0 to a negative power is inf and 0 to the power of 0 is 1, as the decay step needs.
    """
    (p, weight), *others = weights
    rest = [(x ** (p_k - 2), weight_k) for p_k, weight_k in others]
    x **= p - 2
    x *= weight
    for term, weight_k in rest:
        term *= weight_k
        x += term
    return x


def _normal_range(x: Array) -> tuple[float, float]:
    """Return the smallest and the largest normal number of x's precision."""
    info = namespace(x).finfo(x.dtype)
    return float(info.smallest_normal), float(info.max)
