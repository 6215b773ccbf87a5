"""Rules for matrix products and convolutions: the consumers and producers of units."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdecay.deployment.compact.rules.base import (
    Consumer,
    Rule,
    reduce_mask,
    size_mismatch,
    split_groups,
)
from pdecay.deployment.compact.trace import Call, Value
from pdecay.deployment.compact.units import Labels, Units, fixed


class MatrixProduct(Rule):
    """``out = a @ b``, batched or not, with or without an added tensor: mm, bmm, addmm."""

    def label(self, call: Call, units: Units) -> None:
        added, a, b = _operands(call)
        reason = size_mismatch(call)
        units.tie(a.labels[-1], b.labels[-2], reason)
        if a.varies.any() and b.varies.any() and not (a.static or b.static):
            # The scores of attention: code divides them by the root of this size.
            units.keep(a.labels[-1].tolist(), f"{call} multiplies two activations over them")
        (out,) = call.outs
        batch: list[Labels] = []
        if a.tensor.ndim == 3:
            units.tie(a.labels[0], b.labels[0], reason)
            batch = [a.labels[0]]
        out.labels = [*batch, a.labels[-2], b.labels[-1]]
        if added is not None:
            offset = len(out.labels) - len(added.labels)
            for axis, labels in enumerate(added.labels):
                if len(labels) > 1:
                    units.tie(out.labels[axis + offset], labels, reason)

    def mark_varying(self, call: Call) -> None:
        added, a, b = _operands(call)
        (out,) = call.outs
        out.varies = _mask_product(a.varies, b.nonzero) | _mask_product(a.nonzero, b.varies)
        if not (a.static or b.static):  # the number of terms may depend on the input
            out.varies = out.varies | _mask_product(a.nonzero, b.nonzero)
        if added is not None:
            out.varies = out.varies | added.varies

    def mark_live(self, call: Call) -> None:
        added, a, b = _operands(call)
        (out,) = call.outs
        a.mark_live(_mask_product(out.live, b.nonzero.mT))
        # Where both factors are zero, one of them must be live, or both zeros could be changed.
        zero = ~b.nonzero & out.live.amax(-2, keepdim=True)
        b.mark_live(_mask_product(a.nonzero.mT, out.live) | zero)
        if added is not None:
            added.mark_live(reduce_mask(out.live, added.tensor.shape))

    def consumer(self, call: Call) -> Consumer | None:
        _, a, b = _operands(call)
        (out,) = call.outs
        rows = list(range(a.tensor.ndim - 1))
        read = _mask_product(out.live, b.nonzero.mT)
        reads_varying = _mask_product(out.live, b.varies.mT)
        return Consumer(
            labels=a.labels[-1],
            nonzero=a.nonzero.amax(rows),
            used=(a.nonzero & read).amax(rows),
            varies=((a.varies & read) | (a.nonzero & reads_varying)).amax(rows),
            constants=_constants(a.tensor.flatten(0, -2).mT),
            weight=_own_weight(call, b),
            coefficients=b.tensor if b.tensor.ndim == 2 else b.tensor[0],
            no_fold=None,
        )

    def producer(self, call: Call) -> tuple[str, int] | None:
        weight = _operands(call)[2].weight
        return None if weight is None else (weight, call.outs[0].tensor.ndim - 1)


class GroupedProduct(MatrixProduct):
    """Each row of ``a`` times the matrix of its expert: ``_grouped_mm``.

    A unit is removed from all experts, if it is dead in all of them.
    """

    def label(self, call: Call, units: Units) -> None:
        units.keep(call.args[1].labels[0].tolist(), f"{call} looks them up by index")
        super().label(call, units)

    def multiples(self, call: Call) -> list[tuple[Labels, int]]:
        # The kernel needs rows that begin at multiples of 16 bytes, in either memory order.
        a, b = call.args[:2]
        row = b.labels[-1] if b.tensor.stride(-1) == 1 else b.labels[-2]
        return [(labels, 16 // a.tensor.element_size()) for labels in (a.labels[-1], row)]


class Convolution(Rule):
    """A convolution, analysed by channels: a channel is read if any tap of a filter reads it.

    An analysis by taps would depend on the size of the image: near the border some taps read only
    padding.
    """

    def label(self, call: Call, units: Units) -> None:
        x, weight, bias, *_ = call.args
        (out,) = call.outs
        reason = size_mismatch(call)
        for value in (x, weight):
            for labels in value.labels[2:]:
                units.keep(labels.tolist(), f"{call} mixes all of them")
        groups, within = self._input_groups(call, units)
        if _transposed(call):
            units.tie(x.labels[1], weight.labels[0], reason)
            size = weight.tensor.shape[1]
            channels = units.join([groups.repeat(size), np.tile(weight.labels[1], len(groups))])
        else:
            channels = weight.labels[0]
            outer, _ = split_groups(channels, len(groups), units, call)
            units.tie(groups, outer, reason)
            units.tie(within, weight.labels[1], reason)
        out.labels = [x.labels[0], channels, *(fixed(n) for n in out.tensor.shape[2:])]
        if bias is not None:
            units.tie(channels, bias.labels[0], reason)

    def mark_varying(self, call: Call) -> None:
        (out,) = call.outs
        _, weight, bias, *_ = call.args
        varies = _mask_product(_uneven(call), _matrix(call, weight.nonzero).mT)
        if weight.varies.any() or (bias is not None and bias.varies.any()):
            varies = torch.ones_like(varies)
        out.varies = _over_pixels(varies, out).expand(out.tensor.shape)

    def mark_live(self, call: Call) -> None:
        (out,) = call.outs
        x, weight, bias, *_ = call.args
        live = _mask_product(_by_channel(out.live), _matrix(call, weight.nonzero))
        x.mark_live(_over_pixels(live, x))
        for value in (weight, bias):
            if value is not None:
                value.mark_live(out.live.any())

    def consumer(self, call: Call) -> Consumer | None:
        (out,) = call.outs
        x, weight, _, _, padding, *_ = call.args
        groups = call.args[8]
        if weight.tensor.shape[1] == 1 and not _transposed(call):
            return None  # depthwise: no sum over channels
        read = _mask_product(_by_channel(out.live), _matrix(call, weight.nonzero))
        nonzero = _by_channel(x.nonzero).amax(0)
        used = (_by_channel(x.nonzero) & read).amax(0)
        varies = used if weight.varies.any() else (_by_channel(x.varies) & read).amax(0)
        no_fold = None
        if groups > 1:
            no_fold = "its consumer is a grouped convolution"
        elif any(padding):
            no_fold = "it is not zero, and its consumer pads the image with zeros"
        elif _transposed(call):
            no_fold = "a transposed convolution spreads it unevenly"
        labels = x.labels[1]
        if groups > 1 and not _transposed(call):
            # All groups share the weight's channel axis: a channel is removed from all or none.
            labels = weight.labels[1]
            nonzero, used, varies = (
                mask.view(groups, -1).amax(0) for mask in (nonzero, used, varies)
            )
        return Consumer(
            labels=labels,
            nonzero=nonzero,
            used=used,
            varies=varies,
            constants=_constants(x.tensor.transpose(0, 1).flatten(1)),
            weight=_own_weight(call, weight),
            coefficients=_matrix(call, weight.tensor, total=True).mT,
            no_fold=no_fold,
        )

    def producer(self, call: Call) -> tuple[str, int] | None:
        weight: str | None = call.args[1].weight
        return None if weight is None else (weight, 1)

    def counted(self, call: Call, units: Units) -> dict[str, Labels]:
        groups, _ = self._input_groups(call, units)
        return {"groups": groups} if len(groups) > 1 else {}

    def _input_groups(self, call: Call, units: Units) -> tuple[Labels, Labels]:
        return split_groups(call.args[0].labels[1], call.args[8], units, call)


def _operands(call: Call) -> tuple[Value | None, Value, Value]:
    """Return the added tensor, if there is one, and both factors."""
    if call.name in ("addmm", "baddbmm"):
        return call.args[0], call.args[1], call.args[2]
    a, b = call.args[:2]
    if call.name == "_grouped_mm":
        # One matrix that is zero where the matrices of all experts are.
        merged = Value(b.tensor.abs().amax(0), weight=b.weight, static=b.static)
        merged.labels, merged.varies, merged.live = b.labels[1:], b.varies.amax(0), b.live.amax(0)
        return None, a, merged
    return None, a, b


def _own_weight(call: Call, value: Value) -> str | None:
    """Return the name of a weight that belongs to the running layer; None for other weights."""
    if value.weight is None or not call.modules:
        return None
    return value.weight if value.weight.rpartition(".")[0] == call.modules[-1] else None


def _mask_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product of two masks: True where any term of the sum is True.

    The rows of a mask are mostly equal, since units vary or are read at all positions alike. Then
    a product with one row is enough.
    """
    if _rows_equal(b):
        return a.any(-1, keepdim=True) & b[..., :1, :]
    if _rows_equal(a):
        once = (a[..., :1, :].float() @ b.float()) > 0
        return once.expand(*once.shape[:-2], a.shape[-2], once.shape[-1])
    return (a.float() @ b.float()) > 0


