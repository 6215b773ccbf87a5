"""Ranking weights by magnitude over many tensors, exactly and without a copy of them all.

The bit pattern of a non-negative floating-point number, read as an integer, grows with the number.
So the k-th smallest magnitude is found digit by digit, as in a radix sort: count how many patterns
have each value of the leading digit, see in which of these counts the k-th falls, and go on with
the next digit among those. Three passes for single precision, six for double, each over small
pieces of the tensors. Counts add up over processes, so that weights which are sharded over ranks
are ranked as exactly as on one.

NaN counts as larger than infinity. Half precision is ranked as single, which holds it exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DIGIT = 11  # bits: one count for each of 2048 values
# Weights at a time: on a CPU what fits its cache, and is not worth the start of its threads.
_PIECE = {"cpu": 1 << 15}
_PIECE_ELSEWHERE = 1 << 24
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


@torch.no_grad()
def kth_magnitude(tensors: Sequence[Tensor], k: int, group: ProcessGroup | None = None) -> float:
    """The k-th smallest ``|w|`` over all tensors, exactly, counted from k = 1.

    Args:
        tensors: floating-point or complex tensors; of a DTensor the local part is read.
        k: the rank, from 1 to the number of weights.
        group: the processes over which the weights are split; without it that of the DTensors'
            mesh, or none. With a group it is a collective operation: every rank calls it.

    Example:
        >>> kth_magnitude([torch.tensor([3.0, -1.0]), torch.tensor([[2.0]])], k=2)
        2.0
    """
    ranking = _Ranking(tensors, group)
    return ranking.number(ranking.kth(k)[0])


@torch.no_grad()
def zero_smallest_(tensors: Sequence[Tensor], k: int, group: ProcessGroup | None = None) -> float:
    """Set the k weights of smallest magnitude to 0, in place: exactly k, also where some tie.

    Of equal weights the earliest go, by rank, then tensor, then position. Weights that are zero
    already are the smallest of all and count among the k.

    Args:
        tensors, group: as in :func:`kth_magnitude`.
        k: how many, from 0 to the number of weights.

    Returns:
        The largest magnitude that was set to 0; 0.0 for k = 0.

    Example:
        >>> w = torch.tensor([2.0, -0.5, 1.0, 0.5, 0.5])
        >>> zero_smallest_([w], k=2)
        0.5
        >>> w
        tensor([2.0000, 0.0000, 1.0000, 0.0000, 0.5000])
    """
    ranking = _Ranking(tensors, group)
    if k == 0:
        return 0.0
    pattern, tied = ranking.kth(k)
    for tensor in ranking.tensors:
        flat = tensor.reshape(-1)
        for piece in _split(flat):
            bits = ranking.bits(piece)
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
    """How many weights are exactly zero (0.0 or -0.0), over all tensors and ranks of the group."""
    ranking = _Ranking(tensors, group)
    zeros = sum(tensor.numel() - int(tensor.count_nonzero()) for tensor in ranking.tensors)
    return ranking.summed(zeros)


def count_weights(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> int:
    """How many weights there are, over all tensors and ranks of the group."""
    ranking = _Ranking(tensors, group)
    return ranking.summed(ranking.size)


def local_part(tensor: Tensor) -> Tensor:
    """The part of a DTensor that lies on this rank, as a view of it; other tensors as they are."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def group_of(tensors: Sequence[Tensor]) -> ProcessGroup | None:
    """The processes over which DTensors are sharded; None for tensors that are whole here."""
    sharded: set[tuple[Any, int]] = set()
    whole = False
    for tensor in tensors:
        placements = getattr(tensor, "placements", ())
        dims = [dim for dim, placement in enumerate(placements) if placement.is_shard()]
        sharded.update((tensor.device_mesh, dim) for dim in dims)  # type: ignore[attr-defined]
        whole = whole or not dims
    if not sharded:
        return None
    if whole or len(sharded) > 1:
        raise ValueError(
            "the weights are not all split over the same processes (some are whole, or their "
            "meshes differ): rank those that are apart from the others, or pass group="
        )
    ((mesh, dim),) = sharded
    group: ProcessGroup = mesh.get_group(dim)
    return group


class _Ranking:
    """The parts of some tensors that lie on this rank, and how to count over all ranks."""

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
        """The bit pattern of the k-th smallest magnitude, and how many of it are among the k.

        The second number is this rank's: of those that tie, the ranks before it take theirs first.
        """
        if isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"k must be an integer, got {k!r}")
        double = [tensor.dtype in (torch.float64, torch.complex128) for tensor in self.tensors]
        size, any_double = map(sum, zip(*self.gathered([self.size, int(any(double))]), strict=True))
        if not 1 <= k <= size:
            raise ValueError(f"k must be from 1 to the number of weights, {size}, got {k}")
        self.dtype = torch.float64 if any_double else torch.float32
        prefix, shift = 0, torch.iinfo(_INTEGER[self.dtype]).bits - 1  # all bits but the sign's
        while shift:
            known, width = shift, min(_DIGIT, shift)
            shift -= width
            mine = self.counts(prefix, known, shift)
            counts = mine.clone()
            if self.group is not None:
                dist.all_reduce(counts, group=self.group)
            upto = counts.cumsum(0)
            digit = int(torch.searchsorted(upto, k))
            k -= int(upto[digit] - counts[digit])
            prefix = prefix << width | digit
        ties = [one for (one,) in self.gathered([int(mine[digit])])]
        return prefix, min(max(k - sum(ties[: self.rank]), 0), ties[self.rank])

    def counts(self, prefix: int, known: int, shift: int) -> Tensor:
        """How many patterns with this prefix (the bits from `known`) have each next digit."""
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
        """The bit patterns of the magnitudes, as integers in the same order."""
        real = piece.abs() if piece.is_complex() else piece
        integer = _INTEGER[self.dtype]
        return real.to(self.dtype).view(integer) & torch.iinfo(integer).max

    def number(self, pattern: int) -> float:
        """The magnitude that a bit pattern stands for."""
        return float(torch.tensor(pattern, dtype=_INTEGER[self.dtype]).view(self.dtype))

    def gathered(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of each rank, in the order of ranks."""
        if self.group is None:
            return [numbers]
        mine = torch.tensor(numbers, device=self.device)
        of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(of_all, mine, group=self.group)
        return [one.tolist() for one in of_all]

    def summed(self, number: int) -> int:
        return sum(numbers[0] for numbers in self.gathered([number]))


def _split(flat: Tensor) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = flat.split(_PIECE.get(flat.device.type, _PIECE_ELSEWHERE))
    return pieces
