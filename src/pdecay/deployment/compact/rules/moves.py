"""Operations that move elements and compute nothing: reshapes, permutations, slices, joins."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdecay.deployment.compact.rules.base import Plain, where
from pdecay.deployment.compact.trace import Call, Value
from pdecay.deployment.compact.units import Places, Units, fixed

_REORDERS = {"t", "transpose", "permute"}


class Move(Plain):
    """One tensor's elements, elsewhere.

    How the axes of the outputs come from those of the input is seen by moving coordinates: for
    each axis a tensor that holds the position along it, sent through the operation itself.
    """

    def tie(self, call: Call, units: Units) -> None:
        (value,) = call.ins
        coordinates = [
            self._moved(call, _coordinate(value, axis)) if places.any() else None
            for axis, places in enumerate(value.places)
        ]
        for i, out in enumerate(call.outs):
            parts: list[list[tuple[int, Places]]] = [[] for _ in out.tensor.shape]
            for places, moved in zip(value.places, coordinates, strict=True):
                if moved is not None:
                    for axis, outer, own in _sources(places, moved[i], units, where(call)):
                        parts[axis].append((outer, own))
            out.places = [
                units.join([own for _, own in sorted(part, key=lambda p: -p[0])])
                if part
                else _copies(call, value, out, axis, units)
                for axis, part in enumerate(parts)
            ]
            if call.name in _REORDERS:
                out.weight = value.weight

    def vary(self, call: Call) -> None:
        (value,) = call.ins
        for out, moved in zip(call.outs, self._moved(call, value.varies), strict=True):
            out.varies = moved
            if call.name == "slice" and value.name and out.tensor.shape != value.tensor.shape:
                # The first rows of a table, as many as the input is long: not the same for all.
                out.varies = torch.ones_like(moved)

    def back(self, call: Call) -> None:
        (value,) = call.ins
        with torch.enable_grad():
            probe = torch.zeros_like(value.tensor, dtype=torch.float32, requires_grad=True)
            moved = self._moved(call, probe)
        for out, there in zip(call.outs, moved, strict=True):
            if out.live.any():
                (back,) = torch.autograd.grad(there, probe, out.live.float(), retain_graph=True)
                value.live = value.live | (back > 0)

    def _moved(self, call: Call, tensor: Tensor) -> list[Tensor]:
        if call.name in ("view", "_unsafe_view"):
            return [tensor.reshape(call.args[1])]
        return _listed(call.run(lambda value: tensor))


class Join(Plain):
    """Several tensors beside each other along one axis: ``cat``, or a new one: ``stack``."""

    def tie(self, call: Call, units: Units) -> None:
        (out,) = call.outs
        values = _joined(call)
        axis = _axis(call, out)
        places: list[Places] = [fixed(n) for n in out.tensor.shape]
        others = [i for i in range(out.tensor.ndim) if i != axis]
        if call.name == "cat":
            places[axis] = np.concatenate([value.places[axis] for value in values])
            sources = [[value.places[i] for i in others] for value in values]
        else:
            sources = [value.places for value in values]
        for source in sources:
            for i, own in zip(others, source, strict=True):
                units.tie(sources[0][others.index(i)], own, f"{where(call)} meets a fixed size")
                places[i] = own
        out.places = places

    def vary(self, call: Call) -> None:
        (out,) = call.outs
        out.varies = call.run(lambda value: value.varies)

    def back(self, call: Call) -> None:
        (out,) = call.outs
        values = _joined(call)
        axis = _axis(call, out)
        if call.name == "stack":
            parts = out.live.unbind(axis)
        else:
            parts = out.live.split([value.tensor.shape[axis] for value in values], axis)
        for value, part in zip(values, parts, strict=True):
            value.live = value.live | part


class Overwrite(Plain):
    """A tensor with a part of another in its place along one axis, which keeps its positions."""

    def tie(self, call: Call, units: Units) -> None:
        (base, part), (out,) = call.ins, call.outs
        axis = (call.args[2] if len(call.args) > 2 else 0) % base.tensor.ndim
        why = f"{where(call)} overwrites some of them by number"
        units.fix(base.places[axis].tolist(), why)
        theirs = list(part.places)
        if call.name == "select_scatter":
            theirs.insert(axis, base.places[axis])
        else:
            units.fix(theirs[axis].tolist(), why)
        for i, (own, other) in enumerate(zip(base.places, theirs, strict=True)):
            if i != axis:
                units.tie(own, other, f"{where(call)} meets a fixed size")
        out.places = base.places

    def vary(self, call: Call) -> None:
        (out,) = call.outs
        out.varies = call.run(lambda value: value.varies)

    def back(self, call: Call) -> None:
        (out,) = call.outs
        with torch.enable_grad():
            probes = {
                id(value): torch.zeros_like(value.tensor, dtype=torch.float32, requires_grad=True)
                for value in call.ins
            }
            written = call.run(lambda value: probes[id(value)])
        masks = torch.autograd.grad(written, list(probes.values()), out.live.float())
        for value, mask in zip(call.ins, masks, strict=True):
            value.live = value.live | (mask > 0)


def _copies(call: Call, value: Value, out: Value, axis: int, units: Units) -> Places:
    """The places of an axis that no unit went to.

    An axis that repeats one position may do so less often, if the code asks for less.
    """
    n = out.tensor.shape[axis]
    own = axis - (out.tensor.ndim - value.tensor.ndim)
    if call.name == "expand" and (own < 0 or value.tensor.shape[own] == 1):
        return units.fresh(n)
    return fixed(n)


def _joined(call: Call) -> list[Value]:
    """Without the empty 1-d tensors that ``cat`` passes over."""
    return [value for value in call.args[0] if tuple(value.tensor.shape) != (0,)]


def _axis(call: Call, out: Value) -> int:
    axis: int = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    return axis % out.tensor.ndim


def _coordinate(value: Value, axis: int) -> Tensor:
    shape = [1] * value.tensor.ndim
    shape[axis] = -1
    return torch.arange(value.tensor.shape[axis]).view(shape).expand(value.tensor.shape)


def _sources(
    places: Places, moved: Tensor, units: Units, where_: str
) -> list[tuple[int, int, Places]]:
    """For each axis of the output that an axis of the input went to: it, a rank and its places.

    The larger the rank, the further out the input's axis is within the output's.
    """
    if not moved.numel():
        return []
    origin = int(moved[(0,) * moved.ndim])
    lines = {}
    for axis in range(moved.ndim):
        line = moved
        for other in reversed([i for i in range(moved.ndim) if i != axis]):
            line = line.select(other, 0)
        line = line - origin
        if line.any():
            lines[axis] = line
    if not _is_sum(moved, origin, lines):
        units.fix(places.tolist(), f"{where_} mixes the order of the axis")
        return []
    if not lines:
        units.fix(places.tolist(), f"{where_} takes one position by its number")
        return []
    if len(lines) == 1:
        ((axis, line),) = lines.items()
        rank = int((line != line[0]).int().argmax())  # the first position with another value
        return [(axis, rank, places[(line + origin).numpy()])]
    # Split over several axes of the output: as mixed digits, or not at all.
    ordered = sorted(lines, key=lambda axis: -int(lines[axis][1]))
    sizes = [len(lines[axis]) for axis in ordered]
    digits = torch.arange(len(places)).view(sizes) if np.prod(sizes) == len(places) else None
    whole = digits is not None and all(
        torch.equal(lines[axis], digits.select(0, 0).new_tensor(range(n)) * stride)
        for axis, n, stride in zip(ordered, sizes, digits.stride(), strict=True)
    )
    if not whole or origin:
        units.fix(places.tolist(), f"{where_} splits the axis in overlapping or partial pieces")
        return []
    parts = units.split(places, sizes, f"{where_} splits the axis in a second way")
    return [(axis, 1, part) for axis, part in zip(ordered, parts, strict=True)]


def _is_sum(moved: Tensor, origin: int, lines: dict[int, Tensor]) -> bool:
    """Whether the position along the input's axis is a sum over the output's axes."""
    total = torch.full((1,) * moved.ndim, origin)
    for axis, line in lines.items():
        shape = [1] * moved.ndim
        shape[axis] = -1
        total = total + line.view(shape)
    return bool((moved == total).all())


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)
