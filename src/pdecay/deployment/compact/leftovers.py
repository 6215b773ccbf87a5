"""What stayed although it is dead."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pdecay.deployment.compact.analysis import Analysis
from pdecay.deployment.compact.plan import LAST, Plan
from pdecay.deployment.compact.report import Left
from pdecay.deployment.compact.rules import rule_for
from pdecay.deployment.compact.surgery import Kept
from pdecay.deployment.compact.trace import Call
from pdecay.deployment.compact.units import FIXED

_SHARED = "they share their place with what is alive (in a sum, a head, a group, a depthwise layer)"


@torch.no_grad()
def left_units(found: Analysis, plan: Plan, kept: Kept) -> Iterator[Left]:
    """Units of which nothing both varies and is read, yet which no plan removes."""
    layers: dict[str, list[tuple[Call, int]]] = {}
    for call in found.trace.calls:
        made = rule_for(call).makes(call)
        if made is not None:
            weight, axis = made
            layers.setdefault(weight, []).append((call, axis))
    for weight, calls in layers.items():
        alive = torch.stack([_alive(call, axis) for call, axis in calls]).any(0)
        reasons: dict[str, list[int]] = {}
        call, axis = calls[0]
        for i in (~alive).nonzero().flatten().tolist():
            why = _why(found, plan, int(call.outs[0].places[axis][i]))
            reasons.setdefault(why, []).append(i)
        for why, units in reasons.items():
            yield Left(weight, tuple(_numbers_at_first(kept, weight, len(alive), units)), why)


def _alive(call: Call, axis: int) -> torch.Tensor:
    out = call.outs[0]
    return (out.varies & out.live).transpose(0, axis).flatten(1).any(1)


def _why(found: Analysis, plan: Plan, place: int) -> str:
    if place == FIXED:
        return LAST  # an axis of one position
    needed = (plan.needed.get(unit) for unit in found.units.of(place))
    return next(filter(None, needed), None) or found.units.why(place) or _SHARED


def _numbers_at_first(kept: Kept, weight: str, count: int, units: list[int]) -> list[int]:
    for numbers in kept.get(weight, ()):
        if len(numbers) == count:
            return [int(numbers[i]) for i in units]
    return units
