"""Rules for operations that mix the positions of some axes: softmax, pooling, normalization.

A mixed axis keeps all its positions. For this reason the channels of a transformer's residual
stream are kept: a layer norm's mean contains every channel, also those that nothing else reads.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from pdecay.deployment.compact.rules.base import (
    Rule,
    fill_all,
    fixed_axes,
    keep_all,
    size_mismatch,
    split_groups,
    uneven_along,
)
from pdecay.deployment.compact.trace import Call, Value
from pdecay.deployment.compact.units import Labels, Units, fixed

# Results for equal elements that depend on how many there are: sums, where zeros stay zero, and
# shares, such as 1/n for softmax. All other results, such as means, do not.
_GROWING = {"sum", "prod", "cumsum", "cumprod", "linalg_vector_norm"}
_SHARING = {"_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax"}
_SHARING |= {"logcumsumexp", "logsumexp"}


class Mixing(Rule):
    """An operation that mixes axes of its first input and reads all of its other inputs."""

    resizes = False  # whether it makes axes of a size that may be the size of an input

    @abstractmethod
    def axes(self, call: Call) -> set[int]:
        """Return the mixed axes of the first input."""

    def label(self, call: Call, units: Units) -> None:
        value, *others = call.ins
        mixed = self.axes(call)
        for axis in mixed:
            units.keep(value.labels[axis].tolist(), _mixes(call))
        keep_all(others, units, f"{call} reads all of it")
        for out in call.outs:
            if out.tensor.ndim == value.tensor.ndim:
                out.labels = [
                    own if n == len(own) else fixed(n)
                    for n, own in zip(out.tensor.shape, value.labels, strict=True)
                ]
            else:
                out.labels = [own for i, own in enumerate(value.labels) if i not in mixed]

    def mark_varying(self, call: Call) -> None:
        value, *others = call.ins
        mixed = sorted(self.axes(call))
        varies = _any_over(value.varies, mixed) | _follows_size(call, mixed, self.resizes)
        reads_varying = any(bool(other.varies.any()) for other in others)
        for out in call.outs:
            own = varies | reads_varying
            if out.tensor.ndim != value.tensor.ndim:
                own = own.squeeze(mixed)
            out.varies = own.expand(out.tensor.shape)

    def mark_live(self, call: Call) -> None:
        value, *others = call.ins
        mixed = sorted(self.axes(call))
        for out in call.outs:
            live = out.live
            if out.tensor.ndim == value.tensor.ndim:
                live = _any_over(live, mixed)
            else:
                for axis in mixed:
                    live = live.unsqueeze(axis)
            value.mark_live(live)
            for other in others:
                other.mark_live(live.any())


class Along(Mixing):
    """Mixes the axes of the ``dim`` argument, or all axes without one."""

    def axes(self, call: Call) -> set[int]:
        dims = _argument(call, "dim")
        rank = call.ins[0].tensor.ndim
        if dims is None or dims == [] or not rank:
            return set(range(rank))
        return {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}


class Spatial(Mixing):
    """Mixes pixels: the last axes, as many as the operation's name says (``avg_pool2d``)."""

    resizes = True

    def axes(self, call: Call) -> set[int]:
        (count,) = (int(digit) for digit in re.findall(r"(\d)d", call.name))
        return _last(call, count)


class LastTwo(Mixing):
    """Mixes the last two axes: ``tril``, ``triu``."""

    def axes(self, call: Call) -> set[int]:
        return _last(call, 2)


class LayerNorm(Mixing):
    """Mixes the axes of the normalized shape."""

    def axes(self, call: Call) -> set[int]:
        return _last(call, len(call.args[1]))


