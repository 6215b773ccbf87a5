"""What can be removed, and what goes with it.

Every axis of every tensor of a traced network is an array of *places*, one integer for each
position along the axis. A place says which units the position belongs to:

    FIXED          none: it stays, whatever is removed (the batch, pixels, the model's outputs)
    a unit         it goes when that unit goes
    a product      it goes when any of its units goes: position (h, d) of a flattened head axis goes
                   with head h, and with dimension d of all heads

Operations tie places together: where two tensors are added, position i of one goes if and only if
position i of the other goes. A reshape that splits an axis turns its places into products, one
that joins axes makes products of theirs. Wherever this algebra has no answer the units involved
are fixed, with the reason: nothing is ever removed by mistake, only left by ignorance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
FIXED = 0


class Units:
    """Places, and the units that they stand for, as operations tie them together."""

    def __init__(self) -> None:
        # A place points to the one that it was merged into (itself where it stands alone). One
        # that stands alone is a unit (None) or a product of others (FIXED is that of none).
        self._merged: list[int] = [FIXED]
        self._factors: list[tuple[int, ...] | None] = [()]
        self._why: dict[int, tuple[int, str]] = {}  # with the order in which they came
        self._products: dict[tuple[int, ...], int] = {}

    def fresh(self, count: int) -> Places:
        """As many new units; none for an axis of one position, which can never be removed."""
        if count == 1:
            return fixed(1)
        start = len(self._merged)
        self._merged.extend(range(start, start + count))
        self._factors.extend([None] * count)
        return np.arange(start, start + count, dtype=np.int64)

    def never(self, why: str) -> int:
        """A place that stays for a reason."""
        self._merged.append(len(self._merged))
        self._factors.append(())
        self._why[len(self._merged) - 1] = (len(self._why), why)
        return len(self._merged) - 1

    def of(self, place: int) -> tuple[int, ...]:
        """The units that a place belongs to, outermost first."""
        root = self._root(place)
        factors = self._factors[root]
        if factors is None:
            return (root,)
        found = [unit for factor in factors for unit in self.of(factor)]
        return tuple(dict.fromkeys(found))

    def why(self, place: int) -> str | None:
        """Why a place was fixed: the last reason, where several of its units were."""
        found = self._reasons(place)
        return max(found)[1] if found else None

    def fix(self, places: Iterable[int], why: str) -> None:
        """Let the units of these places stay for good."""
        for place in set(places):
            for unit in self.of(place):
                self._factors[unit] = ()
                self._why[unit] = (len(self._why), why)

    def tie(self, one: Places, other: Places, why: str) -> None:
        """Let position i of one axis go if and only if position i of the other goes.

        `why` is the reason where this fixes units: one of both stays, or no way was found.
        """
        if one is other:
            return
        for a, b in dict.fromkeys(zip(one.tolist(), other.tolist(), strict=True)):
            if a != b:
                self._tie(a, b, why)

    def join(self, parts: Sequence[Places]) -> Places:
        """Places that go when a place of any part goes, position by position; outermost first."""
        if len(parts) == 1:
            return parts[0]
        joined = [self._product(places) for places in zip(*map(_listed, parts), strict=True)]
        return np.array(joined, dtype=np.int64)

    def split(self, places: Places, sizes: Sequence[int], why: str) -> list[Places]:
        """The places of the axes that one axis is reshaped into, outermost first."""
        if len(sizes) == 1:
            return [places]
        outer, rest = self._split_in_two(places.reshape(sizes[0], -1), why)
        return [outer, *self.split(rest, sizes[1:], why)]

    def _root(self, place: int) -> int:
        root = place
        while self._merged[root] != root:
            root = self._merged[root]
        while self._merged[place] != root:  # the next question is answered at once
            self._merged[place], place = root, self._merged[place]
        return root

    def _reasons(self, place: int) -> list[tuple[int, str]]:
        root = self._root(place)
        if root in self._why:
            return [self._why[root]]
        return [one for factor in self._factors[root] or () for one in self._reasons(factor)]

    def _tie(self, a: int, b: int, why: str) -> None:
        ours, theirs = self.of(a), self.of(b)
        if set(ours) == set(theirs):
            return
        if not ours or not theirs:
            self.fix((*ours, *theirs), self.why(b if ours else a) or why)
        elif len(ours) == 1 and ours[0] not in theirs:
            self._become(ours[0], theirs)
        elif len(theirs) == 1 and theirs[0] not in ours:
            self._become(theirs[0], ours)
        elif len(ours) == len(theirs):
            for unit, counterpart in zip(ours, theirs, strict=True):
                self._tie(unit, counterpart, why)
        else:
            self.fix(set(ours) ^ set(theirs), why)

    def _become(self, unit: int, others: tuple[int, ...]) -> None:
        if len(others) == 1:
            self._merged[unit] = others[0]
        else:
            self._factors[unit] = others

    def _product(self, places: Iterable[int]) -> int:
        factors = tuple(unit for place in places for unit in self.of(place))
        if len(factors) < 2:
            return factors[0] if factors else FIXED
        if factors not in self._products:
            self._products[factors] = len(self._merged)
            self._merged.append(len(self._merged))
            self._factors.append(factors)
        return self._products[factors]

    def _split_in_two(self, table: Places, why: str) -> tuple[Places, Places]:
        rows, columns = table.shape
        if columns == 1:
            return table[:, 0], fixed(1)
        if rows == 1:
            return fixed(1), table[0]
        of = {place: self.of(place) for place in np.unique(table).tolist()}
        units = [[of[place] for place in row] for row in table.tolist()]
        if all(one == row[0] for row in units for one in row):
            return table[:, 0], fixed(columns)
        if all(row == units[0] for row in units):
            return fixed(rows), table[0]
        # The same product was made by joining two axes: take it apart again.
        length = _common_prefix(units[0])
        heads = [row[0][:length] for row in units]
        tails = [one[length:] for one in units[0]]
        if all(
            one == heads[r] + tails[c] for r, row in enumerate(units) for c, one in enumerate(row)
        ):
            return _array(map(self._product, heads)), _array(map(self._product, tails))
        flat = [one for row in units for one in row]
        if len(set(flat)) == len(flat) and all(len(one) == 1 for one in flat):
            outer, inner = self.fresh(rows), self.fresh(columns)
            for r, row in enumerate(units):
                for c, (unit,) in enumerate(row):
                    self._become(unit, (int(outer[r]), int(inner[c])))
            return outer, inner
        self.fix(of, why)
        return fixed(rows), fixed(columns)


def fixed(count: int) -> Places:
    """Places that stay."""
    return np.zeros(count, dtype=np.int64)


def _common_prefix(tuples: Sequence[tuple[int, ...]]) -> int:
    length = min(map(len, tuples))
    for one, other in pairwise(tuples):
        while one[:length] != other[:length]:
            length -= 1
    return length


def _array(places: Iterable[int]) -> Places:
    return np.fromiter(places, dtype=np.int64)


def _listed(places: Places) -> list[int]:
    listed: list[int] = places.tolist()
    return listed
