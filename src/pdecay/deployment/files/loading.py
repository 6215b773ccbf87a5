"""From a file to a model, or to a state dict."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pdecay.deployment.files.container import Container, check_byte_order, naming, shown
from pdecay.deployment.files.reading import TensorFile
from pdecay.deployment.files.table import Row

PathLike = str | os.PathLike[str]
Model = TypeVar("Model", bound=nn.Module)

_MOST_SHOWN = 8


@overload
def load(
    path: PathLike, model: None = None, *, strict: bool = True, max_bytes: int | None = None
) -> OrderedDict[str, Tensor]: ...


@overload
def load(path: PathLike, model: Model, *, strict: bool = True) -> Model: ...


def load(
    path: PathLike,
    model: Model | None = None,
    *,
    strict: bool = True,
    max_bytes: int | None = None,
) -> Model | OrderedDict[str, Tensor]:
    """Read a file that :func:`save` wrote, or any other safetensors file.

    A file is checked as a whole before any memory is taken or any weight is changed.

    Args:
        path: of the file.
        model: where given, the tensors go into it, in place, one at a time; they take its dtypes
            and devices.
        strict: as in ``load_state_dict``: whether names that the model or the file lacks are an
            error. Shapes that differ always are.
        max_bytes: the memory that a file may take without a model. By default 40 times the file's
            size, so that a small file cannot fill the machine: enough up to a sparsity of about
            98 % in float32. A model vouches for its own shapes, whatever the sparsity.

    Returns:
        The model; without one, a state dict of dense tensors on the CPU.

    Raises:
        FileFormatError: for a file that is damaged, hostile or larger in memory than allowed.
        ValueError: for a file that does not fit the model.
    """
    check_byte_order()
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"load needs a torch.nn.Module, got {type(model).__name__}")
    if model is not None and max_bytes is not None:
        raise ValueError("max_bytes is for a load without a model: a model vouches for its shapes")
    with naming(path), TensorFile(path, max_bytes) as file:
        if model is None:
            file.check_memory()
            file.check_contents()
            return _state_dict(file)
        targets = _targets(path, file, model, strict)
        file.check_contents()
        _copy(file, model, targets)
        return model


def read_metadata(path: PathLike) -> dict[str, str]:
    """The strings that a file carries: the user's own, and what pdecay noted."""
    with naming(path), Container(path) as file:
        return dict(file.metadata)


def _state_dict(file: TensorFile) -> OrderedDict[str, Tensor]:
    state: OrderedDict[str, Tensor] = OrderedDict()
    for name in file.names:
        tie = file.ties.get(name)
        state[name] = file.load(file.tensors[name]) if tie is None else state[tie]
    return state


def _targets(
    path: PathLike, file: TensorFile, model: nn.Module, strict: bool
) -> dict[str, list[Tensor]]:
    """For each tensor of the file, those of the model that it goes to; an error if any misfits."""
    state = model.state_dict()
    targets: dict[str, list[Tensor]] = {name: [] for name in file.tensors}
    problems = []
    for name in file.names:
        own = file.ties.get(name, name)
        target = state.get(name)
        if isinstance(target, Tensor):
            problem = _misfit(target, file.tensors[own].row)
            problems += [f"{shown(name)} {problem}"] if problem else []
            targets[own].append(target)
    if strict:
        # A weight of several names needs only one of them in the file, which is all that ordinary
        # files have.
        filled = {_memory(target) for group in targets.values() for target in group}
        absent = [name for name in state if name not in file.tensors and name not in file.ties]
        missing = [name for name in absent if _memory(state[name]) not in filled]
        unexpected = [name for name in file.names if name not in state]
        problems += [f"the file lacks {_listed(map(shown, missing))}"] if missing else []
        problems += [f"the model lacks {_listed(map(shown, unexpected))}"] if unexpected else []
    if problems:
        raise ValueError(
            f"{os.fspath(path)}: it does not fit this {type(model).__name__}, which was left as "
            f"it is: {_listed(problems, '; ')}"
        )
    return targets


def _misfit(target: Tensor, row: Row) -> str | None:
    if is_lazy(target):
        return "is not initialised in the model: run the model once"
    if tuple(target.shape) != row.shape:
        return f"has shape {list(row.shape)} in the file and {list(target.shape)} in the model"
    if target.dtype != row.dtype.torch and not torch.can_cast(row.dtype.torch, target.dtype):
        return (
            f"is {row.dtype.torch} in the file, which does not go into the model's {target.dtype}"
        )
    if target.is_meta:
        return "is on the meta device in the model: model.to_empty(device=...) gives it memory"
    if hasattr(target, "full_tensor"):
        return "is sharded in the model: load before you shard"
    if any(step == 0 and n > 1 for n, step in zip(target.shape, target.stride(), strict=True)):
        return "is expanded in the model, many elements in one place: it cannot be filled"
    return None


def _listed(items: Iterable[str], separator: str = ", ") -> str:
    items = list(items)
    more = [f"and {len(items) - _MOST_SHOWN:,} more"] if len(items) > _MOST_SHOWN else []
    return separator.join(items[:_MOST_SHOWN] + more)


def _memory(tensor: object) -> object:
    """What two tensors have in common that are one."""
    if not isinstance(tensor, Tensor) or is_lazy(tensor) or not tensor.numel():
        return object()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@torch.no_grad()
def _copy(file: TensorFile, model: nn.Module, targets: Mapping[str, list[Tensor]]) -> None:
    if not _is_live(model):
        fitting = {name: file.tensors[name] for name, group in targets.items() if group}
        state = {name: file.load(stored) for name, stored in fitting.items()}
        state |= {name: state[own] for name, own in file.ties.items() if own in state}
        model.load_state_dict(state, strict=False)  # the names have been compared
        return
    for name, group in targets.items():
        if group:
            _fill(group, file.load(file.tensors[name]))


def _fill(targets: list[Tensor], tensor: Tensor) -> None:
    # A function of its own: its tensor is gone before the next one is loaded.
    for target in {_memory(target): target for target in targets}.values():
        target.copy_(tensor)


def _is_live(model: nn.Module) -> bool:
    """Whether what ``state_dict()`` gives is the model's own memory, as it is but for some hooks.

    Where it is not, the model must be asked to load, and as a whole.
    """
    own: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
    own.update(model.named_parameters(remove_duplicate=False))
    return all(
        isinstance(tensor, Tensor) and name in own and _memory(tensor) == _memory(own[name])
        for name, tensor in model.state_dict().items()
        if not isinstance(tensor, Tensor) or tensor.numel()
    )
