"""Read tensors from an untrusted sparse or ordinary safetensors file, one tensor at a time.

All claims of a file are checked against its size first. A load allocates at most a fixed multiple
of the file's size, unless the caller sets another limit.
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
from pdecay.deployment.files.container import Container, FileFormatError, short_repr
from pdecay.deployment.files.dtypes import BY_NAME, to_array
from pdecay.deployment.files.table import Row, Tie

FORMAT = "pdecay"
FORMAT_VERSION = "1"
# Prefix of metadata keys in an ordinary file: "tied:NAME" maps a second name to the stored one.
TIED = "tied:"

# The entries that a sparse file's header may list, with their dtypes.
_SECTIONS = {
    "positions": "U8",
    "table": "U8",
    **{f"values.{dtype.name}": dtype.stored_as for dtype in BY_NAME.values()},
}

# Indices of some elements in row-major order, and their values.
Block = tuple[slice | Positions, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's table row and the file offsets of its values and positions."""

    row: Row
    values_at: int
    positions_at: int = 0


class TensorFile(Container):
    """An open sparse or ordinary safetensors file.

    Args:
        path: the file's path.
        max_bytes: the memory that the tensors may take; by default a multiple of the file's size.

    Attributes:
        tensors: the tensors by name.
        ties: second names, and the name of the tensor that each refers to.
        names: all names in the order in which they were saved.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        super().__init__(path)
        self.limit = table.EXPANSION * self.size if max_bytes is None else max_bytes
        self.is_sparse = self.metadata.get("format") == FORMAT
        self.tensors: dict[str, TensorEntry] = {}
        self.ties: dict[str, str] = {}
        self.names: list[str] = []
        self._table_memory = 0
        try:
            if self.is_sparse:
                self._read_table()
            else:
                self._read_entries()
        except BaseException:
            self.close()
            raise

    def check_memory(self) -> None:
        """Raise if the tensors need more memory than allowed."""
        needed = self._table_memory + sum(entry.row.nbytes for entry in self.tensors.values())
        if needed > self.limit:
            raise FileFormatError(
                f"file has {self.size:,} bytes but takes {needed:,} in memory, more than the "
                f"allowed {self.limit:,}; if you trust it, call load(path, trusted=True); "
                f"else load(path, max_bytes={needed:_}), or load(path, model) with a model of the "
                "same shapes"
            )

    def check_contents(self) -> None:
        """Raise if positions or bools are invalid; afterwards every tensor can be loaded."""
        for name, entry in self.tensors.items():
            try:
                check(entry.row.encoding, self._read_positions(entry))
            except FileFormatError as error:
                raise FileFormatError(f"{short_repr(name)}: {error}") from None
            if entry.row.dtype.torch == torch.bool:
                for _, values in self.blocks(entry):
                    if values.size and values.max() > 1:
                        raise FileFormatError(
                            f"{short_repr(name)} has a value that is neither True nor False"
                        )

    def load(self, entry: TensorEntry) -> Tensor:
        """Return a new dense tensor. Call :meth:`check_contents` first."""
        # On the CPU, whatever torch's default device: the array below must be the tensor's memory.
        tensor = torch.empty(entry.row.shape, dtype=entry.row.dtype.torch, device="cpu")
        array = to_array(tensor)
        if entry.row.encoding.kind == "dense":
            self.read_into(array, entry.values_at)
        else:
            array[:] = 0
            for where, values in self.blocks(entry):
                array[where] = values
        return tensor

    def blocks(self, entry: TensorEntry) -> Iterator[Block]:
        """Yield the stored elements of a tensor block by block; all other elements are zero."""
        row, begin = entry.row, entry.values_at
        for where in self._block_indices(entry):
            count = where.stop - where.start if isinstance(where, slice) else len(where)
            values = np.empty(count, row.dtype.carrier)
            self.read_into(values, begin)
            begin += values.nbytes
            yield where, values

    def _block_indices(self, entry: TensorEntry) -> Iterator[slice | Positions]:
        encoding = entry.row.encoding
        if encoding.kind != "dense":
            yield from positions(encoding, self._read_positions(entry))
            return
        for start in range(0, encoding.size, BLOCK):
            yield slice(start, min(start + BLOCK, encoding.size))

    def _read_positions(self, entry: TensorEntry) -> NDArray[np.uint8]:
        return self.read(entry.positions_at, entry.row.encoding.nbytes)

    def _read_entries(self) -> None:
        """Collect the tensors of an ordinary file, which are the entries of its header."""
        for entry in self.entries.values():
            name, shape = short_repr(entry.name), entry.shape
            if entry.dtype not in BY_NAME:
                raise FileFormatError(f"{name} has dtype {entry.dtype}, which torch does not have")
            dtype = BY_NAME[entry.dtype]
            if dtype.packed > 1:
                if not shape or shape[-1] % dtype.packed:
                    raise FileFormatError(f"{name} has an odd shape, {short_repr(list(shape))}")
                shape = (*shape[:-1], shape[-1] // dtype.packed)
            size = (entry.end - entry.begin) // dtype.itemsize
            row = Row(entry.name, dtype, shape, Encoding("dense", size, size))
            self._add(TensorEntry(row, entry.begin))
        for key, other in self.metadata.items():
            if key.startswith(TIED):
                self._add(Tie(key.removeprefix(TIED), other))

    def _read_table(self) -> None:
        """Collect the tensors of a sparse file and compute the offsets of their data."""
        version = self.metadata.get("format_version")
        if version != FORMAT_VERSION:
            raise FileFormatError(
                f"format version is {short_repr(version)}, but this pdecay reads version "
                f"{FORMAT_VERSION!r}: upgrade pdecay"
            )
        for name, entry in self.entries.items():
            if entry.dtype != _SECTIONS.get(name) or len(entry.shape) != 1:
                raise FileFormatError(
                    f"unexpected entry {short_repr(name)} of {entry.dtype} in a sparse file"
                )
        sections = dict(self.entries)
        if "positions" not in sections or "table" not in sections:
            raise FileFormatError("table or positions are missing")
        lines = sections.pop("table")
        offsets = {name: entry.begin for name, entry in sections.items()}
        data = self.read(lines.begin, lines.end - lines.begin).tobytes()
        for row, memory in table.parse(data, self.limit):
            self._table_memory += memory
            if isinstance(row, Tie):
                self._add(row)
                continue
            section = f"values.{row.dtype.name}"
            self._add(TensorEntry(row, offsets.get(section, 0), offsets["positions"]))
            for name, nbytes in ((section, row.values_nbytes), ("positions", row.encoding.nbytes)):
                if name not in sections or offsets[name] + nbytes > sections[name].end:
                    raise FileFormatError(
                        f"{short_repr(row.name)} needs more bytes than remain in {name!r}"
                    )
                offsets[name] += nbytes
        for name, entry in sections.items():
            # Only the positions may be padded, with fewer than 8 zero bytes.
            rest = self.read(offsets[name], min(entry.end - offsets[name], 8))
            if len(rest) >= 8 or rest.any() or (len(rest) and name != "positions"):
                raise FileFormatError(f"{name!r} has bytes that belong to no tensor")

    def _add(self, item: TensorEntry | Tie) -> None:
        name = item.name if isinstance(item, Tie) else item.row.name
        if name in self.tensors or name in self.ties:
            raise FileFormatError(f"duplicate tensor name {short_repr(name)}")
        if isinstance(item, TensorEntry):
            self.tensors[name] = item
        elif item.other in self.tensors:
            self.ties[name] = item.other
        else:
            raise FileFormatError(
                f"{short_repr(name)} is tied to {short_repr(item.other)}, which does not precede it"
            )
        self.names.append(name)
