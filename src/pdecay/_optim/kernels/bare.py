"""The C++ kernel inside a function that inductor compiled for the CPU, to be called by itself.

Around its kernel, compiled code checks sizes and strides and makes flat views: some 30 microseconds
a call, a fifth of a step on a network of many tensors, for what the caller knows already. No
interface of torch gives the kernel away; so the compiled code is watched while it calls it. Where
that shows anything but one kernel of known arguments, or the kernel alone does not give the same
bits, there is no bare kernel and the compiled code is called as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bare:
    """A kernel, and the order of its arguments: the streams, the numbers and the size."""

    kernel: Callable[..., None]
    order: tuple[int, ...]

    def run(self, streams: Sequence[Sequence[Tensor]], numbers: Tensor, sizes: list[int]) -> None:
        """Run the kernel on each of several weights, with its part of every stream.

        All is laid out before the first call: each call drives whatever else ran out of the
        processor's caches, and Python that runs between two of them is ten times slower for it.
        """
        in_order = itemgetter(*self.order)
        calls = [
            in_order((*part, numbers, size)) for *part, size in zip(*streams, sizes, strict=True)
        ]
        kernel = self.kernel
        for call in calls:
            kernel(*call)


def kernel_of(call: Callable[[list[Tensor], Tensor], None], trial: list[Tensor]) -> Bare | None:
    """The kernel that `call(streams, numbers)` runs.

    Its own streams may have any shape and strides, as long as they are dense and all have the same.

    Args:
        call: the compiled code; its streams are flat and changed in place.
        trial: numbers, then streams, to call it with; of no other use.
    """
    numbers, *streams = trial
    seen = _watched(lambda: call(streams, numbers))
    if seen is None:
        return None
    kernel, arguments = seen
    known = {tensor.data_ptr(): i for i, tensor in enumerate([*streams, numbers])}
    order: list[int] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            order.append(known.get(argument.data_ptr(), -1))
        else:
            order.append(len(trial) if argument == streams[0].numel() else -1)
    if -1 in order:
        return None

    bare = Bare(kernel, tuple(order))
    numbers.copy_(torch.linspace(0.01, 0.02, numbers.numel()))
    for i, stream in enumerate(streams, 1):  # unlike values: none passes for another
        stream.copy_(1000 * (i + torch.linspace(0, 1, stream.numel())))
    copies = [stream.clone() for stream in streams]
    call(streams, numbers)
    bare.run([[copy] for copy in copies], numbers, [copies[0].numel()])
    return bare if all(map(torch.equal, streams, copies)) else None


def _watched(run: Callable[[], None]) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    """The one built-in function `kernel` that is called while `run` runs, and what it got."""
    places: list[tuple[dict[str, Any], str, Callable[..., None]]] = []

    def notice(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__name__", "") == "kernel":
            names = [name for name, value in frame.f_globals.items() if value is called]
            places.extend((frame.f_globals, name, called) for name in names)

    profiler = sys.getprofile()
    sys.setprofile(notice)
    try:
        run()
    finally:
        sys.setprofile(profiler)
    if len(places) != 1:
        return None
    namespace, name, kernel = places[0]
    calls: list[tuple[Any, ...]] = []

    def record(*arguments: Any) -> None:
        calls.append(arguments)
        kernel(*arguments)

    namespace[name] = record
    try:
        run()
    finally:
        namespace[name] = kernel
    return (kernel, calls[0]) if len(calls) == 1 else None
