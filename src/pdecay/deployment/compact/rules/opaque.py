"""Operations about which nothing is known, and those that make tensors from nothing."""

from __future__ import annotations

import torch

from pdecay.deployment.compact.rules.base import Plain, fix_all, where
from pdecay.deployment.compact.trace import Call
from pdecay.deployment.compact.units import Units, fixed

_UNIFORM = {"zeros", "ones", "full", "scalar_tensor", "new_zeros", "new_ones", "new_full"}


class Opaque(Plain):
    """Every element of the inputs may be read by every element of the outputs."""

    def tie(self, call: Call, units: Units) -> None:
        why = f"{where(call)} is an operation that compact does not know"
        fix_all(call.ins, units, why)
        if call.in_place:
            fix_all(call.outs, units, why)
        else:
            for out in call.outs:
                out.places = [fixed(n) for n in out.tensor.shape]

    def vary(self, call: Call) -> None:
        random = torch.Tag.nondeterministic_seeded in call.op.tags
        read = not call.ins or any(bool(value.varies.any()) for value in call.ins)
        for out in call.outs:
            fill = random or read or call.in_place
            out.varies = torch.full_like(out.tensor, fill, dtype=torch.bool)

    def back(self, call: Call) -> None:
        # What makes no tensor makes a number, which may go anywhere in the code.
        live = call.in_place or not call.outs or any(bool(out.live.any()) for out in call.outs)
        for value in call.ins:
            value.live = value.live | live


class Factory(Opaque):
    """A tensor of one number is a constant; any other may follow the shape of the inputs.

    The code that makes the former, or an empty one, may make a smaller one as well; whether it
    does is seen later.
    """

    def tie(self, call: Call, units: Units) -> None:
        alike = call.name in _UNIFORM or call.unfilled
        for out in call.outs:
            out.places = [units.fresh(n) if alike else fixed(n) for n in out.tensor.shape]

    def vary(self, call: Call) -> None:
        for out in call.outs:
            out.varies = torch.full_like(out.tensor, call.name not in _UNIFORM, dtype=torch.bool)

    def back(self, call: Call) -> None:
        pass
