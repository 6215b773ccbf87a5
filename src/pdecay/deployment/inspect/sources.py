"""Readers of weight files of all kinds, which yield their tensors block by block.

Files are untrusted. The readers of each kind check that tensors lie within the file. This module
bounds the elements to read by the file's size: a few hundred bytes can otherwise claim terabytes by
strides of zero.
"""

from __future__ import annotations

import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdecay.deployment.files.codec import BLOCK, Encoding
from pdecay.deployment.files.container import FileFormatError, short_repr
from pdecay.deployment.files.dtypes import BY_TORCH, to_array
from pdecay.deployment.files.matching import tie_key
from pdecay.deployment.files.reader import Block, TensorFile
from pdecay.deployment.files.table import EXPANSION, Row
from pdecay.deployment.inspect.pickles import PickleError
from pdecay.deployment.inspect.torch_files import is_torch_file, read_torch_file

# Usual keys of the model's state dict in a checkpoint.
_USUAL_KEYS = ("state_dict", "model_state_dict", "model", "module")
_LAYER_BYTES = 1000  # of memory for a name and its counts
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
        yield _torch_weights(read_state_dict(path, key), EXPANSION * os.path.getsize(path))
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


def read_state_dict(path: str | os.PathLike[str], key: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a ``torch.save`` file.

    Args:
        path: the file.
        key: the key of the state dict in a checkpoint with several.

    Raises:
        FileFormatError: if the file cannot be loaded safely or has no unique state dict.
    """
    return _tensors(_find_state_dict(path, key))


def read_loadable_state(
    path: str | os.PathLike[str], key: str | None = None
) -> OrderedDict[str, Any]:
    """Return a state dict for ``load_state_dict``; the arguments are as of `read_state_dict`.

    Besides the tensors it has the extra state of modules, and the versions of the modules: without
    them, a module converts its tensors as if an old version had written them.
    """
    found = _find_state_dict(path, key)
    state: Any = OrderedDict(_tensors(found))
    state.update((k, v) for k, v in found.items() if _is_extra_state(k))
    versions = getattr(found, "_metadata", None)
    if isinstance(versions, Mapping) and all(isinstance(v, dict) for v in versions.values()):
        for values in versions.values():
            # load_state_dict(state, assign=True) leaves this entry in the state. It would replace
            # the parameters, with their dtypes and ties, by tensors that read the file.
            values.pop("assign_to_params_buffers", None)
        state._metadata = versions
    return state  # type: ignore[no-any-return]


def _find_state_dict(path: str | os.PathLike[str], key: str | None) -> Mapping[Any, Any]:
    loaded = _read(path)
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
    tensors = _tensors(loaded)
    # A file may have one large dict under many keys: look into each dict once.
    dicts = {id(v): v for v in loaded.values() if isinstance(v, Mapping)}
    with_tensors = {key for key, v in dicts.items() if _tensors(v)}
    # A state dict has no dicts, except the extra state of modules. Tensors beside one, such as the
    # state of a random number generator, are not weights.
    nested = {k: v for k, v in loaded.items() if id(v) in with_tensors and not _is_extra_state(k)}
    usual = [k for k in _USUAL_KEYS if k in nested]
    if usual or (len(nested) == 1 and not tensors):
        return nested[usual[0]] if usual else next(iter(nested.values()))
    if nested:
        beside = " beside tensors" if tensors else ""
        raise FileFormatError(
            f"contains {len(nested)} state dict{'s' * (len(nested) > 1)}{beside}: pass one of "
            f"{short_repr(list(nested))} as the key"
        )
    if tensors:
        return loaded
    raise FileFormatError("contains no tensors")


def _is_extra_state(name: object) -> bool:
    return str(name).endswith("_extra_state")


def _read(path: str | os.PathLike[str]) -> Any:
    try:
        return read_torch_file(path)
    except PickleError as error:
        raise FileFormatError(str(error)) from None
    except Exception as error:  # a damaged file can raise any error
        raise FileFormatError(
            f"cannot be read ({type(error).__name__}: {_reason(error)}); expected a file "
            "written by torch.save(model.state_dict(), path)"
        ) from None


def _reason(error: Exception) -> str:
    return _COLORS.sub("", str(error)).split("\n")[0][:200]


def _tensors(mapping: Mapping[Any, object]) -> dict[str, Tensor]:
    return {str(name): one for name, one in mapping.items() if isinstance(one, Tensor)}


def _torch_weights(state: Mapping[str, Tensor], limit: int) -> WeightFile:
    """Return the sources of a state dict whose elements take at most `limit` bytes."""
    sources: list[Source] = []
    ties: dict[str, str] = {}
    first_names: dict[object, str] = {}
    for name, tensor in state.items():
        _check_countable(name, tensor)
        first = first_names.setdefault(tie_key(tensor), name)
        if first == name:
            sources.append(_tensor_source(name, tensor))
        else:
            ties[name] = first
    needed = sum(source.row.stored_nbytes + _LAYER_BYTES for source in sources)
    if needed > limit:
        raise FileFormatError(
            f"the tensors take {needed:,} bytes, more than {limit:,}, {EXPANSION} times the file's "
            "size: their elements share memory; save contiguous tensors"
        )
    return WeightFile("torch.save file", {}, sources, ties)


def _check_countable(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise FileFormatError(f"{short_repr(name)} has no values, which cannot be counted")


def _tensor_source(name: str, tensor: Tensor) -> Source:
    shape, size = tuple(tensor.shape), math.prod(tensor.shape)
    if tensor.layout != torch.strided:
        stored = _stored_count(tensor)
        # A tensor may have far more row pointers than elements.
        index_bytes = sum(one.nbytes for one in _indices(tensor))
        encoding = Encoding("coo", size, stored, unary_bytes=index_bytes)
        row = Row(name, BY_TORCH[tensor.dtype], shape, encoding)
        return Source(row, partial(_readable, name, _sparse_blocks, tensor))
    row = Row(name, BY_TORCH[tensor.dtype], shape, Encoding("dense", size, size))
    return Source(row, partial(_readable, name, _dense_blocks, tensor))


def _stored_count(tensor: Tensor) -> int:
    """Return the number of stored elements of a sparse tensor."""
    return (tensor._values() if tensor.is_sparse else tensor.values()).numel()


def _indices(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.is_sparse:
        return (tensor._indices(),)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices()
    return tensor.ccol_indices(), tensor.row_indices()


def _readable(
    name: str, blocks: Callable[[Tensor], Iterator[Block]], tensor: Tensor
) -> Iterator[Block]:
    try:
        yield from blocks(tensor)
    except Exception as error:  # torch does not read every dtype in every layout
        raise FileFormatError(
            f"{short_repr(name)} cannot be counted ({type(error).__name__}: {_reason(error)})"
        ) from None


def _dense_blocks(tensor: Tensor) -> Iterator[Block]:
    begin = 0
    for part in _parts(tensor.detach()):
        array = to_array(part)
        for start in range(0, array.size, BLOCK):
            block = array[start : start + BLOCK]
            yield slice(begin, begin + len(block)), np.ascontiguousarray(block)
            begin += len(block)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield consecutive parts in row-major order that are contiguous or small enough to copy."""
    is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if is_plain or tensor.numel() <= BLOCK:
        yield tensor
        return
    rows = BLOCK // (tensor.numel() // len(tensor))
    for part in tensor.split(max(1, rows)):
        yield from _parts(part if rows else part[0])


def _sparse_blocks(tensor: Tensor) -> Iterator[Block]:
    """Yield the stored elements of a sparse tensor, without making it dense."""
    if not _stored_count(tensor):
        return  # its blocks may have any size, for which torch would make indices
    tensor = tensor.detach().to_sparse_coo().coalesce()
    indices, values = tensor.indices(), tensor.values()
    inner = math.prod(values.shape[1:])  # a hybrid tensor stores a dense block at each index
    start = torch.zeros(len(values), dtype=torch.int64)
    for index, size in zip(indices, tensor.shape, strict=False):
        start = start * size + index
    where = (start[:, None] * inner + torch.arange(inner)).flatten().numpy()
    array = to_array(values)
    for begin in range(0, array.size, BLOCK):
        block = slice(begin, begin + BLOCK)
        yield where[block], np.ascontiguousarray(array[block])
