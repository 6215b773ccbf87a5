"""Calls of `sparse_conv.c`: the plan that it goes by, and the memory that it needs."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import TypeGuard, cast

import torch
from torch import Tensor
from torch._C import _disabled_torch_dispatch_impl
from torch._C._functorch import peek_interpreter_stack

from pdecay._native.build import KernelUnavailable, load

# Threads cost a few microseconds to start: multiply-adds that each should have.
_THREAD_WORK = 1 << 16


class _Struct(ctypes.Structure):
    """`plan` of sparse_conv.c."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("in_channels", "height", "width", "out_channels", "out_height", "out_width"),
            *("stride_y", "stride_x", "relu", "group", "band", "channels", "blocks", "per_block"),
            *("shifts", "phases", "rows", "line", "plane", "mask_pitch", "block_size"),
            *("sums_pitch", "scratch_size", "in_place", "pixels", "whole_rows", "whole_image"),
        )
    ] + [
        (name, ctypes.c_void_p)
        for name in (
            *("channel", "shift", "phase", "mask", "row", "at", "value", "bias"),
            *("order", "tile_start", "tile_base", "tile_pick", "tile_value"),
        )
    ]


def available() -> str | None:
    """None if the kernel is or can be compiled here, else the reason."""
    try:
        library()
    except KernelUnavailable as reason:
        return str(reason)
    return None


def is_traced(x: Tensor) -> bool:
    """Whether the kernel must not run on this, as it reads and writes memory unseen.

    Operations on it are recorded or changed, or it only stands for another tensor.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or peek_interpreter_stack() is not None
        or (
            type(x) is not Tensor
            and type(x).__torch_dispatch__ is not _disabled_torch_dispatch_impl
        )
    )


class Call:
    """A plan on one shape of input: all that a call takes, made once.

    Args:
        plan: what the kernel goes by.
        count: how many images or rows the input has.
        out_shape: the shape of the output.
    """

    def __init__(self, plan: Plan, count: int, out_shape: tuple[int, ...]) -> None:
        self._plan = plan  # its memory is read in every call
        self._address = ctypes.addressof(plan.struct)
        self._function = plan.function
        self._scratch = plan.scratch
        self._count = count
        # `empty_like` takes half the time of `empty`; this holds one number.
        self._like = torch.empty((), dtype=plan.dtype, device="cpu").expand(out_shape)
        self._threads = max(1, count * plan.work // _THREAD_WORK)

    def __call__(self, x: Tensor, more: Tensor | float | None = None) -> Tensor:
        """The output. `x` is contiguous, of the shape and dtype that this is made for.

        `more`, if given, is added before a ReLU, as torch adds: by the kernel, if it is a tensor
        that has the output's dtype and shape, or spreads to it.
        """
        if more is None:
            return self._run(self._address, x, None)
        if self._can_add(more):
            return self._run(self._address, x, more.expand_as(self._like).contiguous())
        bare = _Struct.from_buffer_copy(self._plan.struct)
        bare.relu = 0
        y = self._run(ctypes.addressof(bare), x, None) + more
        return y.relu() if self._plan.struct.relu else y

    def _can_add(self, more: Tensor | float) -> TypeGuard[Tensor]:
        """Whether the kernel can add this to the output."""
        like = self._like
        if not isinstance(more, Tensor) or more.dtype is not like.dtype or not more.is_cpu:
            return False
        if more.requires_grad and torch.is_grad_enabled():
            return False
        if more.shape == like.shape:
            return True
        sizes = zip(reversed(more.shape), reversed(like.shape), strict=False)
        return more.dim() <= like.dim() and all(one in (1, whole) for one, whole in sizes)

    def _run(self, plan: int, x: Tensor, more: Tensor | None) -> Tensor:
        out = torch.empty_like(self._like, memory_format=torch.contiguous_format)
        threads = min(torch.get_num_threads(), self._threads)
        scratch = _scratch(threads * self._scratch) if self._scratch else None
        self._function(
            *(plan, self._count, x.data_ptr(), None if more is None else more.data_ptr()),
            *(out.data_ptr(), scratch, threads),
        )
        return out


class Plan:
    """What the kernel goes by, held as long as it may be called.

    Args:
        name: of the kernel's function.
        arrays: all that it reads.
        work: multiply-adds of an image.
        scratch: bytes of a thread.
        numbers: the other fields of `plan` in sparse_conv.c.
    """

    def __init__(
        self, name: str, arrays: dict[str, Tensor], work: int, scratch: int, **numbers: int
    ) -> None:
        pointers = {field: array.data_ptr() for field, array in arrays.items()}
        self.struct = _Struct(**pointers, **numbers)
        self.dtype = arrays["value"].dtype
        self.function = function(name, self.dtype)
        self.arrays = arrays
        self.work = work
        self.scratch = scratch


_local = threading.local()


def _scratch(size: int) -> int:
    """The address of room for so many bytes, of this thread and reused by all of its calls."""
    kept: Tensor | None = getattr(_local, "kept", None)
    if kept is None or kept.nbytes < size:
        _local.kept = kept = torch.zeros(size, dtype=torch.uint8, device="cpu")
    return kept.data_ptr()


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernel."""
    return load("sparse_conv")


def lanes_of(dtype: torch.dtype) -> int:
    """The numbers of a vector."""
    return int(library().pdecay_vector_bytes()) // dtype.itemsize


def integer(dtype: torch.dtype) -> torch.dtype:
    """The integers that are as long as such numbers."""
    return torch.int32 if dtype.itemsize == 4 else torch.int64


@functools.cache
def function(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """One of the kernel's functions, for numbers of a dtype."""
    found = getattr(library(), f"pdecay_sparse_{name}_f{8 * dtype.itemsize}")
    pointer = ctypes.c_void_p
    work = [pointer, ctypes.c_int64, *[pointer] * 4, ctypes.c_int]
    found.argtypes = [pointer] * 5 if name == "cut" else work
    found.restype = None
    return cast("Callable[..., None]", found)
