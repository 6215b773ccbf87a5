"""Reading a file of tensors, sparse or ordinary, that may be hostile.

Nothing that a file claims is believed before it is checked against the file's own size: a load
takes no more memory than a multiple of that, unless the caller says how much it may be.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdecay.deployment.files import table
from pdecay.deployment.files.codec import BLOCK, Encoding, Positions, check, positions
from pdecay.deployment.files.container import Container, FileFormatError, shown
from pdecay.deployment.files.dtypes import BY_NAME, to_array
from pdecay.deployment.files.table import Row, Tie

FORMAT = "pdecay"
FORMAT_VERSION = "1"
# In an ordinary file, which has a weight of two names once: the metadata say the other name.
TIED = "tied:"

# What a sparse file's header may list.
_PARTS = {
    "positions": "U8",
    "table": "U8",
    **{f"values.{dtype.name}": dtype.stored_as for dtype in BY_NAME.values()},
}

# Some elements of a tensor in row-major order: which ones, and their values.
Block = tuple[slice | Positions, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its row, and the bytes at which its values and its positions start."""

    row: Row
    values_at: int
    positions_at: int = 0


class TensorFile(Container):
    """An open file of tensors.

    Args:
        path: of a sparse file, or of an ordinary safetensors file.
        max_bytes: how much memory a load may take; by default, a multiple of the file's size.

    Attributes:
        tensors: the tensors by name.
        ties: further names, and the tensor that each stands for.
        names: all of these names, in the order in which they were saved.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        super().__init__(path)
        self.limit = table.EXPANSION * self.size if max_bytes is None else max_bytes
        self.is_sparse = self.metadata.get("format") == FORMAT
        self.tensors: dict[str, Stored] = {}
        self.ties: dict[str, str] = {}
        self.names: list[str] = []
        self._overhead = 0  # the memory of the table's lines
        try:
            if self.is_sparse:
                self._read_table()
            else:
                self._read_entries()
        except BaseException:
            self.close()
            raise

    def check_memory(self) -> None:
        """Refuse a file whose tensors take more memory than is allowed."""
        needed = self._overhead + sum(stored.row.nbytes for stored in self.tensors.values())
        if needed > self.limit:
            raise FileFormatError(
                f"it has {self.size:,} bytes and takes {needed:,} in memory, more than the "
                f"{self.limit:,} that are allowed; if you trust it, load(path, "
                f"max_bytes={needed:_}), or load(path, model) with a model of its shapes"
            )

    def check_contents(self) -> None:
        """Refuse positions that do not fit their tensors; after this, nothing is left to fail."""
        for name, stored in self.tensors.items():
            try:
                check(stored.row.encoding, self._read_positions(stored))
            except FileFormatError as error:
                raise FileFormatError(f"{shown(name)}: {error}") from None
            if stored.row.dtype.torch == torch.bool:
                for _, values in self.blocks(stored):
                    if values.size and values.max() > 1:
                        raise FileFormatError(
                            f"{shown(name)} has a value that is not True or False"
                        )

    def load(self, stored: Stored) -> Tensor:
        """A tensor in memory of its own. Its contents must have been checked."""
        tensor = torch.empty(stored.row.shape, dtype=stored.row.dtype.torch)
        array = to_array(tensor)
        if stored.row.encoding.kind == "dense":
            self.read_into(array, stored.values_at)
        else:
            array[:] = 0
            for where, values in self.blocks(stored):
                array[where] = values
        return tensor

    def blocks(self, stored: Stored) -> Iterator[Block]:
        """A tensor's stored elements, block by block: those that are left out are zeros."""
        row, begin = stored.row, stored.values_at
        for where in self._places(stored):
            count = where.stop - where.start if isinstance(where, slice) else len(where)
            values = np.empty(count, row.dtype.carrier)
            self.read_into(values, begin)
            begin += values.nbytes
            yield where, values

    def _places(self, stored: Stored) -> Iterator[slice | Positions]:
        encoding = stored.row.encoding
        if encoding.kind != "dense":
            yield from positions(encoding, self._read_positions(stored))
            return
        for start in range(0, encoding.size, BLOCK):
            yield slice(start, min(start + BLOCK, encoding.size))

    def _read_positions(self, stored: Stored) -> NDArray[np.uint8]:
        return self.read(stored.positions_at, stored.row.encoding.nbytes)

    def _read_entries(self) -> None:
        """An ordinary file: what its header has are the tensors."""
        for entry in self.entries.values():
            if entry.dtype not in BY_NAME:
                raise FileFormatError(
                    f"{shown(entry.name)} has dtype {entry.dtype}, which torch has not"
                )
            dtype, shape = BY_NAME[entry.dtype], entry.shape
            if dtype.packed > 1:
                if not shape or shape[-1] % dtype.packed:
                    raise FileFormatError(
                        f"{shown(entry.name)} has an odd shape, {shown(list(shape))}"
                    )
                shape = (*shape[:-1], shape[-1] // dtype.packed)
            size = (entry.end - entry.begin) // dtype.itemsize
            row = Row(entry.name, dtype, shape, Encoding("dense", size, size))
            self._add(Stored(row, entry.begin))
        for key, other in self.metadata.items():
            if key.startswith(TIED):
                self._add(Tie(key.removeprefix(TIED), other))

    def _read_table(self) -> None:
        version = self.metadata.get("format_version")
        if version != FORMAT_VERSION:
            raise FileFormatError(
                f"it has version {shown(version)} of the format, and this pdecay reads "
                f"{FORMAT_VERSION!r}: upgrade pdecay"
            )
        for name, entry in self.entries.items():
            if entry.dtype != _PARTS.get(name) or len(entry.shape) != 1:
                raise FileFormatError(f"a sparse file has no {shown(name)} of {entry.dtype}")
        parts = dict(self.entries)
        if "positions" not in parts or "table" not in parts:
            raise FileFormatError("it has no table, or no positions")
        lines = parts.pop("table")
        places = {name: entry.begin for name, entry in parts.items()}
        data = self.read(lines.begin, lines.end - lines.begin).tobytes()
        for row, memory in table.parsed(data, self.limit):
            self._overhead += memory
            if isinstance(row, Tie):
                self._add(row)
                continue
            section = f"values.{row.dtype.name}"
            self._add(Stored(row, places.get(section, 0), places["positions"]))
            for name, nbytes in ((section, row.values_nbytes), ("positions", row.encoding.nbytes)):
                if name not in parts or places[name] + nbytes > parts[name].end:
                    raise FileFormatError(
                        f"{shown(row.name)} needs more bytes than {shown(name)} has left"
                    )
                places[name] += nbytes
        for name, entry in parts.items():
            left = self.read(places[name], min(entry.end - places[name], 8))
            if len(left) >= 8 or left.any() or (len(left) and name != "positions"):
                raise FileFormatError(f"{shown(name)} has bytes that belong to no tensor")

    def _add(self, item: Stored | Tie) -> None:
        name = item.name if isinstance(item, Tie) else item.row.name
        if name in self.tensors or name in self.ties:
            raise FileFormatError(f"it has two tensors with the name {shown(name)}")
        if isinstance(item, Stored):
            self.tensors[name] = item
        elif item.other in self.tensors:
            self.ties[name] = item.other
        else:
            raise FileFormatError(
                f"{shown(name)} is tied to {shown(item.other)}, which is not above it"
            )
        self.names.append(name)
