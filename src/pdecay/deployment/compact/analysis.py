"""What a trace says: which places go together, which elements vary, and which are read.

Three passes over the operations. Forwards: an element *varies* if it depends on the model's
inputs; the others are constants. Forwards, too: which positions of which axes belong together.
Backwards: an element is *live* if an output depends on it. A term of a sum may go if it is zero or
not live; if it is constant, it may go to the bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdecay.deployment.compact.rules import OPAQUE, Reads, rule_for
from pdecay.deployment.compact.rules.base import where
from pdecay.deployment.compact.trace import Trace, Value
from pdecay.deployment.compact.units import Units, fixed


@dataclass(eq=False)
class Analysis:
    """A trace whose values know their places and masks.

    Args:
        trace, units: what was traced, and its units.
        reads: every sum over an axis whose units may go.
        unknown: the operations without a rule that units have to stay for.
    """

    trace: Trace
    units: Units
    reads: list[Reads]
    unknown: list[str]


@torch.no_grad()
def analyse(trace: Trace, keep: dict[str, str]) -> Analysis:
    """Find out what a trace says.

    Args:
        trace: its values are given their places and masks.
        keep: parameters and buffers that must stay as they are, with the reason.
    """
    units = Units()
    given = units.never("the model is given them")
    for value in trace.values:
        named = value.name is not None
        # Whole numbers are indices and counts, not weights.
        cuttable = named and (value.tensor.is_floating_point() or value.tensor.dtype == torch.bool)
        shape = value.tensor.shape
        value.places = [units.fresh(n) if cuttable else fixed(n) + given for n in shape]
        value.varies = torch.full_like(value.tensor, not named, dtype=torch.bool)
        value.live = torch.zeros_like(value.tensor, dtype=torch.bool)
        if value.name in keep:
            for places in value.places:
                units.fix(places.tolist(), keep[value.name])
    rules = [rule_for(call) for call in trace.calls]
    unknown = []
    for i, call in enumerate(trace.calls):
        try:
            if rules[i] is not OPAQUE:
                rules[i].vary(call)
                rules[i].tie(call, units)
        except Exception:  # a number format, or arguments, that the rule was not made for
            rules[i] = OPAQUE
        if rules[i] is OPAQUE:
            if any(_has_units(value, units) for value in call.ins):
                unknown.append(where(call))
            OPAQUE.vary(call)
            OPAQUE.tie(call, units)
    for value in trace.outputs:
        value.live = torch.ones_like(value.live)
        for places in value.places:
            units.fix(places.tolist(), "the model returns them")
    for call, rule in zip(reversed(trace.calls), reversed(rules), strict=True):
        rule.back(call)
    found = [rule.reads(call) for call, rule in zip(trace.calls, rules, strict=True)]
    return Analysis(trace, units, [reads for reads in found if reads is not None], unknown)


def _has_units(value: Value, units: Units) -> bool:
    return any(units.of(place) for places in value.places for place in set(places.tolist()))
