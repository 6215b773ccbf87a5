"""The fused steps as functions of flat tensors: what `compiled` compiles, and runs uncompiled too.

Each takes its tensors as a list of 1-D `streams`, the weights first, and all hyper-parameters as
one tensor of `numbers`, so that none of them is ever a constant of the compiled code. The power and
the form of the factor are those of fastpow.h and decay.h, explained there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Kind(NamedTuple):
    """What a compiled function depends on, beyond dtype and device."""

    form: str  # "flat", "p_0", "p_half", "p_1", "p_3_2" or "powers"
    powers: int
    bits: bool  # log2 and exp2 by bit tricks: faster on a CPU, slower on an accelerator
    scaled: bool = False  # gradients come multiplied by grad_scale
    skippable: bool = False  # there is a found_inf
    amsgrad: bool = False
    momentum: bool = False
    first: bool = False
    nesterov: bool = False


def _log2_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """log2 x as an exponent (times 2^23) and a rest within -1/2 .. 1/2; see fastpow.h."""
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) & -0x800000
    z = (bits - exponent).view(torch.float32) - 1.0
    zz = z * z
    high = (0.479348 - 0.36749 * z) + zz * (0.32215494 - 0.20659186 * z)
    return exponent.to(torch.float32), ((1.4427135 - 0.72113186 * z) + zz * high) * z


def _power(log: tuple[Tensor, Tensor], q: Tensor, whole: Tensor) -> Tensor:
    """x^q * 2^whole; see fastpow.h."""
    rounder = 1.5 * 2**23 + 127
    exponent, part = log[0] * 2.0**-23, log[1]
    rounded = (q * exponent + (q * part + whole)) + rounder
    z = q * part + (q * exponent + ((whole + rounder) - rounded))
    zz = z * z
    high = (0.2402212 + 0.05550713 * z) + zz * (0.009675542 + 0.0013276472 * z)
    scale = rounded.view(torch.int32).clamp(0x4B400001, 0x4B4000FD) << 23
    return ((1.0000001 + 0.69314694 * z) + zz * high) * scale.view(torch.float32)


def _factor(w: Tensor, numbers: Sequence[Tensor], kind: Kind) -> Tensor:
    """1 / (1 + sum_k c_k |w|^(p_k - 2)); `numbers` are those of `compiled._plan`."""
    _, flat, at_zero, per_knee, *powers = numbers
    x = w.abs()
    if kind.form == "powers":
        total = torch.ones_like(x)
        log = _log2_parts(x) if kind.bits else (x.log2(), x)
        for k in range(kind.powers):
            q, whole, mantissa = powers[3 * k : 3 * k + 3]
            if kind.bits:
                total = total + mantissa * _power(log, q, whole)
            else:
                total = total + mantissa * (q * log[0] + whole).exp2()
        factor = flat / total
    elif kind.form == "flat":
        return flat.expand_as(w)
    else:
        y = x * per_knee
        t = {"p_0": y * y, "p_half": y * y.sqrt(), "p_1": y, "p_3_2": y.sqrt()}[kind.form]
        t = t.clamp(max=2.0**30 if w.dtype == torch.float32 else 2.0**60)
        factor = flat * t / (t + 1)
    return torch.where(x < torch.finfo(w.dtype).tiny, at_zero, factor)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _decayed(w_tilde: Tensor, w_old: Tensor, numbers: Sequence[Tensor], kind: Kind) -> Tensor:
    """The decay, and +0.0 for what falls below the smallest normal number (0 if nothing decays)."""
    w = w_tilde * _factor(w_old, numbers, kind)
    return torch.where(w.abs() < numbers[0], 0.0, w)


def _write(kind: Kind, skip: Tensor | None, *changes: tuple[Tensor, Tensor]) -> None:
    """Put the values into their tensors, unless the device says to skip this step."""
    for target, value in changes:
        if kind.skippable and skip is not None:
            value = torch.where(skip != 0, _wide(target), value)
        target.copy_(value)


def adam(streams: list[Tensor], numbers: Tensor, skip: Tensor | None, kind: Kind) -> None:
    """AdamW and the decay, of weights, gradients, both averages and, with amsgrad, the maxima."""
    scale, new1, beta1, new2, beta2, eps, keep, step_size, per_root, *decay = numbers.unbind()
    w, g, m, v = (_wide(stream) for stream in streams[:4])
    changes: list[tuple[Tensor, Tensor]] = []
    if kind.scaled:
        g = g / scale
        changes.append((streams[1], g))
    m = beta1 * m + new1 * g
    v = beta2 * v + new2 * g * g
    changes += [(streams[2], m), (streams[3], v)]
    if kind.amsgrad:
        v = torch.maximum(_wide(streams[4]), v)
        changes.append((streams[4], v))
    w_tilde = keep * w - step_size * m / (v.sqrt() * per_root + eps)
    changes.append((streams[0], _decayed(w_tilde, w, decay, kind)))
    _write(kind, skip, *changes)


def sgd(streams: list[Tensor], numbers: Tensor, skip: Tensor | None, kind: Kind) -> None:
    """SGD and the decay, of weights, gradients and, with momentum, buffers."""
    scale, lr, momentum, new, weight_decay, sign, *decay = numbers.unbind()
    w, g = _wide(streams[0]), _wide(streams[1])
    changes: list[tuple[Tensor, Tensor]] = []
    if kind.scaled:
        g = g / scale
        changes.append((streams[1], g))
    g = sign * g + weight_decay * w
    move = g
    if kind.momentum:
        move = g if kind.first else momentum * _wide(streams[2]) + new * g
        changes.append((streams[2], move))
        if kind.nesterov:
            move = g + momentum * move
    changes.append((streams[0], _decayed(w - lr * move, w, decay, kind)))
    _write(kind, skip, *changes)


def shrink(streams: list[Tensor], numbers: Tensor, skip: Tensor | None, kind: Kind) -> None:
    """The decay alone, of the weights and what they were before their update."""
    _, *decay = numbers.unbind()
    w, w_old = (_wide(stream) for stream in streams)
    _write(kind, skip, (streams[0], _decayed(w, w_old, decay, kind)))
