"""Rules for elementwise operations: activations, sums and products of tensors, copies."""

from __future__ import annotations

import torch

from pdecay.deployment.compact.rules.base import (
    Rule,
    fill_all,
    fixed_axes,
    is_uniform,
    reduce_mask,
    size_mismatch,
)
from pdecay.deployment.compact.trace import Call
from pdecay.deployment.compact.units import Units

_IDENTITIES = {"alias", "detach", "lift_fresh"}


class Elementwise(Rule):
    """Position i of every input and of the output belong to the same units."""

    def label(self, call: Call, units: Units) -> None:
        for out in call.outs:
            out.labels = fixed_axes(out)
            labelled: set[int] = set()
            for value in call.ins:
                for axis, own in enumerate(value.labels, start=out.tensor.ndim - value.tensor.ndim):
                    if len(own) == 1:
                        continue  # broadcast to all positions
                    if axis in labelled:
                        units.tie(out.labels[axis], own, size_mismatch(call))
                    else:
                        out.labels[axis] = own
                        labelled.add(axis)
            if call.name in _IDENTITIES:
                out.weight = call.ins[0].weight

    def mark_varying(self, call: Call) -> None:
        for out in call.outs:
            out.varies = torch.zeros_like(out.tensor, dtype=torch.bool)
            for value in call.ins:
                out.varies = out.varies | value.varies

    def mark_live(self, call: Call) -> None:
        for out in call.outs:
            for value in call.ins:
                value.mark_live(reduce_mask(out.live, value.tensor.shape))


class Product(Elementwise):
    """An elementwise product. Where one factor is always zero, the other is not read."""

    def mark_varying(self, call: Call) -> None:
        if len(call.ins) == 1:
            super().mark_varying(call)
        else:
            a, b = call.ins
            (out,) = call.outs
            out.varies = (a.varies & b.nonzero) | (b.varies & a.nonzero)

    def mark_live(self, call: Call) -> None:
        if len(call.ins) == 1:
            super().mark_live(call)
        else:
            a, b = call.ins
            (out,) = call.outs
            a.mark_live(reduce_mask(out.live & b.nonzero, a.tensor.shape))
            # Where both are zero, one of them must be live, or both zeros could be changed.
            b.mark_live(reduce_mask(out.live & (a.nonzero | ~b.nonzero), b.tensor.shape))


class Like(Elementwise):
    """A new tensor in the shape of another, whose elements are not read: ``zeros_like``."""

    def mark_varying(self, call: Call) -> None:
        fill_all(call.outs, not is_uniform(call))

    def mark_live(self, call: Call) -> None:
        pass
