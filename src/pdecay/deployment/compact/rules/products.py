"""Matrix products: the sums over an axis of which terms are taken away when units go."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdecay.deployment.compact.rules.base import Plain, Reads, where
from pdecay.deployment.compact.trace import Call, Value
from pdecay.deployment.compact.units import Places, Units, fixed


class MatrixProduct(Plain):
    """``out = a @ b``, alone or in batches, with or without something added: mm, bmm, addmm."""

    def tie(self, call: Call, units: Units) -> None:
        added, a, b = _operands(call)
        why = f"{where(call)} meets a fixed size"
        units.tie(a.places[-1], b.places[-2], why)
        if a.varies.any() and b.varies.any():
            # Scores of attention: code divides by the root of how many there are.
            units.fix(a.places[-1].tolist(), f"{where(call)} multiplies two activations over them")
        (out,) = call.outs
        batch: list[Places] = []
        if a.tensor.ndim == 3:
            units.tie(a.places[0], b.places[0], why)
            batch = [a.places[0]]
        out.places = [*batch, a.places[-2], b.places[-1]]
        if added is not None:
            offset = len(out.places) - len(added.places)
            for axis, places in enumerate(added.places):
                if len(places) > 1:
                    units.tie(out.places[axis + offset], places, why)

    def vary(self, call: Call) -> None:
        added, a, b = _operands(call)
        (out,) = call.outs
        out.varies = _any(a.varies, b.counts) | _any(a.counts, b.varies)
        if added is not None:
            out.varies = out.varies | added.varies

    def back(self, call: Call) -> None:
        added, a, b = _operands(call)
        (out,) = call.outs
        a.live = a.live | _any(out.live, b.counts.mT)
        # Where both factors are zero one of them has to be kept so, or the term may change.
        zero = ~b.counts & out.live.amax(-2, keepdim=True)
        b.live = b.live | _any(a.counts.mT, out.live) | zero
        if added is not None:
            axes = list(range(out.tensor.ndim - added.tensor.ndim))
            live = out.live.amax(axes) if axes else out.live
            for axis, n in enumerate(added.tensor.shape):
                live = live.amax(axis, keepdim=True) if n == 1 else live
            added.live = added.live | live

    def reads(self, call: Call) -> Reads | None:
        _, a, b = _operands(call)
        (out,) = call.outs
        rows = [i for i in range(a.tensor.ndim) if i != a.tensor.ndim - 1]
        read = _any(out.live, b.counts.mT)
        counts = (a.counts & read).amax(rows)
        varies = (a.varies & read).amax(rows) | (a.counts & _any(out.live, b.varies.mT)).amax(rows)
        constants = _constants(a.tensor.flatten(0, -2).mT)
        return Reads(
            places=a.places[-1],
            emits=a.counts.amax(rows),
            counts=counts,
            varies=varies,
            constants=constants,
            weight=_own_weight(call, b),
            shift=b.tensor if b.tensor.ndim == 2 else b.tensor[0],
            why_not=None,
        )

    def makes(self, call: Call) -> tuple[str, int] | None:
        weight = _operands(call)[2].weight
        return None if weight is None else (weight, call.outs[0].tensor.ndim - 1)


class GroupedProduct(MatrixProduct):
    """Rows of ``a`` times the matrix of the expert that each was sent to: ``_grouped_mm``.

    A unit counts if it does for any expert; one goes from all of them.
    """

    def tie(self, call: Call, units: Units) -> None:
        units.fix(call.args[1].places[0].tolist(), f"{where(call)} looks them up by number")
        super().tie(call, units)

    def steps(self, call: Call) -> list[tuple[Places, int]]:
        """Its kernel wants rows that begin at multiples of 16 bytes, however they are stored."""
        a, b = call.args[:2]
        row = b.places[-1] if b.tensor.stride(-1) == 1 else b.places[-2]
        return [(places, 16 // a.tensor.element_size()) for places in (a.places[-1], row)]


class Convolution(Plain):
    """A convolution, seen by channels: whether any tap of a filter reads a channel at all.

    By taps it would depend on the image's size which of them ever meet anything but padding.
    """

    def tie(self, call: Call, units: Units) -> None:
        x, weight, bias, *_ = call.args
        (out,) = call.outs
        why = f"{where(call)} meets a fixed size"
        for value in (x, weight):
            for places in value.places[2:]:
                units.fix(places.tolist(), f"{where(call)} mixes all of them")
        groups, within = self._inputs(call, units)
        if _transposed(call):
            units.tie(x.places[1], weight.places[0], why)
            size = weight.tensor.shape[1]
            spread = groups.repeat(size)
            channels = units.join([spread, np.tile(weight.places[1], len(groups))])
        else:
            channels = weight.places[0]
            outer, _ = _split(channels, len(groups), units, call)
            units.tie(groups, outer, why)
            units.tie(within, weight.places[1], why)
        out.places = [x.places[0], channels, *(fixed(n) for n in out.tensor.shape[2:])]
        if bias is not None:
            units.tie(channels, bias.places[0], why)

    def vary(self, call: Call) -> None:
        (out,) = call.outs
        _, weight, bias, *_ = call.args
        filters = _filters(call, weight.counts)
        varies = _any(_uneven(call), filters.mT)
        if weight.varies.any() or (bias is not None and bias.varies.any()):
            varies = torch.ones_like(varies)
        shape = (*varies.shape, *[1] * (out.tensor.ndim - 2))
        out.varies = varies.view(shape).expand(out.tensor.shape)

    def back(self, call: Call) -> None:
        (out,) = call.outs
        x, weight, bias, *_ = call.args
        live = _any(_by_channel(out.live), _filters(call, weight.counts))
        x.live = x.live | live.view(*live.shape, *[1] * (x.tensor.ndim - 2))
        for value in (weight, bias):
            if value is not None:
                value.live = value.live | out.live.any()

    def reads(self, call: Call) -> Reads | None:
        (out,) = call.outs
        x, weight, _, _, padding, *_ = call.args
        groups = call.args[8]
        if weight.tensor.shape[1] == 1 and not _transposed(call):
            return None  # depthwise: no sum over channels
        read = _any(_by_channel(out.live), _filters(call, weight.counts))
        emits = _by_channel(x.counts).amax(0)
        counts = (_by_channel(x.counts) & read).amax(0)
        varies = (_by_channel(x.varies) & read).amax(0)
        if weight.varies.any():
            varies = counts
        constants = _constants(x.tensor.transpose(0, 1).flatten(1))
        why_not = None
        if any(padding):
            why_not = "it is not zero, and the zeros around the image would not be it"
        elif _transposed(call):
            why_not = "a transposed convolution spreads it unevenly"
        if groups > 1:
            why_not = "it is one of several groups"
        places = x.places[1]
        if groups > 1 and not _transposed(call):
            # They share the axis of the weight: a channel goes from all groups or from none.
            places = weight.places[1]
            emits, counts, varies = (
                mask.view(groups, -1).amax(0) for mask in (emits, counts, varies)
            )
        return Reads(
            places=places,
            emits=emits,
            counts=counts,
            varies=varies,
            constants=constants,
            weight=_own_weight(call, weight),
            shift=_filters(call, weight.tensor, total=True).mT,
            why_not=why_not,
        )

    def makes(self, call: Call) -> tuple[str, int] | None:
        weight: str | None = call.args[1].weight
        return None if weight is None else (weight, 1)

    def sizes(self, call: Call, units: Units) -> dict[str, Places]:
        groups, _ = self._inputs(call, units)
        return {"groups": groups} if len(groups) > 1 else {}

    def _inputs(self, call: Call, units: Units) -> tuple[Places, Places]:
        return _split(call.args[0].places[1], call.args[8], units, call)


def _operands(call: Call) -> tuple[Value | None, Value, Value]:
    if call.name in ("addmm", "baddbmm"):
        return call.args[0], call.args[1], call.args[2]
    a, b = call.args[:2]
    if call.name == "_grouped_mm":
        whole = Value(b.tensor.abs().amax(0), None, b.weight, b.places[1:], b.varies.amax(0))
        whole.live = b.live.amax(0)
        return None, a, whole
    return None, a, b


def _own_weight(call: Call, value: Value) -> str | None:
    """The name of a parameter that the layer at work multiplies by; None if it is not its own."""
    if value.weight is None or not call.modules:
        return None
    return value.weight if value.weight.rpartition(".")[0] == call.modules[-1] else None


def _any(a: Tensor, b: Tensor) -> Tensor:
    """Of two masks, where any product of the sum is set.

    Whether a unit varies or is read is mostly the same at every place, so that the rows of a mask
    are alike and one of them says it all.
    """
    if _alike(b):
        return a.any(-1, keepdim=True) & b[..., :1, :]
    if _alike(a):
        once = (a[..., :1, :].float() @ b.float()) > 0
        return once.expand(*once.shape[:-2], a.shape[-2], once.shape[-1])
    return (a.float() @ b.float()) > 0


def _alike(mask: Tensor) -> bool:
    return bool((mask == mask[..., :1, :]).all())


def _split(places: Places, groups: int, units: Units, call: Call) -> tuple[Places, Places]:
    why = f"{where(call)} groups the channels anew"
    outer, inner = units.split(places, (groups, len(places) // groups), why)
    return outer, inner


def _transposed(call: Call) -> bool:
    return bool(call.args[6])


def _by_channel(mask: Tensor) -> Tensor:
    return mask.flatten(2).amax(2) if mask.ndim > 2 else mask


def _uneven(call: Call) -> Tensor:
    """Which channels of the input make the sums differ from each other, or vary."""
    x, _, _, _, padding, *_ = call.args
    varies = _by_channel(x.varies)
    flat = x.tensor.flatten(2)
    even = _even(flat) & (not any(padding) and not _transposed(call))
    zero = (flat == 0).all(2)
    uneven: Tensor = varies | ~(even | zero)
    return uneven


def _even(values: Tensor) -> Tensor:
    """Of which rows all elements are the same, up to the rounding errors of how they were made."""
    whole = not (values.is_floating_point() or values.is_complex())
    rounding = 0.0 if whole else 8 * torch.finfo(values.dtype).eps
    return values.isclose(values[..., :1], rtol=rounding, atol=0.0).all(-1)


def _constants(values: Tensor) -> Tensor:
    """The number that each row holds everywhere; NaN where it does not."""
    return torch.where(_even(values), values[..., 0], torch.nan)


def _filters(call: Call, weight: Tensor, *, total: bool = False) -> Tensor:
    """A weight, or the mask of one, as a matrix of outputs by inputs over all groups."""
    groups = call.args[8]
    taps = weight.flatten(2).sum(2) if total else weight.flatten(2).amax(2)
    if _transposed(call):
        taps = taps.unflatten(0, (groups, -1)).mT.flatten(0, 1)
    outs, ins = taps.shape
    matrix = taps.new_zeros(groups, outs // groups, groups, ins)
    each = torch.arange(groups)
    matrix[each, :, each] = taps.view(groups, outs // groups, ins)
    return matrix.view(outs, groups * ins)
