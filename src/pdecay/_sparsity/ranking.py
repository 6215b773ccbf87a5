"""Exact global ranking of weights that are spread over many tensors and processes.

The bit pattern of a non-negative floating-point number, read as an integer, grows with the number.
The k-th smallest value is therefore found digit by digit, as in a radix sort: count how many
patterns have each value of the leading digit, find the digit that contains the k-th one, and
continue with the next digit among those. This takes three passes for single precision and six for
double, each over small pieces of the tensors, and never copies them all. The counts are summed
over processes, so weights that are sharded over ranks are ranked as exactly as on one.

Weights are ranked by magnitude. :func:`zero_smallest_` can rank by other non-negative scores, and
:func:`kth_magnitude` works on scores as it does on weights. NaN ranks above infinity. Half
precision is ranked in single precision, which represents it exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DIGIT = 11  # bits: a histogram of 2048 bins
# Elements per piece. On a CPU a piece fits the cache and is too small to start threads for.
_PIECE = {"cpu": 1 << 15}
_PIECE_ELSEWHERE = 1 << 24
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


@torch.no_grad()
def kth_magnitude(tensors: Sequence[Tensor], k: int, group: ProcessGroup | None = None) -> float:
    """Return the exact k-th smallest ``|w|`` over all tensors, counted from k = 1.

    Args:
        tensors: floating-point or complex tensors. Of a DTensor the local part is read.
        k: the rank, from 1 to the number of weights.
        group: the processes that the weights are split over. The default is the group of the
            DTensors' mesh, if there is one. With a group this is a collective operation: call it
            on every rank.

    Example:
        >>> kth_magnitude([torch.tensor([3.0, -1.0]), torch.tensor([[2.0]])], k=2)
        2.0
    """
    ranking = _Ranking(tensors, group)
    return ranking.number(ranking.kth(k)[0])


@torch.no_grad()
def zero_smallest_(
    tensors: Sequence[Tensor],
    k: int,
    group: ProcessGroup | None = None,
    *,
    scores: Sequence[Tensor] | None = None,
) -> float:
    """Set exactly k weights, those of smallest magnitude or score, to 0 in place.

    Among equal weights the earliest are set, in the order of rank, tensor and position. Weights
    that are zero already are the smallest of all and count among the k.

    Args:
        tensors, group: as in :func:`kth_magnitude`.
        k: the number of weights to set, from 0 to the number of weights.
        scores: one tensor for each of `tensors`, of the same shape, whose magnitudes are ranked
            instead of the weights. The score of a zero weight must be 0.

    Returns:
        The largest magnitude or score that was set to 0; 0.0 for k = 0.

    Example:
        >>> w = torch.tensor([2.0, -0.5, 1.0, 0.5, 0.5])
        >>> zero_smallest_([w], k=2)
        0.5
        >>> w
        tensor([2.0000, 0.0000, 1.0000, 0.0000, 0.5000])
    """
    ranking = _Ranking(tensors if scores is None else scores, group)
    if k == 0:
        return 0.0
    pattern, tied = ranking.kth(k)
    for tensor, ranked in zip(map(local_part, tensors), ranking.tensors, strict=True):
        flat = tensor.reshape(-1)
        for piece, score in zip(_split(flat), _split(ranked.reshape(-1)), strict=True):
            bits = ranking.bits(score)
            small = bits < pattern
            if tied:
                ties = (bits == pattern).nonzero().flatten()[:tied]
                small[ties] = True
                tied -= len(ties)
            piece.masked_fill_(small, 0.0)
        if not tensor.is_contiguous():  # then `flat` may be a copy
            tensor.copy_(flat.view(tensor.shape))
    return ranking.number(pattern)


@torch.no_grad()
def count_zeros(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> int:
    """Count the weights that are exactly zero (0.0 or -0.0) in all tensors on all ranks."""
    ranking = _Ranking(tensors, group)
    zeros = sum(tensor.numel() - int(tensor.count_nonzero()) for tensor in ranking.tensors)
    return ranking.sum_over_ranks(zeros)


def count_weights(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> int:
    """Count the weights in all tensors on all ranks."""
    ranking = _Ranking(tensors, group)
    return ranking.sum_over_ranks(ranking.size)


def local_part(tensor: Tensor) -> Tensor:
    """Return a view of the part of a DTensor on this rank; return other tensors unchanged."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def group_of(tensors: Sequence[Tensor]) -> ProcessGroup | None:
    """Return the processes that DTensors are sharded over, or None for unsharded tensors."""
    sharded: set[tuple[Any, int]] = set()
    any_whole = False
    for tensor in tensors:
        placements = getattr(tensor, "placements", ())
        dims = [dim for dim, placement in enumerate(placements) if placement.is_shard()]
        sharded.update((tensor.device_mesh, dim) for dim in dims)  # type: ignore[attr-defined]
        any_whole = any_whole or not dims
    if not sharded:
        return None
    if any_whole or len(sharded) > 1:
        raise ValueError(
            "cannot rank these weights together: some are sharded over other processes than the "
            "rest, or are not sharded at all; rank them separately, or pass group="
        )
    ((mesh, dim),) = sharded
    group: ProcessGroup = mesh.get_group(dim)
    return group


