"""The analysis of a trace: labels, varying elements and live elements of every tensor.

Two passes over the operations. The forward pass marks the elements that *vary* with the model's
inputs (the others are constant) and labels each axis with the units of its positions. The backward
pass marks the elements that are *live*: the model's outputs depend on them. A term of a sum can be
removed if it is zero or not live. If it is constant, it can be folded into a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdecay._utils.errors import with_location
from pdecay.deployment.compact.rules import OPAQUE, Consumer, rule_for
from pdecay.deployment.compact.rules.base import fill_all
from pdecay.deployment.compact.rules.moves import mark_cropped, mark_unread, unread_pieces
from pdecay.deployment.compact.trace import Call, Trace
from pdecay.deployment.compact.units import Units, fixed
from pdecay.deployment.model.errors import CompactError


@dataclass(eq=False)
class Analysis:
    """The result of `analyse`.

    Args:
        trace: the trace; its values have labels and masks.
        units: the units that the labels stand for.
        consumers: every sum over an axis whose units can be removed.
        unknown: the operations without a rule that keep units.
    """

    trace: Trace
    units: Units
    consumers: list[Consumer]
    unknown: list[str]


@torch.no_grad()
def analyse(trace: Trace, keep: dict[str, str]) -> Analysis:
    """Label the values of a trace, mark varying and live elements, and find the consumers.

    Args:
        trace: the trace. Its values are changed.
        keep: names of parameters and buffers that must keep their sizes, with the reason.

    Raises:
        CompactError: if a rule fails, which is a bug of the rule.
    """
    units = Units()
    _initialize(trace, units, keep)
    readers = _readers(trace)
    rules = [rule_for(call) for call in trace.calls]
    unknown = []
    for i, call in enumerate(trace.calls):
        try:
            if rules[i] is not OPAQUE:
                rules[i].mark_varying(call)
                rules[i].label(call, units)
        except RuntimeError:  # torch does not support the rule's operations for this dtype
            rules[i] = OPAQUE
        except Exception as error:
            raise CompactError(
                f"the rule for {call} failed ({with_location(error)}): please report this model"
            ) from error
        if rules[i] is OPAQUE:
            if any(units.of_all(labels) for value in call.ins for labels in value.labels):
                unknown.append(str(call))
            OPAQUE.mark_varying(call)
            OPAQUE.label(call, units)
        if call.outs and call.outs[0].static and unread_pieces(call, readers):
            fill_all(call.outs, True)  # the number of rows may depend on the input
        for value in call.outs:
            value.varies = value.varies | value.changed
    for value in trace.outputs:
        value.mark_live(True)
        for labels in value.labels:
            units.keep(labels.tolist(), "the model returns or stores them")
    unused = _unused_layers(trace)
    for call, rule in zip(reversed(trace.calls), reversed(rules), strict=True):
        for value in call.outs:
            value.mark_live(call in unused)
            mark_cropped(value, readers.get(id(value), []))
        if unread := unread_pieces(call, readers):
            mark_unread(call, unread)
        rule.mark_live(call)
    found = [rule.consumer(call) for call, rule in zip(trace.calls, rules, strict=True)]
    return Analysis(trace, units, [one for one in found if one is not None], unknown)


def _unused_layers(trace: Trace) -> set[Call]:
    """Return the operations with weights whose results the code does not use in any way.

    It may use them in training mode, such as those of an auxiliary head, so that these layers are
    not changed. Results that are multiplied by zeros are used.
    """
    reached = {id(value) for value in trace.outputs}
    unused = set()
    for call in reversed(trace.calls):
        if not call.outs or call.in_place or any(id(out) in reached for out in call.outs):
            reached.update(map(id, call.ins))
        elif {value.static for value in call.ins} == {True, False}:
            unused.add(call)
    return unused


def _readers(trace: Trace) -> dict[int, list[Call]]:
    """Return the operations that read each value, by its id."""
    readers: dict[int, list[Call]] = {}
    for call in trace.calls:
        for value in call.ins:
            readers.setdefault(id(value), []).append(call)
    return readers


def _initialize(trace: Trace, units: Units, keep: dict[str, str]) -> None:
    """Set the labels and masks of parameters, buffers and inputs."""
    given = units.fixed_label("the model is given them")
    for value in trace.values:
        named = value.name is not None
        # Integer tensors hold indices and counts, not weights.
        is_weight = named and (value.tensor.is_floating_point() or value.tensor.dtype == torch.bool)
        shape = value.tensor.shape
        value.labels = [units.new(n) if is_weight else fixed(n) + given for n in shape]
        value.varies = torch.full_like(value.tensor, not named, dtype=torch.bool)
        value.live = torch.zeros_like(value.tensor, dtype=torch.bool)
        if value.name in keep:
            for labels in value.labels:
                units.keep(labels.tolist(), keep[value.name])
