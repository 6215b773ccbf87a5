"""Operations that take rows of a table by their numbers: embeddings, and indexing with tensors."""

from __future__ import annotations

import torch

from pdecay.deployment.compact.rules.base import Plain, fix_all, where
from pdecay.deployment.compact.trace import Call, Value
from pdecay.deployment.compact.units import Units, fixed


class Lookup(Plain):
    """Rows of a table, one for each index."""

    def tie(self, call: Call, units: Units) -> None:
        table, indexed, indices = _lookup(call)
        fix_all(indices, units, f"{where(call)} takes them as indices")
        for axis in indexed:
            units.fix(table.places[axis].tolist(), f"{where(call)} looks them up by number")
        (out,) = call.outs
        kept = [table.places[i] for i in range(table.tensor.ndim) if i not in indexed]
        out.places = [fixed(n) for n in out.tensor.shape]
        if call.name == "embedding":
            out.places[-1] = kept[0]
        elif indexed == list(range(indexed[0], indexed[-1] + 1)):  # else torch puts them in front
            count = out.tensor.ndim - len(kept)
            out.places[: indexed[0]] = kept[: indexed[0]]
            out.places[indexed[0] + count :] = kept[indexed[0] :]
        else:
            for places in kept:
                units.fix(places.tolist(), f"{where(call)} reorders the axes")

    def vary(self, call: Call) -> None:
        """A column in which all rows are the same constant is one whatever the index."""
        table, indexed, _ = _lookup(call)
        (out,) = call.outs
        rows = table.tensor.double() if table.tensor.is_floating_point() else table.tensor
        differs = table.varies.amax(indexed) | (
            rows.amax(indexed) != rows.amin(indexed)
            if rows.dtype != torch.bool
            else rows.any() != rows.all()
        )
        if call.name == "embedding":
            out.varies = differs.expand(out.tensor.shape)
        elif indexed == list(range(indexed[0], indexed[-1] + 1)):
            for _ in range(out.tensor.ndim - differs.ndim):
                differs = differs.unsqueeze(indexed[0])
            out.varies = differs.expand(out.tensor.shape)
        else:
            out.varies = torch.ones_like(out.tensor, dtype=torch.bool)

    def back(self, call: Call) -> None:
        table, _, indices = _lookup(call)
        (out,) = call.outs
        for value in (table, *indices):
            value.live = value.live | out.live.any()


class Bags(Plain):
    """Sums, means or maxima of a table's rows, as ``nn.EmbeddingBag`` makes them."""

    def tie(self, call: Call, units: Units) -> None:
        table, *indices = call.ins
        fix_all(indices, units, f"{where(call)} takes them as indices")
        units.fix(table.places[0].tolist(), f"{where(call)} looks them up by number")
        for out in call.outs:
            out.places = [fixed(n) for n in out.tensor.shape]
            if out.tensor.ndim == 2:  # the sums, and which rows the maxima are of
                out.places[1] = table.places[1]

    def vary(self, call: Call) -> None:
        """Even of a constant it is an input how often it is added."""
        columns = call.ins[0].counts.amax(0)
        for out in call.outs:
            out.varies = torch.ones_like(out.tensor, dtype=torch.bool)
        call.outs[0].varies = columns.expand(call.outs[0].tensor.shape)

    def back(self, call: Call) -> None:
        table, *indices = call.ins
        live = call.outs[0].live
        table.live = table.live | live.amax(0)
        for value in indices:
            value.live = value.live | live.any()


def _lookup(call: Call) -> tuple[Value, list[int], list[Value]]:
    """The table, which of its axes are indexed, and by what."""
    if call.name == "embedding":
        return call.args[0], [0], [call.args[1]]
    table, given = call.args[0], call.args[1]
    if call.name == "index_select":
        return table, [given % table.tensor.ndim], [call.args[2]]
    # A mask of several axes stands for as many indices.
    indexed: list[int] = []
    axis = 0
    for index in given:
        width = index.tensor.ndim if index is not None and index.tensor.dtype == torch.bool else 1
        indexed += range(axis, axis + width) if index is not None else ()
        axis += width
    return table, indexed, [index for index in given if index is not None]
