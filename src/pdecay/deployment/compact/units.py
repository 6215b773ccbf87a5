"""Units, and the labels that say which units each position of an axis belongs to.

Every axis of every traced tensor has an array of *labels*, one integer for each position. A label
stands for a set of units:

    FIXED       no unit: the position is never removed (batch, pixels, the model's outputs)
    a unit      the position is removed together with this unit
    a product   the position is removed if any unit of the product is removed: position (h, d) of a
                flattened head axis belongs to head h and to dimension d of all heads

Operations tie labels together: where two tensors are added, position i of one is removed if and
only if position i of the other is. A reshape that splits an axis turns its labels into products,
and a reshape that joins axes makes products of their labels. Where this algebra has no answer, the
units involved are kept, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]
FIXED = 0


class Units:
    """The labels of one trace and the units they stand for (a union-find structure)."""

    def __init__(self) -> None:
        # Each label points to the label it was merged into, or to itself if it is a root.
        # A root is a unit (factors None) or a product (factors; FIXED is the empty product).
        self._parent: list[int] = [FIXED]
        self._factors: list[tuple[int, ...] | None] = [()]
        self._reasons: dict[int, tuple[int, str]] = {}  # (order of arrival, reason)
        self._products: dict[tuple[int, ...], int] = {}

    def new(self, count: int) -> Labels:
        """Return labels of new units. An axis of one position is fixed: it cannot be removed."""
        if count == 1:
            return fixed(1)
        start = len(self._parent)
        self._parent.extend(range(start, start + count))
        self._factors.extend([None] * count)
        return np.arange(start, start + count, dtype=np.int64)

    def fixed_label(self, reason: str) -> int:
        """Return a new label of no unit, with the reason why its positions are kept."""
        label = len(self._parent)
        self._parent.append(label)
        self._factors.append(())
        self._reasons[label] = (len(self._reasons), reason)
        return label

    def of(self, label: int) -> tuple[int, ...]:
        """Return the units of a label, outermost first."""
        root = self._root(label)
        factors = self._factors[root]
        if factors is None:
            return (root,)
        found = [unit for factor in factors for unit in self.of(factor)]
        return tuple(dict.fromkeys(found))

    def of_all(self, labels: Iterable[int]) -> set[int]:
        """Return the units of several labels."""
        return {unit for label in labels for unit in self.of(int(label))}

    def reason(self, label: int) -> str | None:
        """Return the latest reason for which units of a label are kept."""
        found = self._all_reasons(label)
        return max(found)[1] if found else None

    def keep(self, labels: Iterable[int], reason: str) -> None:
        """Keep all units of these labels."""
        for label in set(labels):
            for unit in self.of(label):
                self._factors[unit] = ()
                self._reasons[unit] = (len(self._reasons), reason)

    def tie(self, one: Labels, other: Labels, reason: str) -> None:
        """Remove position i of one axis if and only if position i of the other is removed.

        If a position of either axis is kept, or the two sets of units cannot be made equal, the
        units of both are kept for `reason`.
        """
        if one is other:
            return
        for a, b in dict.fromkeys(zip(one.tolist(), other.tolist(), strict=True)):
            if a != b:
                self._tie(a, b, reason)

    def join(self, parts: Sequence[Labels]) -> Labels:
        """Return the product of several label arrays, position by position, outermost first."""
        if len(parts) == 1:
            return parts[0]
        lists: list[list[int]] = [part.tolist() for part in parts]
        return _array(map(self._product, zip(*lists, strict=True)))

    def split(self, labels: Labels, sizes: Sequence[int], reason: str) -> list[Labels]:
        """Return the labels of the axes that one axis is reshaped into, outermost first.

        If there is no such split, the units are kept for `reason`.
        """
        if len(sizes) == 1:
            return [labels]
        outer, rest = self._split_in_two(labels.reshape(sizes[0], -1), reason)
        return [outer, *self.split(rest, sizes[1:], reason)]

    def _root(self, label: int) -> int:
        root = label
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[label] != root:  # path compression
            self._parent[label], label = root, self._parent[label]
        return root

    def _all_reasons(self, label: int) -> list[tuple[int, str]]:
        root = self._root(label)
        if root in self._reasons:
            return [self._reasons[root]]
        return [one for factor in self._factors[root] or () for one in self._all_reasons(factor)]

    def _tie(self, a: int, b: int, reason: str) -> None:
        ours, theirs = self.of(a), self.of(b)
        if set(ours) == set(theirs):
            return
        if not ours or not theirs:
            self.keep((*ours, *theirs), self.reason(b if ours else a) or reason)
        elif len(ours) == 1 and ours[0] not in theirs:
            self._merge(ours[0], theirs)
        elif len(theirs) == 1 and theirs[0] not in ours:
            self._merge(theirs[0], ours)
        elif len(ours) == len(theirs):
            for unit, counterpart in zip(ours, theirs, strict=True):
                self._tie(unit, counterpart, reason)
        else:
            self.keep(set(ours) ^ set(theirs), reason)

    def _merge(self, unit: int, others: tuple[int, ...]) -> None:
        if len(others) == 1:
            self._parent[unit] = others[0]
        else:
            self._factors[unit] = others

    def _product(self, labels: Iterable[int]) -> int:
        factors = tuple(unit for label in labels for unit in self.of(label))
        if len(factors) < 2:
            return factors[0] if factors else FIXED
        if factors not in self._products:
            self._products[factors] = len(self._parent)
            self._parent.append(len(self._parent))
            self._factors.append(factors)
        return self._products[factors]

    def _split_in_two(self, table: Labels, reason: str) -> tuple[Labels, Labels]:
        rows, columns = table.shape
        if columns == 1:
            return table[:, 0], fixed(1)
        if rows == 1:
            return fixed(1), table[0]
        of = {label: self.of(label) for label in np.unique(table).tolist()}
        units = [[of[label] for label in row] for row in table.tolist()]
        if all(one == row[0] for row in units for one in row):
            return table[:, 0], fixed(columns)
        if all(row == units[0] for row in units):
            return fixed(rows), table[0]
        # A product that an earlier join made of two axes: take it apart again.
        length = _common_prefix(units[0])
        heads = [row[0][:length] for row in units]
        tails = [one[length:] for one in units[0]]
        if all(
            one == heads[r] + tails[c] for r, row in enumerate(units) for c, one in enumerate(row)
        ):
            return _array(map(self._product, heads)), _array(map(self._product, tails))
        flat = [one for row in units for one in row]
        if len(set(flat)) == len(flat) and all(len(one) == 1 for one in flat):
            outer, inner = self.new(rows), self.new(columns)
            for r, row in enumerate(units):
                for c, (unit,) in enumerate(row):
                    self._merge(unit, (int(outer[r]), int(inner[c])))
            return outer, inner
        self.keep(of, reason)
        return fixed(rows), fixed(columns)


def fixed(count: int) -> Labels:
    """Return labels of positions that belong to no unit and are never removed."""
    return np.zeros(count, dtype=np.int64)


def _common_prefix(tuples: Sequence[tuple[int, ...]]) -> int:
    length = min(map(len, tuples))
    for one, other in pairwise(tuples):
        while one[:length] != other[:length]:
            length -= 1
    return length


def _array(labels: Iterable[int]) -> Labels:
    return np.fromiter(labels, dtype=np.int64)
