"""The report of `compact`: removed units, dead units that are kept, and the reasons."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from pdecay._utils.tables import ruled
from pdecay.deployment.compact.analysis import Analysis
from pdecay.deployment.compact.removal import LAST, Removal
from pdecay.deployment.compact.rules import rule_for
from pdecay.deployment.compact.shrink import KeptPositions
from pdecay.deployment.compact.trace import Call
from pdecay.deployment.compact.units import FIXED

_SHARED = (
    "they share positions with live units (in a sum, a head, a group, a depthwise convolution)"
)


@dataclass(frozen=True)
class SmallerTensor:
    """A parameter or buffer that became smaller, with its shapes before and after."""

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class KeptUnits:
    """Dead units of a layer that could not be removed.

    Args:
        layer: the name of the weight that produces them.
        units: their indices in the original model.
        reason: why they are kept.
    """

    layer: str
    units: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class CompactReport:
    """The result of `compact`. ``str()`` gives a table, :meth:`to_dict` plain data.

    Args:
        removed: the number of removed units by reason: ``"unread"``, ``"zero"`` or
            ``"constant"``. A unit is removed from all tensors at once:
            a channel with everything that produces and consumes it counts once.
        tensors: the parameters and buffers that became smaller.
        kept: the dead units that could not be removed.
        unknown: the operations without a rule and the modules that run them. The units that they
            touch are kept.
        parameters: the number of parameters before and after.
        difference: the largest difference of the outputs, relative to the largest element.
        unused: the modules with parameters that did not run on the example. They are not changed,
            and may not fit if the model calls them on other inputs.
    """

    removed: dict[str, int]
    tensors: tuple[SmallerTensor, ...]
    kept: tuple[KeptUnits, ...]
    unknown: tuple[str, ...]
    parameters: tuple[int, int]
    difference: float
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> CompactReport:
        """Return the report of a model that `compact` returned."""
        report = getattr(model, "compact_report", None)
        if not isinstance(report, CompactReport):
            raise ValueError(f"this {type(model).__name__} has no report: compact did not make it")
        return report

    @property
    def units(self) -> int:
        """The number of removed units."""
        return sum(self.removed.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # tuples become lists
        return plain

    def __str__(self) -> str:
        before, after = self.parameters
        share = f" ({1 - after / before:.1%} fewer)" if after < before else ""
        lines = [f"{before:,} parameters -> {after:,}{share}"]
        parts = [f"{count:,} {reason}" for reason, count in sorted(self.removed.items())]
        lines.append(f"removed {_units(self.units)}" + (": " + ", ".join(parts) if parts else ""))
        weights = [one for one in self.tensors if len(one.before) > 1]
        if weights:
            rows: list[tuple[str, ...]] = [("weight", "before", "after")]
            rows += [(one.name, _size(one.before), _size(one.after)) for one in weights]
            lines += ["", *ruled(rows)]
        if self.kept:
            lines += ["", "dead units that were kept:"]
            lines += [f"  {one.layer}: {_units(len(one.units))}: {one.reason}" for one in self.kept]
        if self.unknown:
            lines += ["", "operations without a rule, whose units were kept:"]
            lines += [f"  {one}" for one in self.unknown]
        if self.unused:
            lines += ["", "modules that did not run on the example, which may not fit any more:"]
            lines += [f"  {one}" for one in self.unused]
        return "\n".join(lines)


@torch.no_grad()
def kept_units(analysis: Analysis, removal: Removal, kept: KeptPositions) -> Iterator[KeptUnits]:
    """Yield the dead units that the removal does not contain.

    Args:
        analysis: the analysis of the smaller model.
        removal: the last removal, which is empty.
        kept: the positions that earlier removals kept, as indices of the original model.
    """
    layers: dict[str, list[tuple[Call, int]]] = {}
    for call in analysis.trace.calls:
        producer = rule_for(call).producer(call)
        if producer is not None:
            weight, axis = producer
            calls = layers.setdefault(weight, [])
            # A gradient in the forward also multiplies by the transpose, which has other units.
            if not calls or _labels(call, axis) == _labels(*calls[0]):
                calls.append((call, axis))
    for weight, calls in layers.items():
        alive = torch.stack([_alive(call, axis) for call, axis in calls]).any(0)
        # The weight's first axis with the size of the smaller model translates the indices.
        axes = (axis for axis in kept.get(weight, ()) if len(axis) == len(alive))
        original = next(axes, torch.arange(len(alive)))
        units: dict[str, list[int]] = {}
        call, axis = calls[0]
        for i in (~alive).nonzero().flatten().tolist():
            reason = _reason(analysis, removal, int(call.outs[0].labels[axis][i]))
            units.setdefault(reason, []).append(int(original[i]))
        for reason, indices in units.items():
            yield KeptUnits(weight, tuple(indices), reason)


def _labels(call: Call, axis: int) -> list[int]:
    return [int(label) for label in call.outs[0].labels[axis]]


def _alive(call: Call, axis: int) -> torch.Tensor:
    """Return which positions of an output axis have an element that varies and is live."""
    out = call.outs[0]
    return (out.varies & out.live).transpose(0, axis).flatten(1).any(1)


def _reason(analysis: Analysis, removal: Removal, label: int) -> str:
    if label == FIXED:
        return LAST  # an axis of one position
    kept = (removal.kept.get(unit) for unit in analysis.units.of(label))
    return next(filter(None, kept), None) or analysis.units.reason(label) or _SHARED


def _units(count: int) -> str:
    return "1 unit" if count == 1 else f"{count:,} units"


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
