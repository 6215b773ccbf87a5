"""The choice of a kernel for a weight: C, torch.compile, or none (torch's own operations).

A fused kernel does the update and the decay in one pass over memory, with a relative error of the
power below 2e-5 (2e-6 * p for p > 10). torch's own operations are exact to the bit and work for
every tensor. If a kernel is not available, the next one is used, and one warning gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from pdecay._core.tensors import is_tracing
from pdecay._optim.kernels import native
from pdecay._optim.kernels.layout import all_on_cpu, are_contiguous, is_readable
from pdecay._utils.user_warnings import warn_user

KernelName = Literal["native", "compiled"]

_only: KernelName | None = None
_warned: set[str] = set()


def kernel_for(tensor: Tensor, fused: bool | None) -> ModuleType | None:
    """Return the kernel module for a weight; None for torch's own operations.

    Args:
        tensor: the weight.
        fused: True asks for a kernel, False for none. None uses the C kernel on the CPU and
            torch.compile on CUDA, where they work.
    """
    if fused is False or is_tracing():
        return None
    if _only != "compiled":
        unsupported = native.why_not(tensor)
        if unsupported is None:
            failure = native.available()
            if failure is None:
                return native
            _warn_once(f"the fused C kernel cannot be built ({failure})")
        elif fused and tensor.device.type == "cpu":
            _warn_once(f"the fused C kernel does not support a tensor that is {unsupported}")
    if (fused or _compiles_by_default(tensor)) and _only != "native":
        from pdecay._optim.kernels import compiled

        unsupported = compiled.why_not(tensor)
        failure = unsupported or compiled.available(tensor.device)
        if failure is None:
            return compiled
        if fused or not unsupported:
            _warn_once(f"torch.compile cannot run the fused step ({failure})")
    return None


def may_use_c(fused: bool | None) -> bool:
    """Check whether C may compute, for tensors that it can read."""
    return fused is not False and _only != "compiled" and not is_tracing()


def table_for(
    streams: Sequence[Sequence[Any]], counts: Sequence[Tensor] | None, fused: bool | None
) -> native.Table | None:
    """Return the addresses of all tensors if the C kernel can update them in one call, else None.

    This is the usual case, and many times faster than :func:`kernels_for`.
    """
    return native.table_of(streams, counts) if may_use_c(fused) else None


def kernels_for(streams: Sequence[Sequence[Any]], fused: bool | None) -> list[ModuleType | None]:
    """Return the kernel for each weight, given the lists of all tensors that the kernel reads.

    The weights come first; other lists may be empty. A weight whose gradient or state a
    kernel cannot read gets None: torch's own operations handle it, or raise torch's own error.
    """
    weights, *others = streams
    if fused is False or is_tracing():
        return [None] * len(weights)
    on_cpu = all_on_cpu(weights)
    if are_contiguous(weights):
        samples = {weight.dtype: weight for weight in weights}
        by_dtype = {dtype: kernel_for(weight, fused) for dtype, weight in samples.items()}
        kernels = [by_dtype[weight.dtype] for weight in weights]
    else:
        kernels = [kernel_for(weight, fused) for weight in weights]
    for stream in others:
        if on_cpu and all_on_cpu(stream):
            continue
        for i, tensor in enumerate(stream):
            if kernels[i] is not None and not is_readable(tensor, weights[i]):
                kernels[i] = None
    return kernels


@contextmanager
def only_kernel(name: KernelName | None) -> Iterator[None]:
    """Disable the other fused kernel within this context; None enables both."""
    global _only
    before, _only = _only, name
    try:
        yield
    finally:
        _only = before


def _compiles_by_default(tensor: Tensor) -> bool:
    """Check whether ``fused=None`` compiles a kernel for this weight.

    A CUDA graph cannot record the compilation, nor the transfer of hyper-parameters.
    """
    return _is_on_cuda(tensor) and not torch.cuda.is_current_stream_capturing()


def _is_on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warn_user(f"{reason}; falling back to a slower path", RuntimeWarning)