class _Ranking:
    """The local parts of some tensors, with counts that are summed over all ranks."""

    def __init__(self, tensors: Sequence[Tensor], group: ProcessGroup | None) -> None:
        self.group = group if group is not None else group_of(tensors)
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.tensors = [local_part(tensor) for tensor in tensors]
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.size = sum(tensor.numel() for tensor in self.tensors)
        for tensor in self.tensors:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise TypeError(f"only floating-point weights can be ranked, got {tensor.dtype}")

    def kth(self, k: int) -> tuple[int, int]:
        """Return the bit pattern of the k-th smallest value, and its local count among the k.

        Ties are given to the ranks in order: the second number is this rank's share of them.
        """
        if isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"k must be an integer, got {k!r}")
        double = [tensor.dtype in (torch.float64, torch.complex128) for tensor in self.tensors]
        size, any_double = map(sum, zip(*self.gather([self.size, int(any(double))]), strict=True))
        if not 1 <= k <= size:
            raise ValueError(f"k must be from 1 to the number of weights, {size}, got {k}")
        self.dtype = torch.float64 if any_double else torch.float32
        prefix, shift = 0, torch.iinfo(_INTEGER[self.dtype]).bits - 1  # all bits but the sign bit
        while shift:
            known, width = shift, min(_DIGIT, shift)
            shift -= width
            local = self.histogram(prefix, known, shift)
            counts = local.clone()
            if self.group is not None:
                dist.all_reduce(counts, group=self.group)
            cumulative = counts.cumsum(0)
            digit = int(torch.searchsorted(cumulative, k))
            k -= int(cumulative[digit] - counts[digit])
            prefix = prefix << width | digit
        ties = [count for (count,) in self.gather([int(local[digit])])]
        return prefix, min(max(k - sum(ties[: self.rank]), 0), ties[self.rank])

    def histogram(self, prefix: int, known: int, shift: int) -> Tensor:
        """Count each value of the next digit among the patterns that begin with `prefix`."""
        values = 1 << (known - shift)
        counts = torch.zeros(values, dtype=torch.int64, device=self.device)
        leading = known == torch.iinfo(_INTEGER[self.dtype]).bits - 1
        for tensor in self.tensors:
            for piece in _split(tensor.reshape(-1)):
                bits = self.bits(piece)
                if not leading:
                    bits = bits[bits >> known == prefix]
                digits = (bits >> shift) & (values - 1)
                counts += torch.bincount(digits, minlength=values).to(self.device)
        return counts

    def bits(self, piece: Tensor) -> Tensor:
        """Return the bit patterns of the magnitudes as integers of the same order."""
        real = piece.abs() if piece.is_complex() else piece
        integer = _INTEGER[self.dtype]
        return real.to(self.dtype).view(integer) & torch.iinfo(integer).max

    def number(self, pattern: int) -> float:
        """Return the magnitude of a bit pattern."""
        return float(torch.tensor(pattern, dtype=_INTEGER[self.dtype]).view(self.dtype))

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of every rank, in the order of ranks."""
        if self.group is None:
            return [numbers]
        local = torch.tensor(numbers, device=self.device)
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, local, group=self.group)
        return [one.tolist() for one in gathered]

    def sum_over_ranks(self, number: int) -> int:
        return sum(numbers[0] for numbers in self.gather([number]))


def _split(flat: Tensor) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = flat.split(_PIECE.get(flat.device.type, _PIECE_ELSEWHERE))
    return pieces