def _rows_equal(mask: Tensor) -> bool:
    return bool((mask == mask[..., :1, :]).all())


def _transposed(call: Call) -> bool:
    return bool(call.args[6])


def _by_channel(mask: Tensor) -> Tensor:
    return mask.flatten(2).amax(2) if mask.ndim > 2 else mask


def _over_pixels(mask: Tensor, value: Value) -> Tensor:
    return mask.view(*mask.shape, *[1] * (value.tensor.ndim - 2))


def _uneven(call: Call) -> Tensor:
    """Return the input channels that make the sums vary, or differ between pixels."""
    x, _, _, _, padding, *_ = call.args
    flat = x.tensor.flatten(2)
    even = _even(flat) & (not any(padding) and not _transposed(call))
    zero = (flat == 0).all(2)
    uneven: Tensor = _by_channel(x.varies) | ~(even | zero)
    return uneven


def _even(values: Tensor) -> Tensor:
    """Return the rows whose elements are all equal up to rounding errors."""
    exact = not (values.is_floating_point() or values.is_complex())
    rounding = 0.0 if exact else 8 * torch.finfo(values.dtype).eps
    return values.isclose(values[..., :1], rtol=rounding, atol=0.0).all(-1)


def _constants(values: Tensor) -> Tensor:
    """Return the value of each row whose elements are all equal; NaN for the other rows."""
    return torch.where(_even(values), values[..., 0], torch.nan)


def _matrix(call: Call, weight: Tensor, *, total: bool = False) -> Tensor:
    """Return a weight, or a mask of it, as a matrix of outputs by inputs over all groups.

    Taps are added if `total`, else their maximum is taken.
    """
    groups = call.args[8]
    taps = weight.flatten(2).sum(2) if total else weight.flatten(2).amax(2)
    if _transposed(call):
        taps = taps.unflatten(0, (groups, -1)).mT.flatten(0, 1)
    outs, ins = taps.shape
    matrix = taps.new_zeros(groups, outs // groups, groups, ins)
    each = torch.arange(groups)
    matrix[each, :, each] = taps.view(groups, outs // groups, ins)
    return matrix.view(outs, groups * ins)
