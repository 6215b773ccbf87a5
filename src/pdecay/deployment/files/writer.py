"""Write tensors to a sparse or an ordinary safetensors file, one tensor at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdecay._utils.files import replacing
from pdecay.deployment.files import table
from pdecay.deployment.files.codec import BLOCK, Bytes, Encoding, encode
from pdecay.deployment.files.container import DTYPE_BITS, header_bytes
from pdecay.deployment.files.dtypes import BY_TORCH, DType, to_array
from pdecay.deployment.files.reader import TIED
from pdecay.deployment.files.save_report import StoredTensor
from pdecay.deployment.files.table import Row, Tie

# Tensors by name; a string is the name of the tensor that this one is tied to.
State = Mapping[str, Tensor | str]

# A sparse encoding must save more bytes than its longer table line costs.
_LINE_COST = 8


def write_sparse(
    path: Path, state: State, metadata: Mapping[str, str]
) -> tuple[list[StoredTensor], int]:
    """Write a sparse file; return the stored tensors and the file's size.

    The file holds the positions, the table and the values by dtype. Each tensor is read twice,
    for its positions and for its values, so only its table row is kept in between. The header
    depends on the other parts' sizes: it is written last, into space reserved at the start.
    """
    tensors = _tensors(state)
    dtypes = sorted(
        {BY_TORCH[tensor.dtype] for tensor in tensors.values()},
        key=lambda dtype: (-dtype.itemsize, dtype.name),  # keeps each section aligned
    )
    with replacing(path) as file:
        limit = sum(tensor.nbytes for tensor in tensors.values())
        limit += sum(2000 + 12 * len(name) for name in state)  # table lines
        reserved = len(_sparse_header(limit, limit, dict.fromkeys(dtypes, limit), metadata, 0.0))
        file.write(bytes(reserved))
        rows: dict[str, Row] = {}
        digests: dict[str, int] = {}
        stored: list[StoredTensor] = []
        for name, tensor in tensors.items():
            row, zeros, positions, digests[name] = _encode(name, tensor)
            for piece in positions:
                file.write(piece.data)
            rows[name] = row
            stored.append(StoredTensor.of(row, zeros))
        values = {
            dtype: sum(row.values_nbytes for row in rows.values() if row.dtype == dtype)
            for dtype in dtypes
        }
        lines = table.format_lines(
            rows[name] if isinstance(value, Tensor) else Tie(name, value)
            for name, value in state.items()
        )
        compressed = table.compress(lines, file.tell() + sum(values.values()))
        file.write(bytes(-(file.tell() + len(compressed)) % 8))
        positions_nbytes = file.tell() - reserved
        file.write(compressed)
        for dtype in dtypes:
            for row in rows.values():
                if row.dtype == dtype:
                    _write_values(file, row, tensors[row.name], digests[row.name])
        size = file.tell()
        sizes = (positions_nbytes, len(compressed), values)
        file.seek(0)
        file.write(_sparse_header(*sizes, metadata, _sparsity(stored), reserved))
    return stored, size


def write_dense(
    path: Path, state: State, metadata: Mapping[str, str]
) -> tuple[list[StoredTensor], int]:
    """Write an ordinary safetensors file; return the stored tensors and the file's size."""
    # The order of safetensors: by alignment, then by name.
    tensors = sorted(_tensors(state).items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    entries = []
    stored = []
    for name, tensor in tensors:
        dtype, shape = BY_TORCH[tensor.dtype], tuple(tensor.shape)
        if name == "__metadata__":
            raise ValueError(f"safetensors reserves the name {name!r}: rename the tensor")
        if dtype.name not in DTYPE_BITS or (dtype.packed > 1 and not shape):
            raise ValueError(
                f"{name!r} has dtype {tensor.dtype}, which safetensors does not support"
            )
        row = Row(name, dtype, shape, Encoding("dense", tensor.numel(), tensor.numel()))
        stored.append(StoredTensor.of(row, _count_zeros(to_array(tensor), dtype)))
        if dtype.packed > 1:
            shape = (*shape[:-1], shape[-1] * dtype.packed)
        entries.append((name, dtype.name, shape, tensor.nbytes))
    metadata = {**metadata, "sparsity": f"{_sparsity(stored):.6f}"}
    metadata |= {f"{TIED}{name}": value for name, value in state.items() if isinstance(value, str)}
    with replacing(path) as file:
        file.write(header_bytes(entries, metadata))
        for _, tensor in tensors:
            for block in _blocks(to_array(tensor)):
                file.write(_plain_bools(block, tensor.dtype).data)
        return stored, file.tell()


def _tensors(state: State) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _encode(name: str, tensor: Tensor) -> tuple[Row, int, list[Bytes], int]:
    """Return the table row, the number of zeros, the bytes of the positions, and their digest."""
    dtype, array = BY_TORCH[tensor.dtype], to_array(tensor)
    zeros = _count_zeros(array, dtype)
    encoding = Encoding("dense", array.size, array.size)
    positions: list[Bytes] = []
    digest = 0

    def masks() -> Iterator[NDArray[np.bool_]]:
        nonlocal digest
        digest = 0
        for nonzero in map(dtype.nonzero, _blocks(array)):
            digest = zlib.crc32(nonzero.data, digest)
            yield nonzero

    if zeros * dtype.itemsize > _LINE_COST:
        sparse, data = encode(masks, array.size, array.size - zeros)
        if sparse.nbytes + _LINE_COST < zeros * dtype.itemsize:
            encoding, positions = sparse, data
    return Row(name, dtype, tuple(tensor.shape), encoding), zeros, positions, digest


def _write_values(file: IO[bytes], row: Row, tensor: Tensor, digest: int) -> None:
    """Write the values of a tensor; raise unless its non-zeros are at the written positions.

    Their number is not enough: with other positions, all values in between would be misplaced.
    """
    is_sparse = row.encoding.kind != "dense"
    start, found = file.tell(), 0
    for block in _blocks(to_array(tensor)):
        nonzero = row.dtype.nonzero(block)
        if is_sparse:
            found = zlib.crc32(nonzero.data, found)
            block = np.compress(nonzero, block)  # five times as fast as block[nonzero]
        elif row.dtype.sign:
            block = np.where(nonzero, block, block.dtype.type(0))  # write -0.0 as 0.0
        file.write(_plain_bools(block, row.dtype.torch).data)
    if file.tell() - start != row.values_nbytes or (is_sparse and found != digest):
        raise RuntimeError(f"{row.name!r} changed during the save: do not train while saving")


def _plain_bools(block: NDArray[Any], dtype: torch.dtype) -> NDArray[Any]:
    """Return bools with 1 for True, which may be any non-zero byte in memory."""
    return (block != 0).view(np.uint8) if dtype == torch.bool else block


def _sparse_header(
    positions: int,
    table_nbytes: int,
    values: Mapping[DType, int],
    metadata: Mapping[str, str],
    sparsity: float,
    min_length: int = 0,
) -> bytes:
    parts = [("positions", "U8", positions), ("table", "U8", table_nbytes)]
    parts += [(f"values.{dtype.name}", dtype.stored_as, n) for dtype, n in values.items()]
    return header_bytes(
        ((name, dtype, (8 * n // DTYPE_BITS[dtype],), n) for name, dtype, n in parts),
        {**metadata, "sparsity": f"{sparsity:.6f}"},
        min_length,
    )


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for start in range(0, len(array), BLOCK):
        yield array[start : start + BLOCK]


def _count_zeros(array: NDArray[Any], dtype: DType) -> int:
    return array.size - sum(int(np.count_nonzero(dtype.nonzero(b))) for b in _blocks(array))


def _sparsity(stored: list[StoredTensor]) -> float:
    """Return the fraction of zeros in tensors with two or more dimensions."""
    weights = [tensor for tensor in stored if len(tensor.shape) > 1]
    size = sum(tensor.size for tensor in weights)
    return sum(tensor.zeros for tensor in weights) / size if size else 0.0
