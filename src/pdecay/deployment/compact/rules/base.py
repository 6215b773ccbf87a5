"""The interface of a rule, the helpers that rules share, and the rule for unknown operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdecay.deployment.compact.trace import Call, Value
from pdecay.deployment.compact.units import Labels, Units, fixed


@dataclass(eq=False)
class Consumer:
    """A sum over an axis. Each position of the axis is one term, or one for each output.

    Args:
        labels: the labels of the positions.
        nonzero: the positions that are not zero for every input.
        used: the positions with a term that is not always zero, in an output that is live.
        varies: the positions with such a term that varies with the model's inputs.
        constants: the constant value of a position; NaN where there is not a single one.
        weight: the name of the weight in the sum, if it belongs to the running layer.
        coefficients: the factor of each position in each output, which folding multiplies by the
            constant.
        no_fold: the reason why constants cannot be folded; None if they can.
    """

    labels: Labels
    nonzero: Tensor
    used: Tensor
    varies: Tensor
    constants: Tensor
    weight: str | None
    coefficients: Tensor
    no_fold: str | None


class Rule(ABC):
    """The analysis of one kind of operation."""

    @abstractmethod
    def label(self, call: Call, units: Units) -> None:
        """Label the outputs, and tie or keep the units that the operation requires."""

    @abstractmethod
    def mark_varying(self, call: Call) -> None:
        """Set the outputs' masks of varying elements."""

    @abstractmethod
    def mark_live(self, call: Call) -> None:
        """Mark the elements of the inputs that live elements of the outputs depend on."""

    def consumer(self, call: Call) -> Consumer | None:
        """Return the sum over an axis whose units can be removed, if there is one."""
        return None

    def producer(self, call: Call) -> tuple[str, int] | None:
        """Return the name of the weight that makes new units, and their axis of the output."""
        return None

    def counted(self, call: Call, units: Units) -> dict[str, Labels]:
        """Return the attributes of the running module that count positions, and their labels."""
        return {}

    def multiples(self, call: Call) -> list[tuple[Labels, int]]:
        """Return the axes whose sizes must be multiples of a number, and the number."""
        return []


class Opaque(Rule):
    """An unknown operation: every output element may depend on every input element."""

    why = "is an operation that compact does not know"

    def label(self, call: Call, units: Units) -> None:
        reason = f"{call} {self.why}"
        keep_all(call.ins, units, reason)
        if call.in_place:
            keep_all(call.outs, units, reason)
        else:
            for out in call.outs:
                out.labels = fixed_axes(out)

    def mark_varying(self, call: Call) -> None:
        random = torch.Tag.nondeterministic_seeded in call.op.tags
        # The results of constants may follow their number, as those of a recurrent layer do.
        follows_size = not call.ins or not all(value.static for value in call.ins)
        reads_varying = any(bool(value.varies.any()) for value in call.ins)
        fill_all(call.outs, random or follows_size or reads_varying or call.in_place)

    def mark_live(self, call: Call) -> None:
        # The code may use a number anywhere: the result of an operation without tensor outputs, or
        # the size of an output that depends on values, such as those of nonzero and unique.
        is_number = not call.outs or torch.Tag.dynamic_output_shape in call.op.tags
        live = call.in_place or is_number or any(bool(out.live.any()) for out in call.outs)
        for value in call.ins:
            value.mark_live(live)


class Empty(Opaque):
    """An operation on no elements, such as an expert that the example routes no token to.

    Other inputs have elements there, of which the example says nothing.
    """

    why = "has no elements on the example"

    def mark_varying(self, call: Call) -> None:
        fill_all(call.outs, True)

    def mark_live(self, call: Call) -> None:
        for value in call.ins:
            value.mark_live(True)


class Factory(Opaque):
    """An operation that makes a tensor without reading one, such as ``torch.zeros``.

    A tensor filled with one number is constant. Its size may come from a tensor whose size changes,
    so that its axes get units; whether the code makes it smaller is checked later. Any other
    tensor, such as ``torch.arange``, may depend on the shape of the inputs.
    """

    def label(self, call: Call, units: Units) -> None:
        resizable = is_uniform(call) or call.uninitialized
        for out in call.outs:
            out.labels = [units.new(n) if resizable else fixed(n) for n in out.tensor.shape]

    def mark_varying(self, call: Call) -> None:
        fill_all(call.outs, not is_uniform(call))

    def mark_live(self, call: Call) -> None:
        pass


def is_uniform(call: Call) -> bool:
    """Return whether an operation makes a tensor filled with one number, like ``zeros_like``."""
    name = call.name.removeprefix("new_").removesuffix("_like")
    return name in ("zeros", "ones", "full", "scalar_tensor")


def size_mismatch(call: Call) -> str:
    """Return the reason for which tied units are kept: the other tensor's size is fixed."""
    return f"{call} meets a fixed size"


def split_groups(labels: Labels, groups: int, units: Units, call: Call) -> tuple[Labels, Labels]:
    """Split the labels of a channel axis into those of the groups and those within a group."""
    sizes = (groups, len(labels) // groups)
    outer, inner = units.split(labels, sizes, f"{call} groups the channels in a second way")
    return outer, inner


def keep_all(values: Iterable[Value], units: Units, reason: str) -> None:
    """Keep the units of all axes."""
    for value in values:
        for labels in value.labels:
            units.keep(labels.tolist(), reason)


def fixed_axes(value: Value) -> list[Labels]:
    """Return labels of no units for all axes."""
    return [fixed(n) for n in value.tensor.shape]


def fill_all(values: Iterable[Value], varies: bool) -> None:
    """Mark all elements as varying, or as constant."""
    for value in values:
        value.varies = torch.full_like(value.tensor, varies, dtype=torch.bool)


def uneven_along(value: Value, axes: Iterable[int]) -> Tensor:
    """Mark the positions along these axes, except where all of them have the same constant.

    Code that fills a tensor up to a size, with zeros for instance, fills other positions for
    inputs of other sizes.
    """
    first, mask = value.tensor, value.varies
    for axis in axes:
        first = first.narrow(axis, 0, 1)
    mask = mask | (value.tensor != first)
    for axis in axes:
        mask = mask.any(axis, keepdim=True)
    return mask.expand(value.tensor.shape)


def reduce_mask(mask: Tensor, shape: torch.Size) -> Tensor:
    """Reduce a mask to the shape that was broadcast: True where any copy is True."""
    extra = mask.ndim - len(shape)
    axes = [*range(extra)]
    axes += [i + extra for i, n in enumerate(shape) if n == 1 and mask.shape[i + extra] != 1]
    if axes:
        mask = mask.amax(axes, keepdim=True)
    return mask.reshape(shape)
