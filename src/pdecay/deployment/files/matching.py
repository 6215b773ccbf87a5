"""The tensors of a model that the tensors of a file fill."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pdecay.deployment.files.container import short_repr
from pdecay.deployment.files.dtypes import BY_TORCH, to_array
from pdecay.deployment.files.programs import PROGRAM
from pdecay.deployment.files.reader import TensorFile
from pdecay.deployment.files.table import Row
from pdecay.deployment.model.state import memory_key

PathLike = str | os.PathLike[str]

_MAX_LISTED = 8


def tie_key(tensor: object) -> object:
    """Return a key that is equal for tied tensors; tensors without memory are never tied."""
    if not isinstance(tensor, Tensor) or is_lazy(tensor) or not tensor.numel():
        return object()
    return memory_key(tensor) if tensor.layout == torch.strided else object()


def match_targets(
    path: PathLike, file: TensorFile, model: nn.Module, strict: bool
) -> dict[str, list[Tensor]]:
    """Return the model's tensors to fill for each tensor of the file; raise if any does not fit."""
    state = model.state_dict()
    targets: dict[str, list[Tensor]] = {name: [] for name in file.tensors}
    problems = []
    if PROGRAM in file.names:
        raise ValueError(
            f"{os.fspath(path)} is a saved model with its program: call load(path, trusted=True) "
            "without a model"
        )
    for name in file.names:
        stored_name = file.ties.get(name, name)
        target = state.get(name)
        if isinstance(target, Tensor):
            problem = _mismatch(target, file.tensors[stored_name].row)
            problems += [f"{short_repr(name)} {problem}"] if problem else []
            targets[stored_name].append(target)
    if strict:
        # Ordinary files store only one name of tied weights, so one name is enough.
        filled = {tie_key(target) for group in targets.values() for target in group}
        absent = [name for name in state if name not in file.tensors and name not in file.ties]
        missing = [name for name in absent if tie_key(state[name]) not in filled]
        unexpected = [name for name in file.names if name not in state]
        for place, names in (("file", missing), ("model", unexpected)):
            if names:
                problems.append(f"missing in the {place}: {_listed(map(short_repr, names))}")
    if problems:
        raise ValueError(
            f"{os.fspath(path)} does not fit this {type(model).__name__}, which is unchanged: "
            f"{_listed(problems, '; ')}"
        )
    return targets


def check_ties(
    path: PathLike, file: TensorFile, model: nn.Module, targets: Mapping[str, list[Tensor]]
) -> None:
    """Raise ValueError if two tensors of a file are one in the model, but differ in the file.

    Call :meth:`TensorFile.check_contents` first.
    """
    first_names: dict[object, str] = {}
    for name, group in targets.items():
        for target in group:
            first = first_names.setdefault(tie_key(target), name)
            if first != name and not _same_values(file, first, name, target.dtype):
                raise ValueError(
                    f"{os.fspath(path)} does not fit this {type(model).__name__}, which is "
                    f"unchanged: {short_repr(first)} and {short_repr(name)} are tied in the model, "
                    "but differ in the file: load it into a model without this tie"
                )


def _same_values(file: TensorFile, one: str, other: str, dtype: torch.dtype) -> bool:
    """Return whether two tensors of a file have the same bits as elements of a dtype."""
    first, second = (to_array(file.load(file.tensors[name]).to(dtype)) for name in (one, other))
    return np.array_equal(first.view(np.uint8), second.view(np.uint8))


def _mismatch(target: Tensor, row: Row) -> str | None:
    """Return why a tensor of the file cannot be copied to the model's tensor, if so."""
    if is_lazy(target):
        return "is not initialised in the model: run the model once"
    if target.layout != torch.strided:
        return f"is a {target.layout} tensor in the model: load before the conversion"
    if tuple(target.shape) != row.shape:
        return f"has shape {list(row.shape)} in the file and {list(target.shape)} in the model"
    if target.dtype != row.dtype.torch and not _can_convert(row.dtype.torch, target.dtype):
        return f"is {row.dtype.torch} in the file, which cannot be cast to {target.dtype}"
    if target.is_meta:
        return "is on the meta device in the model: call model.to_empty(device=...) first"
    if hasattr(target, "full_tensor"):
        return "is sharded in the model: load before sharding"
    if hasattr(target, "__tensor_flatten__"):
        return f"is a {type(target).__name__} in the model: load before the quantization"
    if any(step == 0 and n > 1 for n, step in zip(target.shape, target.stride(), strict=True)):
        return "is expanded in the model: its elements share memory and cannot be filled"
    return None


def _can_convert(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether ``copy_`` converts elements; it has no kernel for two numbers in a byte."""
    kinds = (BY_TORCH.get(source), BY_TORCH.get(target))
    packed = any(kind is not None and kind.packed > 1 for kind in kinds)
    return torch.can_cast(source, target) and not packed


def _listed(items: Iterable[str], separator: str = ", ") -> str:
    items = list(items)
    more = [f"and {len(items) - _MAX_LISTED:,} more"] if len(items) > _MAX_LISTED else []
    return separator.join(items[:_MAX_LISTED] + more)
