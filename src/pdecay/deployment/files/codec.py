"""Encodings of the positions of non-zero elements, close to their entropy.

Elements are numbered in row-major order. Bit i of a bit string is bit ``i % 8``, counted from the
lowest, of byte ``i // 8``. There are two encodings:

- ``mask``: one bit per element, 1 for a non-zero.
- ``gaps``: the distances between the elements of the rarer kind, zeros or non-zeros. A gap is the
  number of elements between one and the next. Its ``low_bits`` lowest bits are stored in bit
  planes: plane b holds bit b of every gap. The rest, ``gap >> low_bits``, is stored in unary: that
  many 0 bits, then a 1. These are Golomb-Rice codes, within 4 % of the entropy for random
  positions. Bit planes make them fast in numpy, which packs and counts bits by the byte.

:func:`check` validates untrusted data by counting bits, without decoding. Data that passes the
check can be decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pdecay.deployment.files.container import FileFormatError

Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]
Gaps = NDArray[np.unsignedinteger]

# Elements per block, a multiple of 8: large enough to amortise numpy's call overhead, small enough
# for the processor's cache. Working memory is a few times this.
BLOCK = 1 << 18


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the positions of `count` non-zeros among `size` elements are stored.

    Args:
        kind: ``dense`` (no positions, all elements are stored), ``mask`` or ``gaps``.
        size, count: the number of elements and of non-zeros.
        low_bits, unary_bytes: the number of bit planes and the size of the unary part of ``gaps``.
    """

    kind: str
    size: int
    count: int
    low_bits: int = 0
    unary_bytes: int = 0

    @property
    def gap_count(self) -> int:
        """The number of gaps, one for each element of the rarer kind."""
        return min(self.count, self.size - self.count)

    @property
    def plane_bytes(self) -> int:
        return _bytes_for(self.gap_count)

    @property
    def nbytes(self) -> int:
        """The bytes of the encoded positions."""
        if self.kind == "mask":
            return _bytes_for(self.size)
        return self.low_bits * self.plane_bytes + self.unary_bytes


def lower_bound(size: int, count: int, itemsize: int) -> float:
    """Return the least bytes for `count` non-zeros, given only their number.

    This is the size of the values plus the entropy of their positions, at most one bit per
    element. It is never more than the dense size.
    """
    return min(count * itemsize + _entropy(size, count) / 8, size * itemsize)


def _entropy(size: int, count: int) -> float:
    """Return the entropy of the positions in bits."""
    if not 0 < count < size:
        return 0.0
    rest = size - count
    return count * math.log2(size / count) + rest * math.log2(size / rest)


def encode(
    blocks: Callable[[], Iterable[Mask]], size: int, count: int
) -> tuple[Encoding, list[Bytes]]:
    """Return the smaller encoding and its bytes.

    Args:
        blocks: returns the mask of non-zeros in blocks of :data:`BLOCK`. It may be called twice.
        size, count: the number of elements and of non-zeros.
    """
    mask = Encoding("mask", size, count)
    # A gap takes at least 2 bits, except with the shortest code, which is as long as the mask.
    if 2 * mask.gap_count < size:
        gaps = list(_find_gaps(blocks(), of_zeros=2 * count > size))
        encoding = _best_rice(gaps, mask)
        if encoding.nbytes < mask.nbytes:
            return encoding, _write_gaps(gaps, encoding)
    return mask, [np.packbits(block, bitorder="little") for block in blocks()]


def check(encoding: Encoding, data: Bytes) -> None:
    """Raise unless the data encodes exactly `count` positions inside the tensor."""
    if encoding.kind == "mask":
        if _popcount(data) != encoding.count or _last_set_bit(data) >= encoding.size:
            raise FileFormatError(f"mask does not mark {encoding.count:,} elements")
    elif encoding.kind == "gaps":
        planes, unary = _split(encoding, data)
        low_sum = 0
        for bit, plane in enumerate(planes):
            low_sum += _popcount(plane) << bit
            if _last_set_bit(plane) >= encoding.gap_count:
                raise FileFormatError("gaps have bits after the last gap")
        unary_bits = _last_set_bit(unary) + 1
        if _popcount(unary) != encoding.gap_count or _bytes_for(unary_bits) != len(unary):
            raise FileFormatError(f"number of gaps is not {encoding.gap_count:,}")
        unary_sum = (unary_bits - encoding.gap_count) << encoding.low_bits
        if unary_sum + low_sum + encoding.gap_count > encoding.size:
            raise FileFormatError(f"gaps exceed the {encoding.size:,} elements")


