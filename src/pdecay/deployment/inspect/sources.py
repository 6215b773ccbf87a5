"""The kinds of files that hold weights, behind one face: tensors that are read block by block."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdecay.deployment.files.codec import BLOCK, Positions
from pdecay.deployment.files.container import FileFormatError, shown
from pdecay.deployment.files.dtypes import BY_TORCH, DType, to_array
from pdecay.deployment.files.reading import Stored, TensorFile

# What the tensors of a checkpoint are called that holds more than a state dict.
_USUAL_KEYS = ("state_dict", "model_state_dict", "model", "module")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal; torch writes its errors with them


@dataclass(frozen=True)
class Source:
    """A tensor that can be read: ``blocks()`` gives stored elements, all others are zero.

    Args:
        nbytes: what it takes in the file.
        stored: the number of stored elements.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    size: int
    nbytes: int
    stored: int
    encoding: str
    blocks: Callable[[], Iterator[tuple[slice | Positions, NDArray[Any]]]]


@dataclass(frozen=True)
class Opened:
    """A file: its kind, the strings that it carries, its tensors, and further names of these."""

    kind: str
    metadata: dict[str, str]
    sources: list[Source]
    ties: dict[str, str]


@contextmanager
def opened(path: str | os.PathLike[str], key: str | None = None) -> Iterator[Opened]:
    """Open a file of weights, whatever its name ends in.

    Args:
        path: of a sparse file, a safetensors file or a file of ``torch.save``.
        key: for a checkpoint, what its state dict is called.
    """
    if _is_torch(Path(path)):
        yield _torch_file(path, key)
        return
    if key is not None:
        raise FileFormatError("a key is for checkpoints of torch.save, and this is not one")
    with TensorFile(path) as file:
        file.check_contents()
        yield Opened(
            kind="pdecay's sparse file" if file.is_sparse else "safetensors file",
            metadata=file.metadata,
            sources=[_of_file(file, stored) for stored in file.tensors.values()],
            ties=file.ties,
        )


def _of_file(file: TensorFile, stored: Stored) -> Source:
    row = stored.row
    return Source(
        name=row.name,
        dtype=row.dtype,
        shape=row.shape,
        size=row.encoding.size,
        nbytes=row.values_nbytes + row.encoding.nbytes,
        stored=row.encoding.count,
        encoding=row.encoding.kind,
        blocks=lambda: file.blocks(stored),
    )


def _is_torch(path: Path) -> bool:
    """By the first bytes: those of a zip archive, or of a pickle as torch wrote them before."""
    if not path.is_file():
        return False  # the error of the other kind says what it is
    with open(path, "rb") as file:
        start = file.read(2)
    return start in (b"PK", b"\x80\x02")


def _torch_file(path: str | os.PathLike[str], key: str | None) -> Opened:
    state = _state_dict(_unpickled(path), key)
    sources: list[Source] = []
    ties: dict[str, str] = {}
    known: dict[object, str] = {}
    for name, tensor in state.items():
        if tensor.layout == torch.strided and tensor.numel():
            memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            first = known.setdefault(memory, name)
            if first != name:
                ties[name] = first
                continue
        sources.append(_of_tensor(name, tensor))
    return Opened("file of torch.save", {}, sources, ties)


def _unpickled(path: str | os.PathLike[str]) -> object:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # the old format
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = _COLORS.sub("", str(error)).split("\n")[0][:200]
        raise FileFormatError(
            f"torch.load(weights_only=True) refuses it ({type(error).__name__}: {reason}); a file "
            "of torch.save(model.state_dict(), path) can be read"
        ) from None


def _state_dict(loaded: object, key: str | None) -> dict[str, Tensor]:
    if key is not None:
        if not isinstance(loaded, Mapping) or key not in loaded:
            has = shown(list(loaded)) if isinstance(loaded, Mapping) else type(loaded).__name__
            raise FileFormatError(f"it has no {shown(key)}, but {has}")
        loaded = loaded[key]
    if isinstance(loaded, Tensor):
        return {key or "tensor": loaded}
    if not isinstance(loaded, Mapping):
        raise FileFormatError(f"it holds a {type(loaded).__name__}, not a state dict")
    tensors = _tensors(loaded)
    if tensors:
        return tensors
    inside = {k: v for k, v in loaded.items() if isinstance(v, Mapping) and _tensors(v)}
    usual = [k for k in _USUAL_KEYS if k in inside]
    if len(inside) == 1 or usual:
        return _tensors(inside[usual[0]] if usual else next(iter(inside.values())))
    if inside:
        raise FileFormatError(f"it has several state dicts: choose one of {shown(list(inside))}")
    raise FileFormatError("it holds no tensors")


def _tensors(mapping: Mapping[Any, object]) -> dict[str, Tensor]:
    return {str(name): value for name, value in mapping.items() if isinstance(value, Tensor)}


def _of_tensor(name: str, tensor: Tensor) -> Source:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.dtype not in BY_TORCH or tensor.is_meta:
        what = "no values" if tensor.is_meta else f"dtype {tensor.dtype}"
        raise FileFormatError(f"{shown(name)} has {what}, which cannot be counted")

    def blocks() -> Iterator[tuple[slice | Positions, NDArray[Any]]]:
        array = to_array(tensor if tensor.layout == torch.strided else tensor.to_dense())
        for start in range(0, array.size, BLOCK):
            block = array[start : start + BLOCK]
            yield slice(start, start + len(block)), np.ascontiguousarray(block)

    return Source(
        name=name,
        dtype=BY_TORCH[tensor.dtype],
        shape=tuple(tensor.shape),
        size=tensor.numel(),
        nbytes=tensor.numel() * tensor.itemsize,
        stored=tensor.numel(),
        encoding="dense",
        blocks=blocks,
    )