class Padding(Mixing):
    """Mixes the axes that are padded."""

    def axes(self, call: Call) -> set[int]:
        rank = call.ins[0].tensor.ndim
        return {rank - 1 - i // 2 for i, pad in enumerate(call.args[1]) if pad}

    def mark_varying(self, call: Call) -> None:
        (value,), (out,) = call.ins, call.outs
        varies = value.varies
        if not any(call.args[1]) and not value.static:
            # Code that pads to a multiple of a size pads nothing here, but does for other inputs.
            varies = varies | (value.tensor != (_argument(call, "value") or 0))
        out.varies = torch.ops.aten.constant_pad_nd(varies, call.args[1], False)
        if not value.static:
            out.varies = uneven_along(out, self.axes(call))


class BatchNorm(Mixing):
    """Normalizes each channel. Mixes nothing in eval mode; a channel of weight 0 is constant."""

    def axes(self, call: Call) -> set[int]:
        rank = call.ins[0].tensor.ndim
        training = _argument(call, "training") or _argument(call, "train")
        return {i for i in range(rank) if i != 1} if training else set()

    def label(self, call: Call, units: Units) -> None:
        value, *others = call.ins
        for other in others:
            units.tie(value.labels[1], other.labels[0], size_mismatch(call))
        for axis in self.axes(call):
            units.keep(value.labels[axis].tolist(), _mixes(call))
        _label_normalized(call)

    def mark_varying(self, call: Call) -> None:
        fill_all(call.outs, True)
        out, value = call.outs[0], call.ins[0]
        mixed = sorted(self.axes(call))
        varies = self._scaled(call, _any_over(value.varies, mixed) | _follows_size(call, mixed))
        out.varies = (varies | _varying_channels(call)).expand(out.tensor.shape)

    def mark_live(self, call: Call) -> None:
        live = _any_over(call.outs[0].live, sorted(self.axes(call)))
        call.ins[0].mark_live(self._scaled(call, live))
        _mark_live_channels(call)

    def counted(self, call: Call, units: Units) -> dict[str, Labels]:
        return {"num_features": call.ins[0].labels[1]}

    def _scaled(self, call: Call, mask: Tensor) -> Tensor:
        """Clear the mask in channels that are multiplied by zero."""
        weight = call.args[1]
        if not isinstance(weight, Value):
            return mask
        return mask & weight.nonzero.view([-1 if axis == 1 else 1 for axis in range(mask.ndim)])


class GroupNorm(Rule):
    """Mixes pixels and the channels of a group. Whole groups can be removed."""

    def label(self, call: Call, units: Units) -> None:
        value, *affine = call.ins
        _, within = self._groups(call, units)
        for labels in (within, *value.labels[2:]):
            units.keep(labels.tolist(), _mixes(call))
        for other in affine:
            units.tie(value.labels[1], other.labels[0], size_mismatch(call))
        _label_normalized(call)

    def mark_varying(self, call: Call) -> None:
        value = call.ins[0]
        fill_all(call.outs, True)
        varies = value.varies | _follows_size(call, [*range(2, value.tensor.ndim)])
        varies = self._any_in_group(call, varies) | _varying_channels(call)
        call.outs[0].varies = varies.expand(value.tensor.shape)

    def mark_live(self, call: Call) -> None:
        call.ins[0].mark_live(self._any_in_group(call, call.outs[0].live))
        _mark_live_channels(call)

    def counted(self, call: Call, units: Units) -> dict[str, Labels]:
        return {"num_groups": self._groups(call, units)[0], "num_channels": call.ins[0].labels[1]}

    def _groups(self, call: Call, units: Units) -> tuple[Labels, Labels]:
        return split_groups(call.ins[0].labels[1], call.args[6], units, call)

    def _any_in_group(self, call: Call, mask: Tensor) -> Tensor:
        shape, groups = mask.shape, call.args[6]
        grouped = mask.reshape(shape[0], groups, -1).amax(-1)
        channels = grouped.repeat_interleave(shape[1] // groups, dim=1)
        return channels.view(*shape[:2], *[1] * (len(shape) - 2))


class WeightNorm(Mixing):
    """Scales each direction vector to a given length.

    Positions of a mixed axis that are zero in every direction add nothing to the norm, so that
    they can be removed.
    """

    def axes(self, call: Call) -> set[int]:
        value, length = call.ins
        return {
            i for i, n in enumerate(length.tensor.shape) if n != value.tensor.shape[i] or n == 1
        }

    def label(self, call: Call, units: Units) -> None:
        value, length = call.ins
        for axis, labels in enumerate(value.labels):
            if axis in self.axes(call):
                others = [i for i in range(value.tensor.ndim) if i != axis]
                nonzero = value.tensor.ne(0).amax(others).numpy(force=True)
                units.keep(labels[nonzero].tolist(), _mixes(call))
            else:
                units.tie(labels, length.labels[axis], size_mismatch(call))
        for out, source in zip(call.outs, (value, length), strict=True):
            out.labels = source.labels
            out.weight = source.weight


def _mixes(call: Call) -> str:
    return f"{call} mixes all of them"


def _label_normalized(call: Call) -> None:
    """Give a norm's output the labels of its input, and its statistics fixed ones."""
    out, *statistics = call.outs
    out.labels = call.ins[0].labels
    for other in statistics:
        other.labels = fixed_axes(other)


def _varying_channels(call: Call) -> Tensor | bool:
    """Return the channels with a varying weight, bias or statistic, as a network may compute."""
    value, *others = call.ins
    shape = [-1 if axis == 1 else 1 for axis in range(value.tensor.ndim)]
    varies: Tensor | bool = False
    for other in others:
        varies = varies | other.varies.view(shape)
    return varies


def _mark_live_channels(call: Call) -> None:
    """Mark the weights, biases and statistics of live channels."""
    live = call.outs[0].live.transpose(0, 1).flatten(1).amax(1)
    for other in call.ins[1:]:
        other.mark_live(live)


def _any_over(mask: Tensor, axes: list[int]) -> Tensor:
    return mask.amax(axes, keepdim=True) if axes else mask


def _follows_size(call: Call, axes: list[int], resizes: bool = False) -> Tensor | bool:
    """Return the constant elements that may change with the size of the mixed axes.

    That size may be the number of pixels or words of an input. A sum of equal constants grows with
    it. So does the share of the first ones in a mean of unequal constants.
    """
    value = call.ins[0]
    if (value.static and not resizes) or not axes or not value.tensor.numel():
        return False
    if call.name in _GROWING or _averages_padding(call):
        return _any_over(value.nonzero, axes)
    if call.name in _SHARING:
        return True
    first = value.tensor
    for axis in axes:
        first = first.narrow(axis, 0, 1)
    rounding = 8 * torch.finfo(first.dtype).eps if first.is_floating_point() else 0.0
    return ~value.tensor.isclose(first, rtol=rounding, atol=0.0).all(axes, keepdim=True)


def _averages_padding(call: Call) -> bool:
    """Return whether averages at the border contain zeros that the operation adds there.

    The share of these zeros in an average depends on the size of the image.
    """
    if not call.name.startswith("avg_pool") or _argument(call, "count_include_pad") is False:
        return False
    return any(_argument(call, "padding") or ())


def _last(call: Call, count: int) -> set[int]:
    rank = call.ins[0].tensor.ndim
    return set(range(rank - count, rank))


def _argument(call: Call, name: str) -> Any:
    """Return an argument of the operation by name; None if it is absent."""
    names = [argument.name for argument in call.op._schema.arguments]
    if name not in names:
        return None
    index = names.index(name)
    return call.args[index] if index < len(call.args) else call.kwargs.get(name)
