"""Operations on each element by itself: activations, sums and products of tensors, copies."""

from __future__ import annotations

import torch
from torch import Tensor

from pdecay.deployment.compact.rules.base import Plain, reduced, where
from pdecay.deployment.compact.trace import Call, Value
from pdecay.deployment.compact.units import Places, Units, fixed

_SAME = {"alias", "detach", "lift_fresh"}
_ALIKE = {"zeros_like", "ones_like", "full_like"}  # all elements the same


class Elementwise(Plain):
    """Position i of every input and of the output go together."""

    def tie(self, call: Call, units: Units) -> None:
        for out in call.outs:
            rank = out.tensor.ndim
            places: list[Places] = [fixed(n) for n in out.tensor.shape]
            given: set[int] = set()
            for value in call.ins:
                for axis, own in enumerate(value.places, start=rank - value.tensor.ndim):
                    if len(own) == 1:
                        continue  # one element for all positions
                    if axis in given:
                        units.tie(places[axis], own, f"{where(call)} meets a fixed size")
                    else:
                        places[axis] = own
                        given.add(axis)
            out.places = places
            if call.name in _SAME:
                out.weight = call.ins[0].weight

    def vary(self, call: Call) -> None:
        for out in call.outs:
            out.varies = torch.zeros_like(out.tensor, dtype=torch.bool)
            for value in call.ins:
                out.varies = out.varies | value.varies

    def back(self, call: Call) -> None:
        for out in call.outs:
            for value in call.ins:
                value.live = value.live | reduced(out.live, value.tensor.shape)


class Product(Elementwise):
    """Elementwise too, but a constant zero makes the other factor unread, and a zero."""

    def vary(self, call: Call) -> None:
        if len(call.ins) == 1:
            super().vary(call)
        else:
            a, b = call.ins
            (out,) = call.outs
            out.varies = (a.varies & b.counts) | (b.varies & a.counts)

    def back(self, call: Call) -> None:
        if len(call.ins) == 1:
            super().back(call)
        else:
            a, b = call.ins
            (out,) = call.outs
            _read(a, out.live & b.counts)
            # Where both are zero one of them has to be kept so, or the product may change.
            _read(b, out.live & (a.counts | ~b.counts))


class Like(Elementwise):
    """A tensor in the shape of another, whose elements it does not read."""

    def vary(self, call: Call) -> None:
        for out in call.outs:
            out.varies = torch.full_like(out.tensor, call.name not in _ALIKE, dtype=torch.bool)

    def back(self, call: Call) -> None:
        pass


def _read(value: Value, mask: Tensor) -> None:
    value.live = value.live | reduced(mask, value.tensor.shape)
