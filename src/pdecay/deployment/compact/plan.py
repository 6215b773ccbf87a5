"""Which units go, by what the sums over them say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from pdecay.deployment.compact.analysis import Analysis
from pdecay.deployment.compact.rules import Reads, rule_for
from pdecay.deployment.compact.trace import Trace
from pdecay.deployment.compact.units import Places, Units

UNREAD, ZERO, CONSTANT = "nothing reads it", "it is zero", "it is constant"
LAST = "a layer needs one unit"
STEP = "the operation that reads it takes multiples of {} only"


@dataclass(eq=False)
class Plan:
    """What to remove.

    Args:
        units: the trace's.
        gone: the units to remove, and for each what makes it dead.
        shifts: for each weight by name what its layer's bias has to take over.
        needed: the units that are dead and stay, and why.
    """

    units: Units
    gone: dict[int, str] = field(default_factory=dict)
    shifts: dict[str, Tensor] = field(default_factory=dict)
    needed: dict[int, str] = field(default_factory=dict)
    _goes: dict[int, bool] = field(default_factory=dict)  # answers given already
    _kept: dict[bytes, Tensor] = field(default_factory=dict)

    def goes(self, place: int) -> bool:
        """Whether a place goes, as one of its units does."""
        known = self._goes.get(place)
        if known is None:
            known = any(unit in self.gone for unit in self.units.of(place))
            self._goes[place] = known
        return known

    def keep(self, unit: int, why: str) -> None:
        """Let a unit that was to go stay."""
        del self.gone[unit]
        self.needed[unit] = why
        self._goes.clear()
        self._kept.clear()

    def kept(self, places: Places) -> Tensor:
        """The positions of an axis that stay."""
        known = self._kept.get(places.tobytes())
        if known is None:
            stays = [i for i, place in enumerate(places.tolist()) if not self.goes(place)]
            known = torch.tensor(stays, dtype=torch.long)
            self._kept[places.tobytes()] = known
        return known

    def size(self, places: Places) -> int:
        return len(self.kept(places))


class Biases(Enum):
    """Which biases may take constants over."""

    NONE = "constants are not to be moved into biases"
    OWN = "has no bias, and the optimizer would not know a new one"
    NEW = "those of layers that have none yet, too"


def plan(found: Analysis, model: nn.Module, biases: Biases) -> Plan:
    """Every unit that may go, but one of an axis of which none would be left.

    Args:
        found: the analysis.
        model: the model that was traced; its layers say whether they have a bias.
        biases: which of them constants may move into.
    """
    units, reads = found.units, found.reads
    made = Plan(units)
    uses = Counter(one.weight for one in reads)
    read: set[int] = set()
    dead: dict[int, str] = {}
    for one in reads:
        refusal = one.why_not or _no_bias(model, one.weight, uses, biases)
        uneven = one.constants.isnan().tolist()
        rows = zip(
            one.places.tolist(),
            one.emits.tolist(),
            one.counts.tolist(),
            one.varies.tolist(),
            uneven,
            strict=False,
        )
        for place, emits, counts, varies, differs in rows:
            of = units.of(place)
            if not counts:
                for unit in of:
                    dead.setdefault(unit, UNREAD if emits else ZERO)
            elif varies:
                read.update(of)
            elif refusal is None and not differs:
                dead.update(dict.fromkeys(of, CONSTANT))
            else:
                why = f"{CONSTANT}, but {refusal or 'not the same everywhere'}"
                made.needed.update(dict.fromkeys(of, why))
    stay = read | made.needed.keys()
    made.gone = {unit: why for unit, why in dead.items() if unit not in stay}
    made.needed = {unit: why for unit, why in made.needed.items() if unit not in read}
    _keep_one(made, found.trace)
    _keep_steps(made, found.trace)
    for one in reads:
        _shift(made, one)
    return made


def _keep_one(made: Plan, trace: Trace) -> None:
    """A layer without units is no layer: the first stays where all would go."""
    axes = {places.tobytes(): places for value in trace.values for places in value.places}
    pending = True
    while pending:
        pending = False
        for places in axes.values():
            if len(places) > 1 and made.size(places) == 0:
                for unit in units_of(made.units, places[:1]) & made.gone.keys():
                    made.keep(unit, LAST)
                    pending = True


def _keep_steps(made: Plan, trace: Trace) -> None:
    """As many of the dead stay as make a size that an operation takes."""
    steps = [one for call in trace.calls for one in rule_for(call).steps(call)]
    steps = [(places, step) for places, step in steps if len(places) % step == 0]
    while odd := [(places, step) for places, step in steps if made.size(places) % step]:
        places, step = odd[0]
        dead = units_of(made.units, places.tolist()) & made.gone.keys()
        made.keep(max(dead), STEP.format(step))


def _shift(made: Plan, one: Reads) -> None:
    rows = enumerate(zip(one.places.tolist(), one.counts.tolist(), strict=True))
    moved = [i for i, (place, counts) in rows if counts and made.goes(place)]
    if moved and one.weight is not None:
        constants = one.constants[moved].double()
        made.shifts[one.weight] = constants @ one.shift[moved].double()


def _no_bias(
    model: nn.Module, weight: str | None, uses: Counter[str | None], biases: Biases
) -> str | None:
    """Why a layer's bias cannot take a constant over; None where it can."""
    if biases is Biases.NONE:
        return str(biases.value)
    if weight is None:
        return "what reads it is no layer with a bias that compact knows"
    if uses[weight] > 1:
        return f"{weight} is used more than once"
    owner, _, name = weight.rpartition(".")
    layer = model.get_submodule(owner)
    if name != "weight" or not _adds_bias(layer):
        return f"{owner or weight} is no layer with a bias that compact knows"
    bias = layer._parameters["bias"]
    if bias is None:
        return f"{owner or weight} {biases.value}" if biases is Biases.OWN else None
    every = (param for module in model.modules() for param in module._parameters.values())
    shared = sum(param is bias for param in every) > 1
    return f"{owner or weight} shares its bias with another layer" if shared else None


def _adds_bias(layer: nn.Module) -> bool:
    """Whether a layer adds a bias to its sums, or would if it had one."""
    if "bias" not in layer._parameters:
        return False  # it is computed, as torch's prune and parametrize do
    known = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if isinstance(layer, known):
        # A subclass may do as it likes in a forward of its own.
        return type(layer).forward in [kind.forward for kind in known]
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def units_of(units: Units, places: Iterable[int]) -> set[int]:
    return {unit for place in places for unit in units.of(int(place))}
