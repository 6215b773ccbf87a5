"""Batches of tensors with one dtype and memory layout, as the fused kernels need them.

A *stream* is a list of tensors with one entry for each weight: the weights themselves, their
gradients, or one kind of optimizer state. A kernel reads all streams of a weight with the same
index and does not check addresses. This module checks that the tensors of a weight agree in dtype,
size and layout, and copies those that differ. A weight whose gradient or state is more precise is
updated in their dtype: in its own, small updates of the state would be lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

Tensors = Sequence[Tensor]

PLAIN = (Tensor, torch.nn.Parameter)
_PLAIN_SET = {*PLAIN}


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor; other tensors unchanged."""
    if type(tensor) in PLAIN or not hasattr(tensor, "to_local"):
        return tensor
    part: Tensor = tensor.to_local()
    return part


def is_plain(tensor: Tensor) -> bool:
    """Check that the memory holds the values: strided, without lazy negation or lazy zeros."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def all_on_cpu(tensors: Sequence[Tensor | None]) -> bool:
    """Check quickly that all are strided CPU tensors, without subclasses, and none is None."""
    return (
        set(map(type, tensors)) <= _PLAIN_SET
        and all(map(attrgetter("is_cpu"), tensors))
        and set(map(attrgetter("layout"), tensors)) <= {torch.strided}
    )


def all_plain(tensors: Sequence[Tensor]) -> bool:
    """Check quickly that no tensor has lazy negation or lazy zeros."""
    return not any(map(Tensor.is_neg, tensors)) and not any(map(Tensor._is_zerotensor, tensors))


def are_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Check quickly that all are contiguous CPU tensors whose memory holds their values."""
    contiguous = all_on_cpu(tensors) and all(map(Tensor.is_contiguous, tensors))
    return contiguous and all_plain(tensors)


def are_plain(tensors: Sequence[Any]) -> bool:
    """Check quickly that all are tensors without subclasses and without lazy negation."""
    return set(map(type, tensors)) <= _PLAIN_SET and not any(map(Tensor.is_neg, tensors))


def is_readable(tensor: Tensor | None, weight: Tensor) -> bool:
    """Check that a kernel for `weight` can read a gradient or state; None counts as readable.

    The parts of a DTensor on this rank must be those of the weight. The gradient of a replicated
    weight may be a sum over the ranks that is not computed yet, for instance with SequenceParallel.

    Lazy negation and lazy zeros are accepted, because :class:`Batch` copies such tensors. Step
    counts may be on the CPU for weights on other devices.
    """
    if tensor is None:
        return True
    if type(weight) not in PLAIN:
        placements = getattr(weight, "placements", None)
        if getattr(tensor, "placements", placements) != placements:
            return False
        weight, tensor = local(weight), local(tensor)
    if type(tensor) not in PLAIN:
        return False
    on_device = tensor.device == weight.device or (tensor.is_cpu and tensor.numel() == 1)
    return on_device and tensor.layout is torch.strided


def is_dense(tensor: Tensor) -> bool:
    """Check that the memory has no gaps and no overlap, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class Batch:
    """Streams of one dtype, in which every tensor has the layout of its weight.

    Args:
        streams: lists of equal length, the weights first.
        dtype: the dtype to compute in.
        indices: positions of these tensors in the caller's lists.
        read_only: indices of the streams that the kernel does not write.
        key: the tensors' common key in :func:`batches`.
    """

    def __init__(
        self,
        streams: list[list[Tensor]],
        dtype: torch.dtype,
        indices: Sequence[int],
        read_only: Sequence[int],
        key: Any = None,
    ) -> None:
        weights = streams[0]
        self.indices = indices
        self.key = key
        self.dtype = dtype
        self.device = weights[0].device
        self._changed = [
            x for s, stream in enumerate(streams) if s not in read_only for x in stream
        ]
        self._copies: list[tuple[Tensor, Tensor]] = []  # (original, its copy), to be copied back
        plain = all(map(Tensor.is_contiguous, weights))
        if not (plain or all(map(is_dense, weights))):
            raise ValueError("cannot update a weight that is not dense in memory")
        self.sizes = [*map(Tensor.numel, weights)]
        self.streams: list[list[Tensor]] = []  # keeps copies alive until the kernel has finished
        for s, stream in enumerate(streams):
            for weight, tensor in zip(weights, stream, strict=True):
                if tensor.shape != weight.shape:
                    raise ValueError(
                        "a gradient and the state must have the shape of their weight, got "
                        f"{tuple(tensor.shape)} for a weight of shape {tuple(weight.shape)}"
                    )
            alike = plain and all(map(Tensor.is_contiguous, stream)) and all_plain(stream)
            if not alike or {tensor.dtype for tensor in stream} != {self.dtype}:
                stream = self._in_layout(weights, stream, written=s not in read_only)
            self.streams.append(stream)

    def _in_layout(
        self, weights: list[Tensor], stream: list[Tensor], *, written: bool
    ) -> list[Tensor]:
        """Return the stream with tensors that differ in dtype or layout replaced by copies."""
        result = list(stream)
        for i, (weight, tensor) in enumerate(zip(weights, stream, strict=True)):
            same_layout = tensor.dtype == self.dtype and tensor.stride() == weight.stride()
            if same_layout and is_plain(tensor):
                continue
            if not tensor.is_floating_point():  # the copy would drop fractions or imaginary parts
                raise ValueError(
                    "gradients and state of a real weight must be real floating-point tensors, "
                    f"got {tensor.dtype}"
                )
            with torch.no_grad():
                empty = torch.empty_like(weight, dtype=self.dtype, requires_grad=False)
                result[i] = empty.copy_(tensor)
            if written:
                self._copies.append((tensor, result[i]))
        return result

    def finish(self) -> None:
        """Copy results back from converted tensors, and increment the version counters."""
        for original, copy in self._copies:
            with torch.no_grad():
                original.copy_(copy)
        increment_version(self._changed)  # as every in-place operation does, for autograd's checks


def batches(
    streams: Sequence[Tensors], *, read_only: Sequence[int], keys: Sequence[Hashable] | None = None
) -> Iterator[Batch]:
    """Yield batches of the streams, grouped by dtype, device of the weights, and `keys`."""
    if not streams[0]:
        return
    tensors = [list(stream) for stream in streams]
    if not all(type(weight) in PLAIN for weight in tensors[0]):
        tensors = [[local(tensor) for tensor in stream] for stream in tensors]
    groups: dict[tuple[torch.dtype, torch.device, Hashable], list[int]] = {}
    for i, own in enumerate(zip(*tensors, strict=True)):
        dtype = _most_precise(own)
        groups.setdefault((dtype, own[0].device, keys and keys[i]), []).append(i)
    for (dtype, _, key), indices in groups.items():
        if len(groups) == 1:
            yield Batch(tensors, dtype, indices, read_only, key)
        else:
            selected = [[stream[i] for i in indices] for stream in tensors]
            yield Batch(selected, dtype, indices, read_only, key)


def _most_precise(tensors: Tensors) -> torch.dtype:
    """Return the dtype of a weight, the first tensor, or a wider one of its gradient or state."""
    wide = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    widest = max([tensors[0].dtype, *wide], key=lambda dtype: dtype.itemsize)
    # Neither half precision has all numbers of the other one.
    mixed = widest.itemsize == 2 and {torch.float16, torch.bfloat16} <= {*wide}
    return torch.float32 if mixed else widest
