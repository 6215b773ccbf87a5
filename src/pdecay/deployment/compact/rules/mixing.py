"""Operations within which the positions of some axes see each other: softmax, pooling, norms.

An axis that is mixed keeps all its positions. A layer norm over the channels is why the channels of
a transformer's residual stream stay: even one that nobody reads is part of the mean.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from pdecay.deployment.compact.rules.base import Plain, fix_all, where
from pdecay.deployment.compact.trace import Call, Value
from pdecay.deployment.compact.units import Places, Units, fixed


class Mixing(Plain):
    """The first input's axes mix; other inputs (weights, indices) are read whole."""

    def axes(self, call: Call) -> set[int]:
        """The axes of the first input that mix."""
        raise NotImplementedError

    def tie(self, call: Call, units: Units) -> None:
        value, *others = call.ins
        mixed = self.axes(call)
        for axis in mixed:
            units.fix(value.places[axis].tolist(), f"{where(call)} mixes all of them")
        fix_all(others, units, f"{where(call)} reads all of it")
        kept = [i for i in range(value.tensor.ndim) if i not in mixed]
        for out in call.outs:
            if out.tensor.ndim == value.tensor.ndim:
                out.places = [
                    own if n == len(own) else fixed(n)
                    for n, own in zip(out.tensor.shape, value.places, strict=True)
                ]
            else:
                out.places = [value.places[i] for i in kept]

    def vary(self, call: Call) -> None:
        value, *others = call.ins
        mixed = sorted(self.axes(call))
        varies = value.varies.amax(mixed, keepdim=True) if mixed else value.varies
        read = any(bool(other.varies.any()) for other in others)
        for out in call.outs:
            own = varies | read
            if out.tensor.ndim != value.tensor.ndim:
                own = own.squeeze(mixed)
            out.varies = own.expand(out.tensor.shape)

    def back(self, call: Call) -> None:
        value, *others = call.ins
        mixed = sorted(self.axes(call))
        for out in call.outs:
            live = out.live
            if out.tensor.ndim != value.tensor.ndim:
                for axis in mixed:
                    live = live.unsqueeze(axis)
            elif mixed:
                live = live.amax(mixed, keepdim=True)
            value.live = value.live | live
            for other in others:
                other.live = other.live | live.any()


class Along(Mixing):
    """Along the axes of the operation's ``dim`` argument; all of them where it has none."""

    def axes(self, call: Call) -> set[int]:
        names = [argument.name for argument in call.op._schema.arguments]
        rank = call.ins[0].tensor.ndim
        dims = None
        if "dim" in names:
            at = names.index("dim")
            dims = call.args[at] if at < len(call.args) else call.kwargs.get("dim")
        if dims is None or dims == []:
            return set(range(rank))
        return {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}


class Spatial(Mixing):
    """Over pixels, as pooling and resizing do: the last axes, as many as the name says."""

    def axes(self, call: Call) -> set[int]:
        rank = call.ins[0].tensor.ndim
        (count,) = (int(digit) for digit in re.findall(r"(\d)d", call.name))
        return set(range(rank - count, rank))


class Last(Mixing):
    """The last two axes, as in ``tril``."""

    def axes(self, call: Call) -> set[int]:
        rank = call.ins[0].tensor.ndim
        return {rank - 2, rank - 1}


