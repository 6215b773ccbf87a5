"""What a rule answers about an operation, and what the rules share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdecay.deployment.compact.trace import Call, Value
from pdecay.deployment.compact.units import Places, Units


@dataclass(eq=False)
class Reads:
    """A sum over an axis, seen from each of its positions.

    Args:
        places: which units the positions belong to.
        emits: which positions hold anything but a constant zero.
        counts: of which positions a term can be anything but zero, in an output that is read.
        varies: of which positions such a term depends on the model's inputs.
        constants: the constant that a position holds at every place; NaN where it does not.
        weight: the name of the weight that it is multiplied by, where it is the layer's own.
        shift: for each position what its constant adds to each output.
        why_not: why a constant cannot be added to the bias instead; None where it can.
    """

    places: Places
    emits: Tensor
    counts: Tensor
    varies: Tensor
    constants: Tensor
    weight: str | None
    shift: Tensor
    why_not: str | None


class Rule(Protocol):
    """One kind of operation."""

    def tie(self, call: Call, units: Units) -> None:
        """Give the outputs their places, and tie those of the inputs to them."""

    def vary(self, call: Call) -> None:
        """Say which elements of the outputs vary."""

    def back(self, call: Call) -> None:
        """Add to the inputs' live elements those that the outputs' live ones depend on."""

    def reads(self, call: Call) -> Reads | None:
        """The sum over an axis whose units may go; None where there is no such sum."""

    def sizes(self, call: Call, units: Units) -> dict[str, Places]:
        """Attributes of the module at work that count positions: their names, and which."""

    def steps(self, call: Call) -> list[tuple[Places, int]]:
        """Axes whose sizes have to be multiples of a number, and of which."""

    def makes(self, call: Call) -> tuple[str, int] | None:
        """The name of the weight whose outputs lie along an axis of the result, and the axis."""


class Plain:
    """The answers that most rules share."""

    def makes(self, call: Call) -> tuple[str, int] | None:
        return None

    def reads(self, call: Call) -> Reads | None:
        return None

    def sizes(self, call: Call, units: Units) -> dict[str, Places]:
        return {}

    def steps(self, call: Call) -> list[tuple[Places, int]]:
        return []


def where(call: Call) -> str:
    """The module at work and its operation, for a reason."""
    module = next((name for name in reversed(call.modules) if name), "")
    return f"{module} ({call.name})" if module else call.name


def fix_all(values: Iterable[Value], units: Units, why: str) -> None:
    for value in values:
        for places in value.places:
            units.fix(places.tolist(), why)


def reduced(mask: Tensor, shape: torch.Size) -> Tensor:
    """A mask on a tensor's broadcast form as one on the tensor: where any copy of it is set."""
    extra = mask.ndim - len(shape)
    axes = [*range(extra)]
    axes += [i + extra for i, n in enumerate(shape) if n == 1 and mask.shape[i + extra] != 1]
    if axes:
        mask = mask.amax(axes, keepdim=True)
    return mask.reshape(shape)
