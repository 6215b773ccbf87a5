"""Counting one tensor: zeros, rows and columns without any other weight, and its histogram."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdecay.deployment.files.codec import Positions
from pdecay.deployment.files.dtypes import DType
from pdecay.deployment.inspect import histogram
from pdecay.deployment.inspect.sources import Source


@dataclass(frozen=True)
class Counts:
    """What was found in a tensor.

    Args:
        zeros: weights with ``|w| < threshold``.
        exact_zeros: those that are 0.0, which a sparse file leaves out.
        dead_rows, dead_columns: slices along the first and the second dimension without others.
        not_finite: infinities and NaNs.
        histogram: of log10 |w|, for numbers that are not whole ones.
    """

    zeros: int
    exact_zeros: int
    dead_rows: int
    dead_columns: int
    not_finite: int
    histogram: histogram.Counts


def counted(source: Source, threshold: float) -> Counts:
    """Read a tensor once. What is taken is in proportion to what is stored, not to its shape."""
    alive = live = not_finite = 0
    hist = histogram.empty()
    units = _Units(source)
    for where, values in source.blocks():
        nonzero = source.dtype.nonzero(values)
        alive += int(np.count_nonzero(nonzero))
        if has_magnitude(source.dtype):
            size = _magnitudes(values, source.dtype)
            finite = np.isfinite(size)
            not_finite += len(size) - int(np.count_nonzero(finite))
            hist += histogram.count(size[nonzero & finite])
            nonzero &= ~(size < threshold)
        live += int(np.count_nonzero(nonzero))
        if units.wanted:
            places = np.arange(where.start, where.stop) if isinstance(where, slice) else where
            units.see(places[nonzero])
    return Counts(
        zeros=source.size - live,
        exact_zeros=source.size - alive,
        dead_rows=units.dead_rows,
        dead_columns=units.dead_columns,
        not_finite=not_finite,
        histogram=hist,
    )


def has_magnitude(dtype: DType) -> bool:
    """Whether it is numbers that decay: not counters, flags, or two numbers in a byte."""
    real = dtype.torch.is_floating_point or dtype.torch.is_complex
    return real and dtype.packed == 1


def _magnitudes(values: NDArray[Any], dtype: DType) -> NDArray[Any]:
    tensor = torch.from_numpy(values.view(np.uint8)).view(dtype.torch)
    if dtype.torch.is_complex:
        return torch.hypot(*torch.view_as_real(tensor).double().unbind(1)).numpy()
    return tensor.to(torch.float64 if dtype.itemsize == 8 else torch.float32).abs().numpy()


class _Units:
    """Which rows and columns of a weight are alive, told by the positions that are, ascending."""

    def __init__(self, source: Source) -> None:
        self.wanted = len(source.shape) > 1 and source.size > 0
        if not self.wanted:
            return
        self._rows, self._columns = source.shape[:2]
        self._row_size = source.size // self._rows
        self._inner = self._row_size // self._columns
        self._live_rows, self._last_row = 0, -1
        # A flag for each column; where a file claims more columns than it has values, only the
        # numbers of those that are alive.
        self._flags = np.zeros(self._columns, bool) if self._columns <= source.stored else None
        self._some: Positions = np.empty(0, np.int64)

    def see(self, places: Positions) -> None:
        if not len(places):
            return
        rows = places // self._row_size
        self._live_rows += int(np.count_nonzero(np.diff(rows, prepend=self._last_row)))
        self._last_row = int(rows[-1])
        columns = places // self._inner % self._columns
        if self._flags is not None:
            self._flags[columns] = True
        else:
            self._some = np.union1d(self._some, columns)

    @property
    def dead_rows(self) -> int:
        return self._rows - self._live_rows if self.wanted else 0

    @property
    def dead_columns(self) -> int:
        if not self.wanted:
            return 0
        live = len(self._some) if self._flags is None else int(np.count_nonzero(self._flags))
        return self._columns - live
