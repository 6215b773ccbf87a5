"""Counts of one tensor: zeros, dead rows and columns, non-finite values, and a histogram."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdecay.deployment.files.codec import Positions
from pdecay.deployment.files.dtypes import DType
from pdecay.deployment.files.table import Row
from pdecay.deployment.inspect import histogram
from pdecay.deployment.inspect.sources import Source


@dataclass(frozen=True)
class Counts:
    """The counts of a tensor.

    Args:
        zeros: elements with ``|w| < threshold``.
        exact_zeros: elements equal to 0.0, which a sparse file omits.
        dead_rows, dead_columns: slices along the first and second dimension with only zeros.
        not_finite: infinities and NaNs.
        bins: the bins of the histogram that are not empty, and their counts. A file may have so
            many small tensors that whole histograms would take many times its size.
    """

    zeros: int
    exact_zeros: int
    dead_rows: int
    dead_columns: int
    not_finite: int
    bins: tuple[Positions, histogram.Counts]

    @property
    def histogram(self) -> histogram.Counts:
        """Counts of log10 |w|, for floating-point and complex tensors."""
        counts = histogram.empty()
        counts[self.bins[0]] = self.bins[1]
        return counts


def count(source: Source, threshold: float) -> Counts:
    """Read a tensor once and count it, in memory proportional to its stored elements."""
    row = source.row
    nonzeros = live = not_finite = 0
    hist = histogram.empty()
    units = _LiveUnits(row)
    for where, values in source.blocks():
        nonzero = row.dtype.nonzero(values)
        nonzeros += int(np.count_nonzero(nonzero))
        if has_magnitude(row.dtype):
            size = _magnitudes(values, row.dtype)
            finite = np.isfinite(size)
            not_finite += len(size) - int(np.count_nonzero(finite))
            hist += histogram.count(size[nonzero & finite])
            nonzero &= ~(size < threshold)
        live += int(np.count_nonzero(nonzero))
        if units.applies:
            positions = np.arange(where.start, where.stop) if isinstance(where, slice) else where
            units.add(positions[nonzero])
    total = row.encoding.size
    dead_rows, dead_columns = units.dead()
    used = np.flatnonzero(hist)
    bins = (used, hist[used])
    return Counts(total - live, total - nonzeros, dead_rows, dead_columns, not_finite, bins)


def has_magnitude(dtype: DType) -> bool:
    """Return whether elements are single real or complex numbers, not counters or flags."""
    real = dtype.torch.is_floating_point or dtype.torch.is_complex
    return real and dtype.packed == 1


def _magnitudes(values: NDArray[Any], dtype: DType) -> NDArray[Any]:
    tensor = torch.from_numpy(values.view(np.uint8)).view(dtype.torch)
    if dtype.torch.is_complex:
        return torch.hypot(*torch.view_as_real(tensor).double().unbind(1)).numpy()
    return tensor.to(torch.float64 if dtype.itemsize == 8 else torch.float32).abs().numpy()


class _LiveUnits:
    """Counter of rows and columns that contain a live element."""

    def __init__(self, row: Row) -> None:
        size = row.encoding.size
        self.applies = len(row.shape) > 1 and size > 0
        if not self.applies:
            return
        self._rows, self._columns = row.shape[:2]
        self._row_size = size // self._rows
        self._inner = self._row_size // self._columns
        self._live_rows, self._last_row = 0, -1
        # One flag per column. If a file claims many more columns than it stores values, keep only
        # the indices of live columns, of 8 bytes each, so that memory stays bounded.
        use_flags = self._columns <= 8 * row.encoding.count
        self._flags = np.zeros(self._columns, bool) if use_flags else None
        self._live_columns: Positions = np.empty(0, np.int64)
        self._added: list[Positions] = []  # since the last merge
        self._added_count = 0

    def add(self, positions: Positions) -> None:
        """Mark the rows and columns of live elements; positions must ascend over all calls."""
        if not len(positions):
            return
        rows = positions // self._row_size
        self._live_rows += int(np.count_nonzero(np.diff(rows, prepend=self._last_row)))
        self._last_row = int(rows[-1])
        columns = positions // self._inner % self._columns
        if self._flags is not None:
            self._flags[columns] = True
        else:
            self._added.append(columns)
            self._added_count += len(columns)
            if self._added_count > len(self._live_columns):  # a merge visits all live columns
                self._merge()

    def dead(self) -> tuple[int, int]:
        """Return the numbers of dead rows and columns."""
        if not self.applies:
            return 0, 0
        self._merge()
        flags = self._flags
        live = len(self._live_columns) if flags is None else int(np.count_nonzero(flags))
        return self._rows - self._live_rows, self._columns - live

    def _merge(self) -> None:
        self._live_columns = np.unique(np.concatenate([self._live_columns, *self._added]))
        self._added, self._added_count = [], 0
