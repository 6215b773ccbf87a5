"""Parts of lists of tensors that fit into a CPU's cache.

A step with torch's multi-tensor functions (foreach) takes a dozen passes over memory. If it runs on
one part after the other, all passes but the first read the cache, and the memory for intermediate
results is that of one part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pdecay._core.tensors import is_tracing
from pdecay._optim.kernels.layout import PLAIN

IN_CACHE = 1 << 20  # weights: their state and the intermediate results take about 24 MB


def cache_parts(streams: Sequence[list[Any]]) -> Iterator[tuple[list[int], list[list[Any]]]]:
    """Yield parts of the streams, each after the indices of its tensors in the streams.

    The weights come first; an empty stream stays empty. Weights larger than a part are split into
    views, and their tensors of one number, the step counts, are copied for all views but the first.
    Weights on other devices are not divided: there, each part would take more kernel launches.
    """
    weights = streams[0]
    if (
        is_tracing()
        or not all(type(weight) in PLAIN and weight.is_cpu for weight in weights)
        or sum(map(Tensor.numel, weights)) <= IN_CACHE
    ):
        yield [*range(len(weights))], [*streams]
        return
    indices: list[int] = []
    part: list[list[Any]] = [[] for _ in streams]
    size = 0
    for i in range(len(weights)):
        for piece in _pieces([stream[i] for stream in streams if stream]):
            if indices and size + piece[0].numel() > IN_CACHE:
                yield indices, part
                indices, part, size = [], [[] for _ in streams], 0
            indices.append(i)
            size += piece[0].numel()
            filled = [own for own, stream in zip(part, streams, strict=True) if stream]
            for own, tensor in zip(filled, piece, strict=True):
                own.append(tensor)
    yield indices, part


def _pieces(tensors: list[Any]) -> Iterator[Sequence[Any]]:
    """Yield a weight's tensors, split into views if the weight is large and all have its layout."""
    size = tensors[0].numel()
    if size <= IN_CACHE or not all(_can_be_split(tensor, size) for tensor in tensors):
        yield tensors
        return
    columns: list[Sequence[Any]] = []
    for tensor in tensors:
        if tensor.numel() == size:
            columns.append(tensor.detach().view(-1).split(IN_CACHE))
        else:
            columns.append([tensor, *(tensor.clone() for _ in range((size - 1) // IN_CACHE))])
    yield from zip(*columns, strict=True)


def _can_be_split(tensor: Any, size: int) -> bool:
    """Check that a tensor has one number, or one for each weight in the usual order."""
    return (
        type(tensor) in PLAIN  # not None: torch creates missing momentum buffers
        and tensor.layout is torch.strided
        and (tensor.numel() == 1 or (tensor.numel() == size and tensor.is_contiguous()))
    )
