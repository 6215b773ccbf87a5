"""Readers of weight files of all kinds, which yield their tensors block by block."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdecay.deployment.files.codec import BLOCK, Encoding
from pdecay.deployment.files.container import FileFormatError, short_repr
from pdecay.deployment.files.dtypes import BY_TORCH, to_array
from pdecay.deployment.files.model_io import tie_key
from pdecay.deployment.files.reader import Block, TensorFile
from pdecay.deployment.files.table import Row

# Usual keys of the model's state dict in a checkpoint.
_USUAL_KEYS = ("state_dict", "model_state_dict", "model", "module")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")  # terminal codes in torch's error messages


@dataclass(frozen=True)
class Source:
    """A readable tensor: ``blocks()`` yields its stored elements, all others are zero."""

    row: Row
    blocks: Callable[[], Iterator[Block]]


@dataclass(frozen=True)
class WeightFile:
    """An open file: its kind, metadata, tensors, and second names of tied tensors."""

    kind: str
    metadata: dict[str, str]
    sources: list[Source]
    ties: dict[str, str]


@contextmanager
def open_weights(path: str | os.PathLike[str], key: str | None = None) -> Iterator[WeightFile]:
    """Open a weight file; its kind is detected from its contents.

    Args:
        path: a sparse file, a safetensors file or a ``torch.save`` checkpoint.
        key: the key of the state dict in a checkpoint.
    """
    if is_torch_file(path):
        yield _torch_weights(read_state_dict(path, key))
        return
    if key is not None:
        raise FileFormatError("a key needs a torch.save checkpoint, which this file is not")
    with TensorFile(path) as file:
        file.check_contents()
        yield WeightFile(
            kind="pdecay sparse file" if file.is_sparse else "safetensors file",
            metadata=file.metadata,
            sources=[
                Source(entry.row, partial(file.blocks, entry)) for entry in file.tensors.values()
            ],
            ties=file.ties,
        )


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a file starts like a zip archive or an old torch pickle."""
    if not Path(path).is_file():
        return False  # the safetensors reader reports the error
    with open(path, "rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02")


def read_state_dict(path: str | os.PathLike[str], key: str | None = None) -> dict[str, Tensor]:
    """Return the state dict of a ``torch.save`` file, loaded with ``weights_only=True``.

    Args:
        path: the file.
        key: the key of the state dict in a checkpoint with several.

    Raises:
        FileFormatError: if the file cannot be loaded safely or has no unique state dict.
    """
    loaded = _unpickle(path)
    if key is not None:
        if not isinstance(loaded, Mapping) or key not in loaded:
            found = (
                short_repr(list(loaded)) if isinstance(loaded, Mapping) else type(loaded).__name__
            )
            raise FileFormatError(f"no key {short_repr(key)} in the checkpoint, found {found}")
        loaded = loaded[key]
    if isinstance(loaded, Tensor):
        return {key or "tensor": loaded}
    if not isinstance(loaded, Mapping):
        raise FileFormatError(f"contains a {type(loaded).__name__}, expected a state dict")
    if tensors := _tensors(loaded):
        return tensors
    nested = {k: v for k, v in loaded.items() if isinstance(v, Mapping) and _tensors(v)}
    usual = [k for k in _USUAL_KEYS if k in nested]
    if len(nested) == 1 or usual:
        return _tensors(nested[usual[0]] if usual else next(iter(nested.values())))
    if nested:
        raise FileFormatError(
            f"contains several state dicts: pass one of {short_repr(list(nested))} as the key"
        )
    raise FileFormatError("contains no tensors")


def _unpickle(path: str | os.PathLike[str]) -> object:
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
            f"torch.load(weights_only=True) failed ({type(error).__name__}: {reason}); expected a "
            "file written by torch.save(model.state_dict(), path)"
        ) from None


def _tensors(mapping: Mapping[Any, object]) -> dict[str, Tensor]:
    return {str(name): value for name, value in mapping.items() if isinstance(value, Tensor)}


def _torch_weights(state: Mapping[str, Tensor]) -> WeightFile:
    sources: list[Source] = []
    ties: dict[str, str] = {}
    first_names: dict[object, str] = {}
    for name, tensor in state.items():
        first = first_names.setdefault(tie_key(tensor), name)
        if first == name:
            sources.append(_tensor_source(name, tensor))
        else:
            ties[name] = first
    return WeightFile("torch.save file", {}, sources, ties)


def _tensor_source(name: str, tensor: Tensor) -> Source:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.dtype not in BY_TORCH or tensor.is_meta:
        problem = "no values" if tensor.is_meta else f"dtype {tensor.dtype}"
        raise FileFormatError(f"{short_repr(name)} has {problem}, which cannot be counted")

    def blocks() -> Iterator[Block]:
        array = to_array(tensor if tensor.layout == torch.strided else tensor.to_dense())
        for start in range(0, array.size, BLOCK):
            block = array[start : start + BLOCK]
            yield slice(start, start + len(block)), np.ascontiguousarray(block)

    size = tensor.numel()
    encoding = Encoding("dense", size, size)
    return Source(Row(name, BY_TORCH[tensor.dtype], tuple(tensor.shape), encoding), blocks)
