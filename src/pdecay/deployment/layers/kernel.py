"""Calls of the C kernel `sparse_conv.c`: its plan, its scratch memory and its library."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import TypeGuard, cast

import torch
from torch import Tensor
from torch._C import _disabled_torch_dispatch_impl
from torch.autograd import forward_ad

from pdecay._core.tensors import is_tracing
from pdecay._native.build import KernelUnavailable, load

# Minimum multiply-adds per thread: starting a thread costs a few microseconds.
_THREAD_WORK = 1 << 16


class _Struct(ctypes.Structure):
    """The C struct `plan` of sparse_conv.c."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("in_channels", "height", "width", "out_channels", "out_height", "out_width"),
            *("stride_y", "stride_x", "relu", "images", "group", "band", "channels", "blocks"),
            *("per_block", "shifts", "phases", "rows", "line", "plane", "mask_pitch", "block_size"),
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
    """Return None if the kernel can be compiled here, else the reason why not."""
    try:
        library()
    except KernelUnavailable as reason:
        return str(reason)
    return None


def is_traced(x: Tensor) -> bool:
    """Return whether operations on a tensor are recorded or transformed, or the tensor is nested.

    The kernel accesses raw memory, which tracers cannot see, so it must not run then. A proxy of
    ``torch.fx`` is no tensor at all. A nested tensor has no shape.
    """
    return (
        is_tracing()
        or forward_ad._current_level >= 0
        or (
            type(x) is not Tensor
            and getattr(type(x), "__torch_dispatch__", None) is not _disabled_torch_dispatch_impl
        )
        or x.is_nested
    )


def in_memory(x: Tensor) -> Tensor:
    """Return a tensor whose memory holds its elements in row-major order, as a kernel reads them.

    A tensor may have other strides, a lazy negation (``z.conj().imag``), or no memory at all if it
    is a gradient that is known to be zero.
    """
    if x._is_zerotensor():
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    return x.resolve_neg().contiguous() if x.is_neg() else x.contiguous()


class Call:
    """A kernel call for one input shape, with everything prepared.

    Args:
        plan: the plan.
        count: the number of images or rows of the input.
        out_shape: the shape of the output.
    """

    def __init__(self, plan: Plan, count: int, out_shape: tuple[int, ...]) -> None:
        self._plan = plan  # keeps its memory alive
        self._struct = _Struct.from_buffer_copy(plan.struct)
        self._struct.images = count
        self._address = ctypes.addressof(self._struct)
        self._relu_struct = _Struct.from_buffer_copy(self._struct)
        self._relu_struct.relu = 1
        self._relu_address = ctypes.addressof(self._relu_struct)
        self._like = torch.empty((), dtype=plan.dtype, device="cpu").expand(out_shape)
        self._size = out_shape
        self._strides = torch.empty(out_shape, device="meta").stride()
        self._threads = max(1, count * plan.work // _THREAD_WORK)

    def __call__(self, x: Tensor, more: Tensor | float | None = None, relu: bool = False) -> Tensor:
        """Return the output for an input of the prepared shape and dtype.

        `more`, if given, is added before the ReLU: by the kernel if it has the output's dtype and
        can be expanded to its shape, else by torch. With `relu`, this call has a ReLU even if the
        plan has none.
        """
        address = self._relu_address if relu else self._address
        if more is None:
            return self._run(address, x, None)
        if self._can_add(more):
            more = in_memory(more.expand_as(self._like))
            return self._run(address, x, more.data_ptr())
        without_relu = _Struct.from_buffer_copy(self._struct)
        without_relu.relu = 0
        y = self._run(ctypes.addressof(without_relu), x, None) + more
        return y.relu() if relu or self._struct.relu else y

    def _can_add(self, more: Tensor | float) -> TypeGuard[Tensor]:
        """Return whether the kernel can add this to the output."""
        like = self._like
        if not isinstance(more, Tensor) or more.dtype is not like.dtype or not more.is_cpu:
            return False
        if more.requires_grad and torch.is_grad_enabled():
            return False
        if more.shape == like.shape:
            return True
        sizes = zip(reversed(more.shape), reversed(like.shape), strict=False)
        return more.dim() <= like.dim() and all(one in (1, full) for one, full in sizes)

    def _run(self, plan: int, x: Tensor, more: int | None) -> Tensor:
        """Call the kernel with the addresses of a plan and of the numbers to add, if any."""
        address = x.data_ptr()
        if not address or not x.is_contiguous() or x.is_neg():  # `in_memory`, if it is needed
            x = in_memory(x)
            address = x.data_ptr()
            if not address and x.numel():  # its storage was resized to 0, as FSDP does
                raise ValueError("the memory of the input was freed: give a tensor with values")
        # Of torch's functions that make a tensor, this one is the fastest.
        out = self._like.new_empty_strided(self._size, self._strides)
        threads = self._threads
        if threads > 1:
            threads = min(threads, torch.get_num_threads())
        if self._plan.scratch is None:
            self._plan.function(plan, address, more, out.data_ptr(), threads)
        else:
            scratch = _scratch(threads * self._plan.scratch)
            self._plan.function(plan, address, more, out.data_ptr(), threads, scratch)
        return out


class Plan:
    """The kernel's description of the work for one input size. It owns the arrays that it uses.

    Args:
        name: the kernel function, ``conv`` or ``rows``.
        arrays: the pointer fields of `plan` in sparse_conv.c.
        work: multiply-adds per image.
        scratch: bytes of scratch memory per thread; None for ``rows``, which needs none.
        numbers: the integer fields of `plan` in sparse_conv.c.
    """

    def __init__(
        self, name: str, arrays: dict[str, Tensor], work: int, scratch: int | None, **numbers: int
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
    """Return the address of this thread's scratch memory, which all its calls reuse."""
    buffer: Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.nbytes < size:
        _local.buffer = buffer = torch.zeros(size, dtype=torch.uint8, device="cpu")
    return buffer.data_ptr()


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled kernel."""
    return load("sparse_conv")


def lanes_of(dtype: torch.dtype) -> int:
    """Return the number of elements per vector register."""
    return int(library().pdecay_vector_bytes()) // dtype.itemsize


def integer(dtype: torch.dtype) -> torch.dtype:
    """Return the integer dtype of the same size."""
    return torch.int32 if dtype.itemsize == 4 else torch.int64


@functools.cache
def function(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """Return a kernel function for a dtype."""
    found = getattr(library(), f"pdecay_sparse_{name}_f{8 * dtype.itemsize}")
    pointer = ctypes.c_void_p
    found.argtypes = {
        "conv": [*[pointer] * 4, ctypes.c_int, pointer],
        "rows": [*[pointer] * 4, ctypes.c_int],
        "cut": [pointer] * 5,
    }[name]
    found.restype = None
    return cast("Callable[..., None]", found)
