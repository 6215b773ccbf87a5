"""The adaptation of a smaller model to sizes that its code holds in attributes.

Most code takes sizes from its tensors and runs with smaller ones. Some code holds them in
attributes: the number of heads to reshape to, the position to split at. The smaller model is
recorded and compared with the trace of the original, operation by operation. At the first mismatch,
attributes of the running module that hold an old size are set to the new one, as long as this moves
the mismatch to a later operation. If no attribute helps, the units involved are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pdecay.deployment.compact.removal import Removal
from pdecay.deployment.compact.shrink import Attributes, cut, shrink
from pdecay.deployment.compact.trace import Call, Trace, Value, record
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import agree, agree_in_float64, is_precise


@dataclass(frozen=True)
class _Attempt:
    """A smaller model with some attributes set.

    Args:
        attributes: the attributes.
        model: the smaller model.
        mismatch: the index of the first operation that is not as expected; None if all are.
        reason: the reason for which units are kept if no further attribute helps.
    """

    attributes: Attributes
    model: nn.Module
    mismatch: int | None
    reason: str = ""


class Fitting:
    """The search for attributes with which the smaller model runs as expected."""

    def __init__(self, model: nn.Module, inputs: Inputs, trace: Trace, removal: Removal) -> None:
        self.model = model
        self.inputs = inputs
        self.trace = trace
        self.removal = removal
        self.attributes: Attributes = {}

    def fit(self) -> nn.Module | None:
        """Return the smaller model, or None if units must be kept and a new removal is needed."""
        attempt = self._attempt(self.attributes)
        while attempt.mismatch is not None:
            better = self._improve(attempt.mismatch)
            if better is None:
                self._keep_units(attempt.mismatch, attempt.reason)
                return None
            attempt = better
            self.attributes = attempt.attributes
        return attempt.model

    def _attempt(self, attributes: Attributes) -> _Attempt:
        smaller = shrink(self.model, self.removal, self.trace, attributes)
        run = record(smaller, self.inputs)
        expected = [value.tensor for value in self.trace.outputs]
        same = run.error is None and agree(expected, [value.tensor for value in run.outputs])
        precise = all(is_precise(tensor) for tensor in expected)
        if same and not precise and not self.removal.bias_shifts:
            # Rounding errors hide small differences, such as those of heads split at other places.
            same = agree_in_float64(self.model, smaller, self.inputs, default=True)
        # Equal outputs do not suffice: a ReLU of sums that are negative for this example hides
        # other values before it. Other shapes do not matter then, such as those of statistics.
        values_only = same and precise
        mismatch = first_mismatch(self.removal, self.trace, run, values_only=values_only)
        if mismatch is None:
            if same or agree_in_float64(self.model, smaller, self.inputs):
                return _Attempt(attributes, smaller, None)
            mismatch = len(self.trace.calls) - 1
        reason = "needs this size" if run.error else "computes other values without them"
        return _Attempt(attributes, smaller, mismatch, reason)

    def _improve(self, mismatch: int) -> _Attempt | None:
        """Return an attempt with more attributes whose mismatch is later."""
        for candidates in self._candidates(mismatch):
            attributes = {**self.attributes, **candidates}
            if attributes != self.attributes:
                attempt = self._attempt(attributes)
                if _is_later(attempt.mismatch, mismatch):
                    return self._without_needless(attempt, candidates)
        return None

    def _without_needless(self, attempt: _Attempt, candidates: Attributes) -> _Attempt:
        """Leave out attributes that do not help: they are equal to the size only by chance."""
        names = dict.fromkeys(name for _, name in candidates)
        for name in names if len(names) > 1 else ():
            fewer = {key: size for key, size in candidates.items() if key[1] != name}
            simpler = self._attempt({**self.attributes, **fewer})
            if not _is_later(attempt.mismatch, simpler.mismatch):
                attempt, candidates = simpler, fewer
        return attempt

    def _candidates(self, mismatch: int) -> Iterator[Attributes]:
        """Yield attributes that hold a size which has changed: one name at a time, then all.

        An attribute is set in all modules of the same class, since they run the same code.
        """
        for module in reversed(self.trace.calls[mismatch].modules):
            found: dict[str, Attributes] = {}
            for name, call in self._counterparts(mismatch, module):
                sizes = self._changed_sizes(call)
                for attribute, size in vars(self.model.get_submodule(name)).items():
                    if type(size) is int and size in sizes:
                        found.setdefault(attribute, {})[name, attribute] = sizes[size]
            yield from found.values()
            if len(found) > 1:
                yield {key: size for one in found.values() for key, size in one.items()}

    def _counterparts(self, index: int, module: str) -> Iterator[tuple[str, Call]]:
        """Yield the same operation in every module of the same class."""
        calls = self._calls_in(module)
        if self.trace.calls[index] not in calls:
            return  # called outside of all modules
        position = calls.index(self.trace.calls[index])
        kind = type(self.model.get_submodule(module))
        for name, other in self.model.named_modules():
            if type(other) is kind:
                theirs = self._calls_in(name)
                if position < len(theirs) and theirs[position].op is calls[position].op:
                    yield name, theirs[position]

    def _calls_in(self, module: str) -> list[Call]:
        return [call for call in self.trace.calls if module in call.modules]

    def _changed_sizes(self, call: Call) -> dict[int, int]:
        """Return the new size for each size of an axis that has changed."""
        axes = [labels for value in (*call.ins, *call.outs) for labels in value.labels]
        sizes = [(len(labels), self.removal.size(labels)) for labels in axes]
        return {old: new for old, new in sizes if new != old}

    def _keep_units(self, mismatch: int, reason: str) -> None:
        """Keep the units of the operation, or else of the modules around it."""
        units, dead = self.removal.units, self.removal.dead
        call = self.trace.calls[mismatch]
        module = call.modules[-1] if call.modules else ""
        kind = type(self.model.get_submodule(module)).__name__
        scopes = [
            [call, *(other for _, other in self._counterparts(mismatch, module))],
            *(self._calls_in(name) for name in reversed(call.modules)),
            self.trace.calls,
        ]
        for calls in scopes:
            values = [value for one in calls for value in (*one.ins, *one.outs)]
            labels = {int(label) for value in values for own in value.labels for label in own}
            # Keep dimensions of heads before heads: code seldom runs with fewer dimensions.
            inner = {unit for label in labels for unit in units.of(label)[1:]} & dead.keys()
            keep = inner or units.of_all(labels) & dead.keys()
            if keep:
                units.keep(keep, f"the code of {module or 'the model'} ({kind}) {reason}")
                return


def _is_later(mismatch: int | None, other: int | None) -> bool:
    return other is not None and (mismatch is None or mismatch > other)


@torch.no_grad()
def first_mismatch(
    removal: Removal, trace: Trace, run: Trace, *, values_only: bool = False
) -> int | None:
    """Return the first operation of a trace that a smaller model's run does not reproduce.

    Return None if all are as expected. A run that failed has a mismatch where it ended, or before.

    Args:
        removal: the removal that made the model smaller.
        trace: the trace of the model.
        run: the trace of the smaller model.
        values_only: compare only values, up to the first operation that differs.
    """
    ours, theirs = _comparable(removal, trace), _comparable(removal, run)
    for (index, call), (_, other) in zip(ours, theirs, strict=False):
        if call.op is not other.op:
            return None if values_only else index
        for value, got in zip(call.outs, other.outs, strict=True):
            expected = _cut(removal, value, value.tensor)
            if expected.shape != got.tensor.shape:
                if values_only:
                    continue
                return index
            live = _cut(removal, value, value.live)
            # Rounding errors of intermediate results may be larger than those of the outputs.
            close = agree([expected[live]], [got.tensor[live]], slack=100)
            if not call.uninitialized and not close:
                return index
    return ours[len(theirs)][0] if len(theirs) < len(ours) and not values_only else None


def _comparable(removal: Removal, trace: Trace) -> list[tuple[int, Call]]:
    """Return the operations with their indices, without those of layers with folded constants.

    A layer with a new bias runs other operations, and its sums differ before the bias is added.
    """
    folded = {weight.rpartition(".")[0] for weight in removal.bias_shifts}
    calls = enumerate(trace.calls)
    return [(index, call) for index, call in calls if not folded.intersection(call.modules[-1:])]


def _cut(removal: Removal, value: Value, tensor: Tensor) -> Tensor:
    return cut(tensor, tuple(removal.positions(labels) for labels in value.labels))