class Padding(Mixing):
    """The axes that are padded."""

    def axes(self, call: Call) -> set[int]:
        rank = call.ins[0].tensor.ndim
        pads = call.args[1]
        return {rank - 1 - i // 2 for i, pad in enumerate(pads) if pad}

    def vary(self, call: Call) -> None:
        (value,), (out,) = call.ins, call.outs
        out.varies = torch.ops.aten.constant_pad_nd(value.varies, call.args[1], False)


class LayerNorm(Mixing):
    """The axes of the normalised shape."""

    def axes(self, call: Call) -> set[int]:
        rank = call.ins[0].tensor.ndim
        return set(range(rank - len(call.args[1]), rank))


class BatchNorm(Mixing):
    """Each channel by itself; in eval mode each element, and a channel of weight 0 is constant."""

    def axes(self, call: Call) -> set[int]:
        rank = call.ins[0].tensor.ndim
        return {i for i in range(rank) if i != 1} if _training(call) else set()

    def tie(self, call: Call, units: Units) -> None:
        value, *others = call.ins
        for other in others:
            units.tie(value.places[1], other.places[0], f"{where(call)} meets a fixed size")
        for axis in self.axes(call):
            units.fix(value.places[axis].tolist(), f"{where(call)} mixes all of them")
        out, *statistics = call.outs
        out.places = value.places
        for other in statistics:
            other.places = [fixed(n) for n in other.tensor.shape]

    def vary(self, call: Call) -> None:
        value, weight = call.ins[0], call.args[1]
        out, *statistics = call.outs
        mixed = sorted(self.axes(call))
        varies = value.varies.amax(mixed, keepdim=True) if mixed else value.varies
        if isinstance(weight, Value):
            varies = varies & _by_channel(weight.counts, value)
        out.varies = varies.expand(out.tensor.shape)
        for other in statistics:
            other.varies = torch.ones_like(other.tensor, dtype=torch.bool)

    def back(self, call: Call) -> None:
        value, out, weight = call.ins[0], call.outs[0], call.args[1]
        mixed = sorted(self.axes(call))
        live = out.live.amax(mixed, keepdim=True) if mixed else out.live
        if isinstance(weight, Value):
            live = live & _by_channel(weight.counts, value)
        value.live = value.live | live

    def sizes(self, call: Call, units: Units) -> dict[str, Places]:
        return {"num_features": call.ins[0].places[1]}


class GroupNorm(Plain):
    """The channels of a group mix with each other and over the pixels; whole groups may go."""

    def tie(self, call: Call, units: Units) -> None:
        value, *affine = call.ins
        _, within = self._groups(call, units)
        why = f"{where(call)} mixes all of them"
        units.fix(within.tolist(), why)
        for places in value.places[2:]:
            units.fix(places.tolist(), why)
        for other in affine:
            units.tie(value.places[1], other.places[0], f"{where(call)} meets a fixed size")
        for out in call.outs:
            whole = out is call.outs[0]  # the others are the statistics
            out.places = value.places if whole else [fixed(n) for n in out.tensor.shape]

    def vary(self, call: Call) -> None:
        value = call.ins[0]
        out, *statistics = call.outs
        out.varies = self._any(call, value.varies).expand(value.tensor.shape)
        for other in statistics:
            other.varies = torch.ones_like(other.tensor, dtype=torch.bool)

    def back(self, call: Call) -> None:
        value, out = call.ins[0], call.outs[0]
        value.live = value.live | self._any(call, out.live)

    def sizes(self, call: Call, units: Units) -> dict[str, Places]:
        return {"num_groups": self._groups(call, units)[0], "num_channels": call.ins[0].places[1]}

    def _groups(self, call: Call, units: Units) -> tuple[Places, Places]:
        places, groups = call.ins[0].places[1], call.args[6]
        sizes = (groups, len(places) // groups)
        outer, inner = units.split(places, sizes, f"{where(call)} groups the channels anew")
        return outer, inner

    def _any(self, call: Call, mask: Tensor) -> Tensor:
        shape, groups = mask.shape, call.args[6]
        grouped = mask.reshape(shape[0], groups, -1).amax(-1)
        channels = grouped.repeat_interleave(shape[1] // groups, dim=1)
        return channels.view(*shape[:2], *[1] * (len(shape) - 2))


class WeightNorm(Mixing):
    """Directions, each of the length that stands beside it.

    What is zero adds nothing to the norm of a direction, so that of the axes that mix it may go.
    """

    def axes(self, call: Call) -> set[int]:
        value, length = call.ins
        return {
            i for i, n in enumerate(length.tensor.shape) if n != value.tensor.shape[i] or n == 1
        }

    def tie(self, call: Call, units: Units) -> None:
        value, length = call.ins
        for axis, places in enumerate(value.places):
            if axis in self.axes(call):
                others = [i for i in range(value.tensor.ndim) if i != axis]
                filled = value.tensor.ne(0).amax(others).numpy(force=True)
                units.fix(places[filled].tolist(), f"{where(call)} mixes all of them")
            else:
                units.tie(places, length.places[axis], f"{where(call)} meets a fixed size")
        for out, source in zip(call.outs, (value, length), strict=True):
            out.places = source.places
            out.weight = source.weight


def _by_channel(mask: Tensor, value: Value) -> Tensor:
    return mask.view([-1 if axis == 1 else 1 for axis in range(value.tensor.ndim)])


def _training(call: Call) -> bool:
    arguments = [argument.name for argument in call.op._schema.arguments]
    for name in ("training", "train"):
        if name in arguments:
            return bool(call.args[arguments.index(name)])
    return False
