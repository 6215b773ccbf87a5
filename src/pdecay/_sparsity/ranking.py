"""Exact global ranking of weights that are spread over many tensors and processes.

The bit pattern of a non-negative floating-point number, read as an integer, grows with the number.
The k-th smallest value is therefore found digit by digit, as in a radix sort: count how many
patterns have each value of the leading digit, find the digit that contains the k-th one, and
continue with the next digit among those. This takes three passes for single precision and six for
double, and never copies the tensors. Single precision on the CPU is counted in C, everything else
in small pieces by torch. In large models, a sample first gives a small range that contains the k-th
value, and one pass is enough.

The counts are summed over processes, so sharded weights (DTensors) are ranked exactly as on one
process, however they are sharded. With sharded weights all functions are collective operations:
call them on every rank.

Weights are ranked by magnitude. :func:`zero_smallest_` can rank by other non-negative scores, and
:func:`kth_magnitude` works on scores as it does on weights. NaN ranks above infinity. Half
precision is ranked in single precision, which represents it exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdecay._sparsity import passes
from pdecay._sparsity.shards import (
    Groups,
    gather,
    global_index,
    groups_of,
    local_part,
    sum_over_ranks_,
)

_DIGIT = 11  # bits: a histogram of 2048 bins
# Elements per piece. On a CPU a piece fits the cache and is too small to start threads for.
_PIECE = {"cpu": 1 << 15}
_PIECE_ELSEWHERE = 1 << 24
# From this many weights on, a sample tells in which small range the k-th value is.
_SAMPLED_FROM = 1 << 22
_SAMPLE = 16  # one block of so many
_SAMPLE_SHIFT = 17  # 64 bins for each power of two
_MARGIN = 1 / 1024  # share of the weights, on each side
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


@torch.no_grad()
def kth_magnitude(tensors: Sequence[Tensor], k: int) -> float:
    """Return the exact k-th smallest ``|w|`` over all tensors, counted from k = 1.

    Args:
        tensors: floating-point or complex tensors.
        k: the rank, from 1 to the number of weights.

    Example:
        >>> kth_magnitude([torch.tensor([3.0, -1.0]), torch.tensor([[2.0]])], k=2)
        2.0
    """
    ranking = _Ranking(tensors)
    return ranking.number(ranking.kth(k)[0])


@torch.no_grad()
def zero_smallest_(
    tensors: Sequence[Tensor],
    k: int,
    *,
    scores: Sequence[Tensor] | None = None,
    squares: Sequence[Tensor | None] | None = None,
) -> float:
    """Set exactly k weights, those of smallest magnitude or score, to 0 in place.

    Among equal weights the earliest are set, in the order of tensors and positions. Weights that
    are zero already are the smallest of all and count among the k.

    Args:
        tensors: as in :func:`kth_magnitude`.
        k: the number of weights to set, from 0 to the number of weights.
        scores: one tensor for each of `tensors`, of the same shape, whose magnitudes are ranked
            instead of the weights. The score of a zero weight must be 0.
        squares: one tensor for each of `tensors`: rank by ``|w| * v^(1/4)`` with these v. All must
            be supported by ``passes.py``, and whole.

    Returns:
        The largest magnitude or score that was set to 0; 0.0 for k = 0.

    Example:
        >>> w = torch.tensor([2.0, -0.5, 1.0, 0.5, 0.5])
        >>> zero_smallest_([w], k=2)
        0.5
        >>> w
        tensor([2.0000, 0.0000, 1.0000, 0.0000, 0.5000])
    """
    ranking = _Ranking(tensors if scores is None else scores, squares)
    if k == 0:
        return 0.0
    pattern, tied, ties = ranking.kth(k)
    all_tied = tied == ties  # then ranks need not share them out
    for i, tensor in enumerate(map(local_part, tensors)):
        if all_tied:
            ranking.zero_(i, tensor, pattern + 1, 0)
            continue
        share = ranking.share_of_ties(i, pattern, tied)
        found = ranking.zero_(i, tensor, pattern, share)
        if tied:
            count = torch.tensor([found], device=tensor.device)
            tied -= int(sum_over_ranks_(count, ranking.groups[i]))
    return ranking.number(pattern)


@torch.no_grad()
def count_zeros(tensors: Sequence[Tensor]) -> int:
    """Count the weights that are exactly zero (0.0 or -0.0) in all tensors on all ranks."""
    return int(_Ranking(tensors).sum(lambda tensor, _: (tensor == 0).sum().reshape(1), 1))


def count_weights(tensors: Sequence[Tensor]) -> int:
    """Count the weights in all tensors on all ranks."""
    return sum(tensor.numel() for tensor in tensors)


class _Ranking:
    """Tensors that are ranked together, with counts that are summed over all ranks."""

    def __init__(
        self, tensors: Sequence[Tensor], squares: Sequence[Tensor | None] | None = None
    ) -> None:
        self.wholes = tensors
        self.squares: Sequence[Tensor | None] = squares or [None] * len(tensors)
        self.tensors = [local_part(tensor) for tensor in tensors]
        self.groups = [groups_of(tensor) for tensor in tensors]
        for tensor in self.tensors:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise TypeError(f"only floating-point weights can be ranked, got {tensor.dtype}")
        double = any(t.dtype in (torch.float64, torch.complex128) for t in self.tensors)
        self.dtype = torch.float64 if double else torch.float32

    def kth(self, k: int) -> tuple[int, int, int]:
        """Return the bit pattern of the k-th smallest value, its count among the k, and its count.

        The counts are those of all ranks.
        """
        if isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"k must be an integer, got {k!r}")
        size = count_weights(self.wholes)
        if not 1 <= k <= size:
            raise ValueError(f"k must be from 1 to the number of weights, {size}, got {k}")
        found = self._kth_by_sample(k, size)
        if found is not None:
            return found
        prefix, shift = 0, torch.iinfo(_INTEGER[self.dtype]).bits - 1  # all bits but the sign bit
        while shift:
            known, width = shift, min(_DIGIT, shift)
            shift -= width
            counts = self.histogram(prefix, known, shift)
            cumulative = counts.cumsum(0)
            digit = int(torch.searchsorted(cumulative, k))
            k -= int(cumulative[digit] - counts[digit])
            prefix = prefix << width | digit
        return prefix, k, int(counts[digit])

    def _kth_by_sample(self, k: int, size: int) -> tuple[int, int, int] | None:
        """Return the result of :meth:`kth` with one pass over all weights instead of three.

        A sample gives a range of values that contains the k-th. One pass copies the values in that
        range and counts those below. Return None for few weights, for tensors that C does not
        support, and if the sample was misleading.
        """
        if size < _SAMPLED_FROM or any(self.groups) or self.dtype != torch.float32:
            return None
        if not all(map(passes.supports, self.tensors)):
            return None
        counts = torch.zeros(1 << (31 - _SAMPLE_SHIFT), dtype=torch.int64, device="cpu")
        for tensor, squares in zip(self.tensors, self.squares, strict=True):
            counts += passes.histogram(tensor, 0, 31, _SAMPLE_SHIFT, squares, _SAMPLE)
        shares = counts.cumsum(0).double() / counts.sum()  # not the default dtype
        ends = shares.new_tensor([k / size - _MARGIN, k / size + _MARGIN])
        low, high = torch.searchsorted(shares, ends.clamp(0, 1)).tolist()
        high = min(high + 1, len(counts)) << _SAMPLE_SHIFT
        found = passes.between(self.tensors, self.squares, low << _SAMPLE_SHIFT, high, size // 8)
        if found is None or not 0 < k - found[1] <= len(found[0]):
            return None
        return _Ranking([found[0]]).kth(k - found[1])

    def share_of_ties(self, i: int, pattern: int, count: int) -> int:
        """Return how many local weights of a tensor are among the first `count` with a pattern.

        The order is that of positions in the whole tensor.
        """
        if not count or not self.groups[i]:
            return count
        tensor, whole = self.tensors[i], self.wholes[i]
        is_tied = (self.bits(tensor.reshape(-1)) == pattern).view(tensor.shape)
        first = gather(is_tied, whole)
        first &= first.reshape(-1).cumsum(0).view(first.shape) <= count
        for dim in range(first.ndim):
            first = first.index_select(dim, global_index(whole, dim).to(first.device))
        return int(first.sum())

    def zero_(self, i: int, tensor: Tensor, pattern: int, share: int) -> int:
        """Zero the weights of tensor i below a pattern and the first `share` at it; count these."""
        ranked, left = self.tensors[i], share
        if self.dtype == torch.float32 and passes.supports(tensor, ranked):
            return passes.zero_(tensor, ranked, pattern, share, self.squares[i])
        flat = tensor.reshape(-1)
        for piece, score in zip(_split(flat), _split(ranked.reshape(-1)), strict=True):
            bits = self.bits(score)
            small = bits < pattern
            if left:
                first = (bits == pattern).nonzero().flatten()[:left]
                small[first] = True
                left -= len(first)
            piece.masked_fill_(small, 0.0)
        if not tensor.is_contiguous():  # then `flat` may be a copy
            tensor.copy_(flat.view(tensor.shape))
        return share - left

    def histogram(self, prefix: int, known: int, shift: int) -> Tensor:
        """Count each value of the next digit among the patterns that begin with `prefix`."""
        values = 1 << (known - shift)
        leading = known == torch.iinfo(_INTEGER[self.dtype]).bits - 1

        def count(tensor: Tensor, squares: Tensor | None) -> Tensor:
            if self.dtype == torch.float32 and passes.supports(tensor):
                return passes.histogram(tensor, prefix, known, shift, squares)
            counts = torch.zeros(values, dtype=torch.int64, device=tensor.device)
            for piece in _split(tensor.reshape(-1)):
                bits = self.bits(piece)
                if not leading:
                    bits = bits[bits >> known == prefix]
                counts += torch.bincount((bits >> shift) & (values - 1), minlength=values)
            return counts

        return self.sum(count, values)

    def sum(self, count: Callable[[Tensor, Tensor | None], Tensor], length: int) -> Tensor:
        """Return the sum of a function's counts over all tensors and ranks."""
        counts: dict[Groups, Tensor] = {}
        for tensor, squares, groups in zip(self.tensors, self.squares, self.groups, strict=True):
            found = count(tensor, squares)
            counts[groups] = (
                counts[groups] + found.to(counts[groups].device) if groups in counts else found
            )
        summed = [sum_over_ranks_(local, groups).cpu() for groups, local in counts.items()]
        return sum(summed, start=torch.zeros(length, dtype=torch.int64, device="cpu"))

    def bits(self, piece: Tensor) -> Tensor:
        """Return the bit patterns of the magnitudes as integers of the same order."""
        real = piece.abs() if piece.is_complex() else piece
        integer = _INTEGER[self.dtype]
        return real.to(self.dtype).view(integer) & torch.iinfo(integer).max

    def number(self, pattern: int) -> float:
        """Return the magnitude of a bit pattern."""
        integer = torch.tensor(pattern, dtype=_INTEGER[self.dtype], device="cpu")
        return float(integer.view(self.dtype))


def _split(flat: Tensor) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = flat.split(_PIECE.get(flat.device.type, _PIECE_ELSEWHERE))
    return pieces
