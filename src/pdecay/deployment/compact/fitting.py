"""Making a smaller model fit its own code.

Most code takes sizes from the tensors at hand and runs with smaller ones. Some keeps them: heads to
reshape to, where to split. A smaller model is run against the plan; at the first operation that is
not as planned, attributes of the module at work that hold the old size are set to the new one, as
long as that helps. Where none does, the units in question stay, with that reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pdecay.deployment.compact.plan import Plan, units_of
from pdecay.deployment.compact.surgery import Attributes, smaller
from pdecay.deployment.compact.trace import Call, Trace, Value, record
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import agree, agree_in_float64


@dataclass(frozen=True)
class _Attempt:
    """A smaller model with some attributes set, where it does not do what it should, and why."""

    attributes: Attributes
    model: nn.Module
    parts_at: int | None
    why: str = ""


class Fitting:
    """The search for attributes with which a plan works out."""

    def __init__(self, model: nn.Module, inputs: Inputs, trace: Trace, plan: Plan) -> None:
        self.model = model
        self.inputs = inputs
        self.trace = trace
        self.plan = plan
        self.attributes: Attributes = {}

    def fit(self) -> nn.Module | None:
        """The smaller model; None where units were told to stay, so that a new plan is needed."""
        attempt = self._attempt(self.attributes)
        while attempt.parts_at is not None:
            better = self._better(attempt.parts_at)
            if better is None:
                self._give_up(attempt.parts_at, attempt.why)
                return None
            attempt = better
            self.attributes = attempt.attributes
        return attempt.model

    def _attempt(self, attributes: Attributes) -> _Attempt:
        made = smaller(self.model, self.plan, self.trace, attributes)
        run = record(made, self.inputs)
        expected = [value.tensor for value in self.trace.outputs]
        if run.error is None and agree(expected, [value.tensor for value in run.outputs]):
            return _Attempt(attributes, made, None)
        at = parting(self.plan, self.trace, run)
        if at is None and agree_in_float64(self.model, made, self.inputs):
            return _Attempt(attributes, made, None)
        why = "needs this size" if run.error else "computes something else without them"
        return _Attempt(attributes, made, len(self.trace.calls) - 1 if at is None else at, why)

    def _better(self, parts_at: int) -> _Attempt | None:
        """An attempt with more attributes that gets further."""
        for candidates in self._candidates(parts_at):
            attributes = {**self.attributes, **candidates}
            if attributes != self.attributes:
                attempt = self._attempt(attributes)
                if attempt.parts_at is None or attempt.parts_at > parts_at:
                    return attempt
        return None

    def _candidates(self, parts_at: int) -> Iterator[Attributes]:
        """Attributes that hold a size which has changed: one name at a time, then all.

        What helps one module is done to all of its kind: they run the same code.
        """
        for module in reversed(self.trace.calls[parts_at].modules):
            alike = dict(self._alike(parts_at, module))
            found: dict[str, Attributes] = {}
            for name, call in alike.items():
                sizes = self._changed(call)
                for attribute, size in vars(self.model.get_submodule(name)).items():
                    if type(size) is int and size in sizes:
                        found.setdefault(attribute, {})[name, attribute] = sizes[size]
            yield from found.values()
            if len(found) > 1:
                yield {key: size for one in found.values() for key, size in one.items()}

    def _alike(self, at: int, module: str) -> Iterator[tuple[str, Call]]:
        """The same operation in every module of the same kind."""
        calls = self._calls_in(module)
        if self.trace.calls[at] not in calls:
            return  # it was called outside of any module
        index = calls.index(self.trace.calls[at])
        kind = type(self.model.get_submodule(module))
        for name, other in self.model.named_modules():
            if type(other) is kind:
                theirs = self._calls_in(name)
                if index < len(theirs) and theirs[index].op is calls[index].op:
                    yield name, theirs[index]

    def _calls_in(self, module: str) -> list[Call]:
        return [call for call in self.trace.calls if module in call.modules]

    def _changed(self, call: Call) -> dict[int, int]:
        sizes = {}
        for value in (*call.ins, *call.outs):
            for places in value.places:
                size = self.plan.size(places)
                if size != len(places):
                    sizes[len(places)] = size
        return sizes

    def _give_up(self, parts_at: int, why: str) -> None:
        """Let the units stay that the operation is about, or those of the module around it."""
        units, gone = self.plan.units, self.plan.gone
        call = self.trace.calls[parts_at]
        module = call.modules[-1] if call.modules else ""
        kind = type(self.model.get_submodule(module)).__name__
        around = [
            [call, *(other for _, other in self._alike(parts_at, module))],
            *(self._calls_in(name) for name in reversed(call.modules)),
            self.trace.calls,
        ]
        for calls in around:
            values = [value for one in calls for value in (*one.ins, *one.outs)]
            places = {int(p) for value in values for own in value.places for p in own}
            # Of heads and their dimensions the latter first: code seldom takes fewer of those.
            inner = {unit for place in places for unit in units.of(place)[1:]} & gone.keys()
            stay = inner or units_of(units, places) & gone.keys()
            if stay:
                units.fix(stay, f"the code of {module or 'the model'} ({kind}) {why}")
                return


@torch.no_grad()
def parting(plan: Plan, trace: Trace, run: Trace) -> int | None:
    """The first operation of a trace in which a smaller model's run is not as planned.

    None where all are. A run that failed parts where it ended, at the latest.
    """
    ours, theirs = _comparable(plan, trace), _comparable(plan, run)
    for (at, call), (_, other) in zip(ours, theirs, strict=False):
        if call.op is not other.op:
            return at
        for value, got in zip(call.outs, other.outs, strict=True):
            less, live = _less(plan, value, value.tensor), _less(plan, value, value.live)
            if less.shape != got.tensor.shape:
                return at
            # Rounding errors may be larger on the way than in the outputs.
            if not call.unfilled and not agree([less[live]], [got.tensor[live]], slack=100):
                return at
    return ours[len(theirs)][0] if len(theirs) < len(ours) else None


def _comparable(plan: Plan, trace: Trace) -> list[tuple[int, Call]]:
    """The operations with their numbers, but for those of layers whose biases took constants over.

    A layer with a bias runs others than one without, and its sums are less before the bias.
    """
    shifted = {weight.rpartition(".")[0] for weight in plan.shifts}
    calls = enumerate(trace.calls)
    return [(at, call) for at, call in calls if not shifted.intersection(call.modules[-1:])]


def _less(plan: Plan, value: Value, tensor: Tensor) -> Tensor:
    for axis, places in enumerate(value.places):
        kept = plan.kept(places)
        if len(kept) != tensor.shape[axis]:
            tensor = tensor.index_select(axis, kept.to(tensor.device))
    return tensor
