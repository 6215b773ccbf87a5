"""Rules for operations that move elements without computing: reshape, permute, slice, cat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdecay.deployment.compact.rules.base import (
    Rule,
    fill_all,
    fixed_axes,
    size_mismatch,
    uneven_along,
)
from pdecay.deployment.compact.trace import Call, Value
from pdecay.deployment.compact.units import Labels, Units, fixed

_CROPS = {"slice", "select"}
_TRANSPOSITIONS = {"t", "transpose", "permute"}


class _Rearrangement(Rule):
    """An operation whose output elements are elements of its inputs.

    The operation itself maps masks from inputs to outputs, and its gradient maps them back.
    """

    def mark_varying(self, call: Call) -> None:
        moved = self._run(call, lambda value: value.varies)
        for out, varies in zip(call.outs, moved, strict=True):
            out.varies = varies

    def mark_live(self, call: Call) -> None:
        with torch.enable_grad():
            probes = {
                value: torch.zeros_like(value.tensor, dtype=torch.float32, requires_grad=True)
                for value in call.ins
            }
            moved = self._run(call, probes.__getitem__)
        live = [out.live.float() for out in call.outs]
        masks = torch.autograd.grad(moved, list(probes.values()), live, materialize_grads=True)
        for value, mask in zip(probes, masks, strict=True):
            value.mark_live(mask > 0)

    def _run(self, call: Call, replace: Callable[[Value], Tensor]) -> list[Tensor]:
        if call.name in ("view", "_unsafe_view"):  # the replacement may have other strides
            return [replace(call.args[0]).reshape(call.args[1])]
        result: Any = call.run(replace)
        return [result] if isinstance(result, Tensor) else list(result)


class Move(_Rearrangement):
    """An operation that rearranges the elements of one tensor.

    How the output's axes come from the input's axes is found by running the operation on
    coordinates: for each input axis, a tensor that holds the position along this axis.
    """

    def label(self, call: Call, units: Units) -> None:
        (value,) = call.ins
        coordinates = [
            self._run(call, partial(_coordinates, axis=axis)) if labels.any() else None
            for axis, labels in enumerate(value.labels)
        ]
        for i, out in enumerate(call.outs):
            parts: list[list[tuple[int, Labels]]] = [[] for _ in out.tensor.shape]
            for labels, moved in zip(value.labels, coordinates, strict=True):
                if moved is not None:
                    for axis, stride, own in _targets(labels, moved[i], units, call):
                        parts[axis].append((stride, own))
            out.labels = [
                units.join([own for _, own in sorted(part, key=lambda p: -p[0])])
                if part
                else _unlabelled(call, value, out, axis, units)
                for axis, part in enumerate(parts)
            ]
            is_whole = call.name == "slice" and out.tensor.shape == value.tensor.shape
            if call.name in _TRANSPOSITIONS or is_whole:
                out.weight = value.weight

    def mark_varying(self, call: Call) -> None:
        super().mark_varying(call)
        (value,), (out, *_) = call.ins, call.outs
        if call.name == "slice" and value.static and out.tensor.shape != value.tensor.shape:
            # The number of rows, such as those of a position table, may depend on the input.
            fill_all(call.outs, True)
        elif call.name == "select" and value.static:
            # So may the row itself, for example the one of a task or of the last position.
            axis = call.args[1] % value.tensor.ndim
            first = value.tensor.narrow(axis, 0, 1)
            out.varies = out.varies | (value.tensor != first).any(axis)


class Join(_Rearrangement):
    """Several tensors next to each other along one axis: ``cat`` and ``stack``."""

    def label(self, call: Call, units: Units) -> None:
        (out,) = call.outs
        # cat skips empty 1-d tensors.
        values = [value for value in call.args[0] if tuple(value.tensor.shape) != (0,)]
        axis = self._axis(call)
        out.labels = fixed_axes(out)
        others = [i for i in range(out.tensor.ndim) if i != axis]
        if call.name == "cat":
            out.labels[axis] = np.concatenate([value.labels[axis] for value in values])
            sources = [[value.labels[i] for i in others] for value in values]
        else:
            sources = [value.labels for value in values]
        for source in sources:
            for i, own, first in zip(others, source, sources[0], strict=True):
                units.tie(first, own, size_mismatch(call))
                out.labels[i] = own

    def mark_varying(self, call: Call) -> None:
        super().mark_varying(call)
        (out,) = call.outs
        if any(value.sized for value in call.ins):
            out.varies = uneven_along(out, [self._axis(call)])

    def _axis(self, call: Call) -> int:
        axis: int = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
        return axis % call.outs[0].tensor.ndim


class Overwrite(_Rearrangement):
    """A tensor with some positions of one axis replaced: ``slice_scatter``, ``select_scatter``."""

    def label(self, call: Call, units: Units) -> None:
        (base, part), (out,) = call.ins, call.outs
        axis = self._axis(call)
        reason = f"{call} overwrites some of them by index"
        units.keep(base.labels[axis].tolist(), reason)
        labels = list(part.labels)
        if call.name == "select_scatter":
            labels.insert(axis, base.labels[axis])
        else:
            units.keep(labels[axis].tolist(), reason)
        for i, (own, other) in enumerate(zip(base.labels, labels, strict=True)):
            if i != axis:
                units.tie(own, other, size_mismatch(call))
        out.labels = base.labels

    def mark_varying(self, call: Call) -> None:
        super().mark_varying(call)
        (out,) = call.outs
        if not out.static:
            out.varies = uneven_along(out, [self._axis(call)])

    def _axis(self, call: Call) -> int:
        axis: int = call.args[2] if len(call.args) > 2 else 0
        return axis % call.outs[0].tensor.ndim


def mark_cropped(value: Value, readers: list[Call]) -> None:
    """Mark the elements that every reader crops away, where others along the axis are live.

    The crop may depend on the size of the inputs or on an argument: ``forecast[:, :horizon]``.
    """
    if not readers or any(call.name not in _CROPS for call in readers):
        return
    with torch.enable_grad():
        probe = torch.zeros_like(value.tensor, dtype=torch.float32, requires_grad=True)
        (read,) = torch.autograd.grad([call.run(lambda _: probe).sum() for call in readers], probe)
    lines = value.live
    for call in readers:
        lines = lines.any(call.args[1] if len(call.args) > 1 else 0, keepdim=True)
    value.mark_live((read == 0) & lines)


def unread_pieces(call: Call, readers: Mapping[int, object]) -> list[Value]:
    """Return the pieces of a split that no operation reads, if the sizes differ.

    Sizes such as ``[length, rest]`` may depend on the inputs or on an argument, and other elements
    are then in the pieces that are read.
    """
    if not call.name.endswith("split_with_sizes") or len(set(call.args[1])) == 1:
        return []
    return [out for out in call.outs if id(out) not in readers]


def mark_unread(call: Call, unread: list[Value]) -> None:
    """Mark pieces of a split that are not read where others along the axis are live."""
    axis = call.args[2] if len(call.args) > 2 else 0
    live = torch.cat([out.live for out in call.outs], axis).any(axis, keepdim=True)
    for out in unread:
        out.mark_live(live.expand_as(out.live))


def _unlabelled(call: Call, value: Value, out: Value, axis: int, units: Units) -> Labels:
    """Return the labels of an output axis that has no units from the input.

    An expanded axis repeats one position. It gets new units, since the code may expand to a
    smaller size.
    """
    n = out.tensor.shape[axis]
    source = axis - (out.tensor.ndim - value.tensor.ndim)
    if call.name == "expand" and (source < 0 or value.tensor.shape[source] == 1):
        return units.new(n)
    return fixed(n)


def _coordinates(value: Value, axis: int) -> Tensor:
    """Return a tensor of the value's shape that holds the position along an axis."""
    line = torch.arange(value.tensor.shape[axis])
    return _along(line, axis, value.tensor.ndim).expand(value.tensor.shape)