def positions(encoding: Encoding, data: Bytes) -> Iterator[Positions]:
    """Yield the positions of the non-zeros in ascending blocks; `data` must pass :func:`check`."""
    # Process a small file in small pieces, so that memory stays proportional to the file's size.
    step = min(max(len(data) // 16, 64), BLOCK // 8)
    if encoding.kind == "mask":
        for start in range(0, len(data), step):
            yield np.flatnonzero(_unpack(data[start : start + step])) + 8 * start
    elif encoding.gap_count == encoding.count:
        yield from _read_gaps(encoding, data, step)
    else:
        elements = min(max(encoding.count // 8, 512), BLOCK)
        yield from _complement(_read_gaps(encoding, data, step), encoding.size, elements)


def _find_gaps(blocks: Iterable[Mask], of_zeros: bool) -> Iterator[Gaps]:
    """Yield the gaps of each block between its zeros or its non-zeros."""
    start, last = 0, -1
    for block in blocks:
        found = np.flatnonzero(~block if of_zeros else block)
        if len(found):
            gaps = np.diff(found, prepend=last - start) - 1
            last = start + int(found[-1])
            yield gaps.astype(np.min_scalar_type(int(gaps.max())))
        start += len(block)


def _best_rice(gaps: list[Gaps], mask: Encoding) -> Encoding:
    """Return the encoding with the number of low bits that gives the shortest code."""
    mean = (mask.size - mask.gap_count) / max(mask.gap_count, 1)
    near = max(math.frexp(mean)[1] - 1, 0)  # the optimum is close to log2(mean)
    options = []
    for low_bits in range(max(near - 2, 0), near + 2):
        unary_bits = sum(int((g >> low_bits).sum(dtype=np.int64)) for g in gaps) + mask.gap_count
        options.append(Encoding("gaps", mask.size, mask.count, low_bits, _bytes_for(unary_bits)))
    return min(options, key=lambda option: option.nbytes)


def _write_gaps(gaps: list[Gaps], encoding: Encoding) -> list[Bytes]:
    data = np.zeros(encoding.nbytes, np.uint8)
    planes, unary = _split(encoding, data)
    written = unary_bits = 0
    for block in gaps:
        for bit, plane in enumerate(planes):
            _write_bits(plane, written, (block >> bit & 1).astype(np.uint8))
        ends = np.cumsum((block >> encoding.low_bits).astype(np.int64) + 1)
        ones = np.zeros(ends[-1], np.uint8)
        ones[ends - 1] = 1
        _write_bits(unary, unary_bits, ones)
        written += len(block)
        unary_bits += len(ones)
    return [data]


def _read_gaps(encoding: Encoding, data: Bytes, step: int) -> Iterator[Positions]:
    """Yield the encoded positions, which may be those of the zeros."""
    planes, unary = _split(encoding, data)
    narrow = np.min_scalar_type((1 << encoding.low_bits) - 1)
    done, last = 0, -1
    pending = 0  # unary bits of a gap that ends in a later piece
    for start in range(0, len(unary), step):
        bits = _unpack(unary[start : start + step])
        ends = np.flatnonzero(bits)
        if not len(ends):
            pending += len(bits)
            continue
        gaps = np.diff(ends, prepend=-1 - pending) - 1
        pending = len(bits) - 1 - int(ends[-1])
        low = np.zeros(len(ends), narrow)
        for bit, plane in enumerate(planes):
            piece = _unpack(plane[done // 8 : _bytes_for(done + len(ends))])
            low |= piece[done % 8 :][: len(ends)].astype(narrow) << bit
        # In place, to save memory.
        gaps <<= encoding.low_bits
        gaps += low.astype(np.int64)
        gaps += 1
        np.cumsum(gaps, out=gaps)
        gaps += last
        done += len(ends)
        last = int(gaps[-1])
        yield gaps


def _complement(zeros: Iterable[Positions], size: int, step: int) -> Iterator[Positions]:
    """Yield all positions except the given ones, `step` elements at a time."""
    start = 0
    for block in chain(zeros, [np.array([size])]):  # a sentinel zero after the last element
        stop = int(block[-1])
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            inside = block[slice(*np.searchsorted(block, (begin, end)))]
            mask = np.ones(end - begin, bool)
            mask[inside - begin] = False
            yield np.flatnonzero(mask) + begin
        start = stop + 1


def _split(encoding: Encoding, data: Bytes) -> tuple[Bytes, Bytes]:
    """Split the data into the bit planes, one per row, and the unary part."""
    split = encoding.low_bits * encoding.plane_bytes
    return data[:split].reshape(encoding.low_bits, encoding.plane_bytes), data[split:]


def _write_bits(target: Bytes, offset: int, bits: Bytes) -> None:
    """Set bits from bit `offset` on, where the target is still zero."""
    packed = np.packbits(np.concatenate([np.zeros(offset % 8, np.uint8), bits]), bitorder="little")
    target[offset // 8 : offset // 8 + len(packed)] |= packed


def _unpack(data: Bytes) -> Mask:
    # As bool: np.flatnonzero is twice as fast on it as on uint8.
    return np.unpackbits(data, bitorder="little").view(np.bool_)


def _bytes_for(bits: int) -> int:
    return -(-bits // 8)


def _popcount(data: Bytes) -> int:
    return int(np.bitwise_count(data).sum(dtype=np.int64))


def _last_set_bit(data: Bytes) -> int:
    """Return the last set bit's index if it is in the last byte, else an index before that byte."""
    if not len(data):
        return -1
    return 8 * (len(data) - 1) + int(data[-1]).bit_length() - 1
