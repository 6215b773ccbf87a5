"""Writing a file of tensors, with no more memory than one of them takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdecay._utils.files import replacing
from pdecay.deployment.files import table
from pdecay.deployment.files.codec import BLOCK, Bytes, Encoding, encode
from pdecay.deployment.files.container import DTYPE_BITS, Entry, header_bytes
from pdecay.deployment.files.dtypes import BY_TORCH, DType, to_array
from pdecay.deployment.files.reading import TIED
from pdecay.deployment.files.report import StoredTensor
from pdecay.deployment.files.table import Row, Tie

# A tensor, or the name of the one that it is tied to.
State = Mapping[str, Tensor | str]

# Leaving zeros out must save more than what the longer line of the table costs, about.
_LONGER_LINE = 8


def write_sparse(
    path: Path, state: State, metadata: Mapping[str, str]
) -> tuple[list[StoredTensor], int]:
    """Positions, the table, and the values by dtype. Returns the tensors and the file's size.

    A tensor is read twice, for its positions and for its values, so that nothing is kept of it but
    its row. The header needs the table's length: it comes last, into room that was left for it.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    dtypes = sorted(
        {BY_TORCH[tensor.dtype] for tensor in tensors.values()},
        key=lambda dtype: (-dtype.itemsize, dtype.name),  # so each starts at a multiple of its own
    )
    with replacing(path) as file:
        most = sum(tensor.nbytes for tensor in tensors.values())
        most += sum(2000 + 12 * len(name) for name in state)  # lines of the table
        room = len(_sparse_header(most, most, dict.fromkeys(dtypes, most), metadata, 0.0))
        file.write(bytes(room))
        rows: list[Row] = []
        stored: list[StoredTensor] = []
        for name, tensor in tensors.items():
            row, zeros, positions = _encoded(name, tensor)
            for piece in positions:
                file.write(piece.data)
            rows.append(row)
            stored.append(StoredTensor.of(row, zeros))
        values = {
            dtype: sum(row.values_nbytes for row in rows if row.dtype == dtype) for dtype in dtypes
        }
        by_name = {row.name: row for row in rows}
        lines = table.to_lines(
            by_name[name] if isinstance(value, Tensor) else Tie(name, value)
            for name, value in state.items()
        )
        listed = table.compressed(lines, file.tell() + sum(values.values()))
        file.write(bytes(-(file.tell() + len(listed)) % 8))
        positions_nbytes = file.tell() - room
        file.write(listed)
        for dtype in dtypes:
            for row in rows:
                if row.dtype == dtype:
                    _write_values(file, row, tensors[row.name])
        size = file.tell()
        file.seek(0)
        share = _sparsity(stored)
        file.write(_sparse_header(positions_nbytes, len(listed), values, metadata, share, room))
    return stored, size


def _encoded(name: str, tensor: Tensor) -> tuple[Row, int, list[Bytes]]:
    """How a tensor is stored, its number of zeros, and the bytes of its positions."""
    dtype, array = BY_TORCH[tensor.dtype], to_array(tensor)
    zeros = _count_zeros(array, dtype)
    encoding = Encoding("dense", array.size, array.size)
    positions: list[Bytes] = []
    if zeros * dtype.itemsize > _LONGER_LINE:
        sparse, data = encode(
            lambda: map(dtype.nonzero, _blocks(array)), array.size, array.size - zeros
        )
        if sparse.nbytes + _LONGER_LINE < zeros * dtype.itemsize:
            encoding, positions = sparse, data
    return Row(name, dtype, tuple(tensor.shape), encoding), zeros, positions


def _write_values(file: IO[bytes], row: Row, tensor: Tensor) -> None:
    start = file.tell()
    for block in _blocks(to_array(tensor)):
        nonzero = row.dtype.nonzero(block)
        if row.encoding.kind != "dense":
            block = np.compress(nonzero, block)  # five times as fast as block[nonzero]
        elif row.dtype.sign:
            block = np.where(nonzero, block, block.dtype.type(0))  # -0.0 is written as 0.0
        if row.dtype.torch == torch.bool:
            block = (block != 0).view(np.uint8)  # True is 1, whatever the memory holds
        file.write(block.data)
    if file.tell() - start != row.values_nbytes:
        raise RuntimeError(f"{row.name!r} changed while it was saved: save it when nothing trains")


def _sparse_header(
    positions: int,
    lines: int,
    values: Mapping[DType, int],
    metadata: Mapping[str, str],
    sparsity: float,
    at_least: int = 0,
) -> bytes:
    parts = [("positions", "U8", positions), ("table", "U8", lines)]
    parts += [(f"values.{dtype.name}", dtype.stored_as, n) for dtype, n in values.items()]
    return header_bytes(
        _one_after_the_other(
            (name, dtype, (8 * n // DTYPE_BITS[dtype],), n) for name, dtype, n in parts
        ),
        {**metadata, "sparsity": f"{sparsity:.6f}"},
        at_least,
    )


def write_dense(
    path: Path, state: State, metadata: Mapping[str, str]
) -> tuple[list[StoredTensor], int]:
    """The file that every user of safetensors expects. Returns the tensors and the file's size."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    # As safetensors has it: by alignment, then by name.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    parts = []
    stored = []
    for name in names:
        tensor, dtype = tensors[name], BY_TORCH[tensors[name].dtype]
        if name == "__metadata__":
            raise ValueError(f"{name!r} is no name for a tensor in safetensors: rename it")
        if dtype.name not in DTYPE_BITS or (dtype.packed > 1 and not tensor.ndim):
            raise ValueError(f"{name!r} has dtype {tensor.dtype}, which safetensors does not know")
        shape = tuple(tensor.shape)
        if dtype.packed > 1:
            shape = (*shape[:-1], shape[-1] * dtype.packed)
        parts.append((name, dtype.name, shape, tensor.nbytes))
        row = Row(
            name, dtype, tuple(tensor.shape), Encoding("dense", tensor.numel(), tensor.numel())
        )
        stored.append(StoredTensor.of(row, _count_zeros(to_array(tensor), dtype)))
    metadata = {**metadata, "sparsity": f"{_sparsity(stored):.6f}"}
    metadata |= {f"{TIED}{name}": value for name, value in state.items() if isinstance(value, str)}
    with replacing(path) as file:
        file.write(header_bytes(_one_after_the_other(parts), metadata))
        for name in names:
            for block in _blocks(to_array(tensors[name])):
                file.write(block.data)
        return stored, file.tell()


def _one_after_the_other(
    parts: Iterable[tuple[str, str, tuple[int, ...], int]],
) -> Iterator[Entry]:
    place = 0
    for name, dtype, shape, nbytes in parts:
        yield Entry(name, dtype, shape, place, place + nbytes)
        place += nbytes


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for start in range(0, len(array), BLOCK):
        yield array[start : start + BLOCK]


def _count_zeros(array: NDArray[Any], dtype: DType) -> int:
    return array.size - sum(int(np.count_nonzero(dtype.nonzero(b))) for b in _blocks(array))


def _sparsity(stored: list[StoredTensor]) -> float:
    """The share of zeros among the weights proper, which have two dimensions or more."""
    weights = [tensor for tensor in stored if len(tensor.shape) > 1]
    size = sum(tensor.size for tensor in weights)
    return sum(tensor.zeros for tensor in weights) / size if size else 0.0
