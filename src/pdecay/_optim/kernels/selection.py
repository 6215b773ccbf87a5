"""The choice of a kernel for a weight: C, torch.compile, or none (torch's own operations).

A fused kernel does the update and the decay in one pass over memory, with a relative error of the
power below 1e-5. torch's own operations are exact to the bit and work for every tensor. If a
kernel is not available, the next one is used, and one warning gives the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Literal

from torch import Tensor, strided
from torch.compiler import is_compiling

from pdecay._optim.kernels import native
from pdecay._optim.kernels.layout import PLAIN

KernelName = Literal["native", "compiled"]

_only: KernelName | None = None
_warned: set[str] = set()


def kernel_for(tensor: Tensor, fused: bool | None) -> ModuleType | None:
    """Return the kernel module for a weight; None for torch's own operations.

    Args:
        tensor: the weight.
        fused: True asks for a kernel, False for none. None uses the C kernel where it works, but
            not torch.compile, which takes seconds to start.
    """
    if fused is False or is_compiling():
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
    if fused and _only != "native":
        from pdecay._optim.kernels import compiled

        reason = compiled.why_not(tensor) or compiled.available(tensor.device)
        if reason is None:
            return compiled
        _warn_once(f"torch.compile cannot run the fused step ({reason})")
    return None


def kernels_for(tensors: Sequence[Tensor], fused: bool | None) -> list[ModuleType | None]:
    """Return :func:`kernel_for` each tensor; tensors of one dtype and device share a call."""
    known: dict[object, ModuleType | None] = {}
    kernels = []
    for tensor in tensors:
        if type(tensor) in PLAIN and tensor.layout is strided and tensor.is_contiguous():
            kind = (tensor.dtype, tensor.device)
            if kind not in known:
                known[kind] = kernel_for(tensor, fused)
            kernels.append(known[kind])
        else:
            kernels.append(kernel_for(tensor, fused))
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


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"{reason}; falling back to a slower path", RuntimeWarning, stacklevel=2)
