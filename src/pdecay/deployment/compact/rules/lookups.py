"""Rules for operations that take rows of a table by index: embeddings, indexing with tensors."""

from __future__ import annotations

import torch

from pdecay.deployment.compact.rules.base import Rule, fill_all, fixed_axes, keep_all
from pdecay.deployment.compact.trace import Call, Value
from pdecay.deployment.compact.units import Units


class Lookup(Rule):
    """Rows of a table, one for each index."""

    def label(self, call: Call, units: Units) -> None:
        table, indexed, indices = _operands(call)
        keep_all(indices, units, f"{call} uses them as indices")
        for axis in indexed:
            units.keep(table.labels[axis].tolist(), f"{call} looks them up by index")
        (out,) = call.outs
        others = [table.labels[i] for i in range(table.tensor.ndim) if i not in indexed]
        out.labels = fixed_axes(out)
        if call.name == "embedding":
            out.labels[-1] = others[0]
        elif _adjacent(indexed):
            count = out.tensor.ndim - len(others)
            out.labels[: indexed[0]] = others[: indexed[0]]
            out.labels[indexed[0] + count :] = others[indexed[0] :]
        else:  # torch moves the indexed axes to the front
            for labels in others:
                units.keep(labels.tolist(), f"{call} reorders the axes")

    def mark_varying(self, call: Call) -> None:
        # A column with the same constant in all rows is constant for every index.
        table, indexed, _ = _operands(call)
        (out,) = call.outs
        rows = table.tensor.double() if table.tensor.is_floating_point() else table.tensor
        differs = table.varies.amax(indexed) | (
            rows.amax(indexed) != rows.amin(indexed)
            if rows.dtype != torch.bool
            else rows.any() != rows.all()
        )
        if call.name == "embedding":
            out.varies = differs.expand(out.tensor.shape)
        elif _adjacent(indexed):
            for _ in range(out.tensor.ndim - differs.ndim):
                differs = differs.unsqueeze(indexed[0])
            out.varies = differs.expand(out.tensor.shape)
        else:
            fill_all(call.outs, True)

    def mark_live(self, call: Call) -> None:
        table, _, indices = _operands(call)
        live = call.outs[0].live.any()
        table.mark_live(live)
        for value in indices:
            # A mask decides the number of rows, which the code may use anywhere.
            value.mark_live(True if value.tensor.dtype == torch.bool else live)


class Bags(Rule):
    """Sums, means or maxima of a table's rows: ``nn.EmbeddingBag``."""

    def label(self, call: Call, units: Units) -> None:
        table, *indices = call.ins
        keep_all(indices, units, f"{call} uses them as indices")
        units.keep(table.labels[0].tolist(), f"{call} looks them up by index")
        for out in call.outs:
            out.labels = fixed_axes(out)
            if out.tensor.ndim == 2:  # the sums, and the indices of maxima
                out.labels[1] = table.labels[1]

    def mark_varying(self, call: Call) -> None:
        # The number of rows in a bag depends on the input, so that sums of constants vary, too.
        columns = call.ins[0].nonzero.amax(0)
        fill_all(call.outs, True)
        call.outs[0].varies = columns.expand(call.outs[0].tensor.shape)

    def mark_live(self, call: Call) -> None:
        table, *indices = call.ins
        live = call.outs[0].live
        table.mark_live(live.amax(0))
        for value in indices:
            value.mark_live(live.any())


def _adjacent(axes: list[int]) -> bool:
    return axes == list(range(axes[0], axes[-1] + 1))


def _operands(call: Call) -> tuple[Value, list[int], list[Value]]:
    """Return the table, the axes that are indexed, and the index tensors."""
    if call.name == "embedding":
        return call.args[0], [0], [call.args[1]]
    table, given = call.args[0], call.args[1]
    if call.name == "index_select":
        return table, [given % table.tensor.ndim], [call.args[2]]
    indexed: list[int] = []
    axis = 0
    for index in given:
        # A bool mask indexes as many axes as it has.
        width = index.tensor.ndim if index is not None and index.tensor.dtype == torch.bool else 1
        indexed += range(axis, axis + width) if index is not None else ()
        axis += width
    return table, indexed, [index for index in given if index is not None]