def _along(line: Tensor, axis: int, rank: int) -> Tensor:
    return line.view([-1 if i == axis else 1 for i in range(rank)])


def _targets(
    labels: Labels, moved: Tensor, units: Units, call: Call
) -> list[tuple[int, int, Labels]]:
    """Find the output axes that an input axis was moved to.

    Args:
        labels: the labels of the input axis.
        moved: for each output element, its position along the input axis.
        units: the units.
        call: the operation, for reasons.

    Returns:
        For each output axis: its number, the stride of the input axis within it (for the order of
        several input axes), and its labels.
    """
    if not moved.numel():
        return []
    origin = int(moved[(0,) * moved.ndim])
    lines = {}  # for each output axis that matters, the offset along it
    total = torch.full((1,) * moved.ndim, origin)
    for axis in range(moved.ndim):
        line = moved
        for other in reversed([i for i in range(moved.ndim) if i != axis]):
            line = line.select(other, 0)
        line = line - origin
        if line.any():
            lines[axis] = line
            total = total + _along(line, axis, moved.ndim)
    if not (moved == total).all():  # the position is not a sum over output axes
        units.keep(labels.tolist(), f"{call} mixes the order of the axis")
        return []
    if not lines:
        units.keep(labels.tolist(), f"{call} takes one position by its index")
        return []
    if len(lines) == 1:
        ((axis, line),) = lines.items()
        stride = int((line != line[0]).int().argmax())
        return [(axis, stride, labels[(line + origin).numpy()])]
    # The axis is split over several output axes, whose offsets must be strides of a full grid.
    ordered = sorted(lines, key=lambda axis: -int(lines[axis][1]))
    sizes = [len(lines[axis]) for axis in ordered]
    grid = torch.arange(len(labels)).view(sizes) if np.prod(sizes) == len(labels) else None
    full = grid is not None and all(
        torch.equal(lines[axis], torch.arange(n) * stride)
        for axis, n, stride in zip(ordered, sizes, grid.stride(), strict=True)
    )
    if not full or origin:
        units.keep(labels.tolist(), f"{call} splits the axis in overlapping or partial pieces")
        return []
    parts = units.split(labels, sizes, f"{call} splits the axis in a second way")
    return [(axis, 1, part) for axis, part in zip(ordered, parts, strict=True)]
