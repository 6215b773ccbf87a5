"""Weights, their gradients and their state side by side in memory, as a kernel needs them.

A kernel walks all of a weight's streams (itself, gradient, moments) at one pace and takes their
addresses on trust; so here is checked that they are of one dtype, size and layout, and made so
where they are not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

Tensors = Sequence[Tensor]

PLAIN = (Tensor, torch.nn.Parameter)


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor; other tensors unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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
    """Tensors of one dtype, all in the layout of their weights; copies where they were not.

    Args:
        streams: lists of equal length, the weights first.
        indices: the tensors' places in the lists that they come from.
        key: what they have in common beside the dtype.
        read_only: the streams that do not change.
    """

    def __init__(
        self,
        streams: list[list[Tensor]],
        indices: Sequence[int],
        read_only: Sequence[int],
        key: Any = None,
    ) -> None:
        weights = streams[0]
        self.indices = indices
        self.key = key
        self.dtype = weights[0].dtype
        self.device = weights[0].device
        self._changed = [
            x for s, stream in enumerate(streams) if s not in read_only for x in stream
        ]
        self._copies: list[tuple[Tensor, Tensor]] = []  # (original, its copy), to be copied back
        plain = all(map(Tensor.is_contiguous, weights))
        if not (plain or all(map(is_dense, weights))):
            raise ValueError("cannot update a weight: not dense in memory")
        self.sizes = [*map(Tensor.numel, weights)]
        self.streams = [weights]  # held until the kernel is done: some are copies
        for s, stream in enumerate(streams[1:], 1):
            if [*map(Tensor.numel, stream)] != self.sizes:
                raise ValueError("weights, gradients and state differ in size")
            alike = plain and all(map(Tensor.is_contiguous, stream))
            if not alike or {tensor.dtype for tensor in stream} != {self.dtype}:
                stream = self._in_layout(weights, stream, written=s not in read_only)
            self.streams.append(stream)

    def _in_layout(
        self, weights: list[Tensor], stream: list[Tensor], *, written: bool
    ) -> list[Tensor]:
        """The stream in dtype and layout of the weights; copies of those that differ."""
        result = list(stream)
        for i, (weight, tensor) in enumerate(zip(weights, stream, strict=True)):
            if tensor.dtype == self.dtype and tensor.stride() == weight.stride():
                continue
            with torch.no_grad():
                result[i] = torch.empty_like(weight, requires_grad=False).copy_(tensor)
            if written:
                self._copies.append((tensor, result[i]))
        return result

    def finish(self) -> None:
        """Copy results back from converted tensors, and tell autograd of the changes."""
        for original, copy in self._copies:
            with torch.no_grad():
                original.copy_(copy)
        increment_version(self._changed)  # as any in-place operation does, for autograd to see


def batches(
    streams: Sequence[Tensors], *, read_only: Sequence[int], keys: Sequence[Hashable] | None = None
) -> Iterator[Batch]:
    """The streams, put together by device and dtype of the weights, and by `keys` if given."""
    if not streams[0]:
        return
    here = [list(stream) for stream in streams]
    if not all(type(weight) in PLAIN for weight in here[0]):
        here = [[local(tensor) for tensor in stream] for stream in here]
    groups: dict[tuple[torch.dtype, torch.device, Hashable], list[int]] = {}
    for i, weight in enumerate(here[0]):
        groups.setdefault((weight.dtype, weight.device, keys and keys[i]), []).append(i)
    for (_, _, key), indices in groups.items():
        alike = here if len(groups) == 1 else [[stream[i] for i in indices] for stream in here]
        yield Batch(alike, indices, read_only, key)
