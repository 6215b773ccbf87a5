"""A model's modes, modules, copies and memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set all modules to eval mode, and restore each module's own mode on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def without_attention_fast_path() -> Iterator[None]:
    """Let transformer layers call public operators instead of one fused private one."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def not_plain(tensor: Tensor) -> str | None:
    """Return the kind of a sparse, quantized or otherwise wrapped tensor; None if it is plain."""
    if tensor.layout != torch.strided:
        return f"{tensor.layout} tensor"
    return type(tensor).__name__ if hasattr(tensor, "__tensor_flatten__") else None


def check_plain(name: str, tensor: Tensor, caller: str, error: type[Exception]) -> None:
    """Raise an error of the given type, in the words of the caller, if a tensor is not plain."""
    kind = not_plain(tensor)
    if kind is not None:
        raise error(
            f"{name} is a {kind}: {caller} needs plain tensors, so call it before a quantization "
            "and convert sparse tensors with to_dense()"
        )


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules wherever they occur; return the model, which may itself be replaced."""
    for parent in list(model.modules()):
        # named_children would skip a second name of the same module.
        for name, child in list(parent._modules.items()):
            if child is not None and child in new:
                setattr(parent, name, new[child])
    return new.get(model, model)


def shared_copy(model: Model) -> Model:
    """Return a copy in eval mode that shares the original's parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()


def buffer_values(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all buffers by name. Names of one buffer share one copy."""
    copies = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
    return {
        name: copies[id(buffer)] for name, buffer in model.named_buffers(remove_duplicate=False)
    }


def set_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set buffers to copies of values, because a run of the model may have changed them.

    Values of buffers that the model does not have are ignored.
    """
    copies = {id(value): value.clone() for value in values.values()}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            value = values.get(f"{prefix}.{name}" if prefix else name)
            if buffer is not None and value is not None:
                module._buffers[name] = copies[id(value)]


@contextlib.contextmanager
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers in place on exit, because runs of a model may change them.

    Copies that share the buffers, and programs made of them, have the old values again, too.
    """
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in kept:
            module._buffers[name] = buffer
            if not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)


@contextlib.contextmanager
def keeping_attributes(*models: nn.Module, skip: type[nn.Module]) -> Iterator[None]:
    """Restore the attributes of all modules on exit, because runs of a model may change them.

    A model may remember its first input, for example. The models run with copies of their
    attributes. Parameters, buffers, replaced forwards and modules of the type `skip` stay. Hooks
    that a run registers are removed: the attribute that says so is, too, and the next run would
    register them again.
    """
    others = vars(nn.Module()).keys() | {"forward"}
    modules = [module for model in models for module in model.modules()]
    hooks = [
        (one, copy.copy(one))
        for module in modules
        for name, one in vars(module).items()
        if name in others and "_hooks" in name
    ]
    kept = [
        (vars(module), {name: one for name, one in vars(module).items() if name not in others})
        for module in modules
        if not isinstance(module, skip)
    ]
    tensors = [one for model in models for one in (*model.parameters(), *model.buffers())]
    memo: dict[int, object] = {id(one): one for one in (*modules, *tensors)}
    try:
        for attributes, values in kept:
            for name, value in values.items():
                with contextlib.suppress(Exception):  # it cannot be copied, such as an open file
                    attributes[name] = copy.deepcopy(value, memo)
        yield
    finally:
        for one, before in hooks:  # in place, since the handles that remove hooks refer to it
            one.clear()
            one.update(before)
        for attributes, values in kept:
            for name in attributes.keys() - values.keys() - others:
                del attributes[name]
            attributes.update(values)


def memory_key(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two strided tensors iff they view the same memory alike.

    Two names of a state dict with equal keys are tied: they hold the same tensor. Empty tensors
    have no memory, so that their keys say nothing.
    """
    view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *view)


def total_nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors. Tensors that start at the same address count once."""
    return sum({(tensor.device, tensor.data_ptr()): tensor.nbytes for tensor in tensors}.values())
