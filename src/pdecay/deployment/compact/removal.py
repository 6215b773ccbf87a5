"""The choice of the units to remove."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from pdecay._core.parameters import has_transposed_weight
from pdecay.deployment.compact.analysis import Analysis
from pdecay.deployment.compact.rules import Consumer, rule_for
from pdecay.deployment.compact.trace import Trace
from pdecay.deployment.compact.units import Labels, Units

UNREAD, ZERO, CONSTANT = "unread", "zero", "constant"  # reasons of removals
LAST = "a layer needs at least one unit"
MULTIPLE = "the operation that reads it needs a multiple of {} units"


@dataclass(eq=False)
class Removal:
    """The units to remove.

    Args:
        units: the units of the trace.
        dead: the units to remove, each with the reason why it is dead.
        kept: the dead units to keep, each with the reason.
        bias_shifts: by the name of a weight, the vector to add to its layer's bias.
    """

    units: Units
    dead: dict[int, str] = field(default_factory=dict)
    kept: dict[int, str] = field(default_factory=dict)
    bias_shifts: dict[str, Tensor] = field(default_factory=dict)
    _removes: dict[int, bool] = field(default_factory=dict)  # caches
    _positions: dict[bytes, Tensor] = field(default_factory=dict)

    def removes(self, label: int) -> bool:
        """Return whether positions of this label are removed."""
        if label not in self._removes:
            self._removes[label] = any(unit in self.dead for unit in self.units.of(label))
        return self._removes[label]

    def keep(self, unit: int, reason: str) -> None:
        """Keep a unit although it is dead."""
        del self.dead[unit]
        self.kept[unit] = reason
        self._removes.clear()
        self._positions.clear()

    def positions(self, labels: Labels) -> Tensor:
        """Return the positions of an axis that are kept."""
        key = labels.tobytes()
        if key not in self._positions:
            kept = [i for i, label in enumerate(labels.tolist()) if not self.removes(label)]
            self._positions[key] = torch.tensor(kept, dtype=torch.long)
        return self._positions[key]

    def size(self, labels: Labels) -> int:
        """Return the size of an axis after the removal."""
        return len(self.positions(labels))


class Biases(Enum):
    """The biases that constants may be folded into."""

    NONE = "folding constants into biases is off"
    EXISTING = "has no bias, and the optimizer would not train a new one"
    ANY = "a layer without a bias gets one"


def choose_removal(analysis: Analysis, model: nn.Module, biases: Biases) -> Removal:
    """Choose every unit that is dead for all of its consumers.

    Args:
        analysis: the analysis of a trace.
        model: the traced model. Its layers tell whether they have a bias.
        biases: the biases that constants may be folded into.
    """
    units, consumers = analysis.units, analysis.consumers
    removal = Removal(units)
    uses = Counter(consumer.weight for consumer in consumers)
    alive: set[int] = set()
    dead: dict[int, str] = {}
    for consumer in consumers:
        refusal = consumer.no_fold or _fold_refusal(model, consumer.weight, uses, biases)
        columns = (
            consumer.labels,
            consumer.nonzero,
            consumer.used,
            consumer.varies,
            consumer.constants.isnan(),
        )
        rows = zip(*(column.tolist() for column in columns), strict=False)
        for label, nonzero, used, varies, uneven in rows:
            of = units.of(label)
            if not used:
                for unit in of:
                    dead.setdefault(unit, UNREAD if nonzero else ZERO)
            elif varies:
                alive.update(of)
            elif refusal is None and not uneven:
                dead.update(dict.fromkeys(of, CONSTANT))
            else:
                reason = f"they are {CONSTANT}, but {refusal or 'not the same at all positions'}"
                removal.kept.update(dict.fromkeys(of, reason))
    keep = alive | removal.kept.keys()
    removal.dead = {unit: reason for unit, reason in dead.items() if unit not in keep}
    removal.kept = {unit: reason for unit, reason in removal.kept.items() if unit not in alive}
    _keep_one_per_axis(removal, analysis.trace)
    _keep_multiples(removal, analysis.trace)
    for consumer in consumers:
        _fold(removal, consumer)
    return removal


def _keep_one_per_axis(removal: Removal, trace: Trace) -> None:
    """Keep the first unit of every axis that would become empty."""
    axes = {labels.tobytes(): labels for value in trace.values for labels in value.labels}
    changed = True
    while changed:
        changed = False
        for labels in axes.values():
            if len(labels) > 1 and removal.size(labels) == 0:
                for unit in removal.units.of_all(labels[:1]) & removal.dead.keys():
                    removal.keep(unit, LAST)
                    changed = True


def _keep_multiples(removal: Removal, trace: Trace) -> None:
    """Keep enough dead units to satisfy operations that need multiples of a size."""
    axes = [one for call in trace.calls for one in rule_for(call).multiples(call)]
    axes = [(labels, step) for labels, step in axes if len(labels) % step == 0]
    while odd := [(labels, step) for labels, step in axes if removal.size(labels) % step]:
        labels, step = odd[0]
        dead = removal.units.of_all(labels) & removal.dead.keys()
        removal.keep(max(dead), MULTIPLE.format(step))


def _fold(removal: Removal, consumer: Consumer) -> None:
    """Compute the shift of a consumer's bias that replaces its removed constant units."""
    rows = enumerate(zip(consumer.labels.tolist(), consumer.used.tolist(), strict=True))
    folded = [i for i, (label, used) in rows if used and removal.removes(label)]
    if folded and consumer.weight is not None:
        constants = consumer.constants[folded].double()
        removal.bias_shifts[consumer.weight] = constants @ consumer.coefficients[folded].double()


def _fold_refusal(
    model: nn.Module, weight: str | None, uses: Counter[str | None], biases: Biases
) -> str | None:
    """Return why constants cannot be folded into a layer's bias, or None if they can."""
    if biases is Biases.NONE:
        return str(biases.value)
    if weight is None:
        return "its consumer is not a layer with a bias that compact knows"
    if uses[weight] > 1:
        return f"{weight} is used more than once"
    owner, _, name = weight.rpartition(".")
    layer = model.get_submodule(owner)
    if name != "weight" or not _adds_bias(layer):
        return f"{owner or weight} is not a layer with a bias that compact knows"
    bias = layer._parameters["bias"]
    if bias is None:
        return f"{owner or weight} {biases.value}" if biases is Biases.EXISTING else None
    every = (param for module in model.modules() for param in module._parameters.values())
    shared = sum(param is bias for param in every) > 1
    return f"{owner or weight} shares its bias with another layer" if shared else None


def _adds_bias(layer: nn.Module) -> bool:
    """Return whether a layer adds its bias to its sums, or would if it had a bias."""
    if "bias" not in layer._parameters:
        return False  # computed from others, as torch's prune and parametrize do
    known = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if isinstance(layer, known):
        # A subclass with its own forward may use the bias in another way.
        return type(layer).forward in [kind.forward for kind in known]
    return has_transposed_weight(layer)
