"""What compact did: which units went, which dead ones stayed, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from pdecay._utils.tables import aligned


@dataclass(frozen=True)
class SmallerTensor:
    """A parameter or buffer that lost positions."""

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class Left:
    """Dead units of a layer that stayed.

    Args:
        layer: the name of the weight that makes them.
        units: their numbers, as the model had them before.
        why: what keeps them.
    """

    layer: str
    units: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class CompactReport:
    """What was removed, and what stayed and why. ``str()`` is a table, :meth:`to_dict` plain data.

    Args:
        removed: how many units went, by what made them dead. A unit is whatever goes at once: a
            neuron, a channel with all that reads and writes it, an attention head.
        tensors: the parameters and buffers that are smaller now.
        left: dead units that stayed.
        unknown: operations that compact has no rule for, with the module that runs them. What
            they touch stays.
        parameters: how many there were, and are.
        difference: the largest difference of outputs, relative to the largest output.
    """

    removed: dict[str, int]
    tensors: tuple[SmallerTensor, ...]
    left: tuple[Left, ...]
    unknown: tuple[str, ...]
    parameters: tuple[int, int]
    difference: float

    @classmethod
    def of(cls, model: nn.Module) -> CompactReport:
        """Return the report of a model that `compact` returned."""
        report = getattr(model, "compact_report", None)
        if not isinstance(report, CompactReport):
            raise ValueError(f"this {type(model).__name__} has no report: compact did not make it")
        return report

    @property
    def units(self) -> int:
        """How many units were removed in all."""
        return sum(self.removed.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        plain = asdict(self)
        for one in (*plain["tensors"], *plain["left"]):
            for key, value in one.items():
                one[key] = list(value) if isinstance(value, tuple) else value
        listed = {key: list(plain[key]) for key in ("tensors", "left", "unknown", "parameters")}
        return {**plain, **listed}

    def __str__(self) -> str:
        before, after = self.parameters
        share = f" ({1 - after / before:.1%} fewer)" if after < before else ""
        lines = [f"{before:,} parameters -> {after:,}{share}"]
        parts = [f"{count:,} because {why}" for why, count in sorted(self.removed.items())]
        lines.append(f"removed {_units(self.units)}" + (": " + ", ".join(parts) if parts else ""))
        weights = [one for one in self.tensors if len(one.before) > 1]
        if weights:
            rows: list[tuple[str, ...]] = [("weight", "before", "after")]
            rows += [(one.name, _size(one.before), _size(one.after)) for one in weights]
            table = aligned(rows)
            lines += ["", table[0], "-" * max(map(len, table)), *table[1:]]
        if self.left:
            lines += ["", "dead, but left:"]
            lines += [f"  {one.layer}: {_units(len(one.units))}: {one.why}" for one in self.left]
        if self.unknown:
            lines += ["", "operations without a rule, around which nothing was removed:"]
            lines += [f"  {one}" for one in self.unknown]
        return "\n".join(lines)


def _units(count: int) -> str:
    return "1 unit" if count == 1 else f"{count:,} units"


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
