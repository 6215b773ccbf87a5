"""Where a tensor's non-zeros stand, in little more than the entropy of their positions.

Two encodings, on the tensor's elements in row-major order; bit i of a string of bits is bit i % 8,
counted from the lowest, of its byte i // 8:

- ``mask``: a bit for each element, 1 where it is not zero.
- ``gaps``: the rarer of zeros and non-zeros, by the number of elements between one and the next.
  A gap's ``low_bits`` lowest bits go to as many bit planes: plane b holds bit b of every gap. What
  is left, ``gap >> low_bits``, is written in unary: as many 0 bits, then a 1. (These are
  Golomb-Rice codes. On random positions they stay within 4 % of the entropy; the planes make them
  fast without a line of C: numpy packs and counts bits by the byte.)

All checks of a hostile file are counts of bits, :func:`check`: nothing is decoded for them, and
what has passed them decodes.
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
Marks = NDArray[np.bool_]
Positions = NDArray[np.int64]

# Elements at a time: so many that a call of numpy costs nothing, so few that they stay in the
# processor's cache, and a multiple of 8. What is taken beside the tensor is a few times this.
BLOCK = 1 << 18


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the positions of `count` non-zeros among `size` elements are written.

    Args:
        kind: ``dense`` (no positions: all elements are stored), ``mask`` or ``gaps``.
        low_bits, unary_bytes: of the gaps.
    """

    kind: str
    size: int
    count: int
    low_bits: int = 0
    unary_bytes: int = 0

    @property
    def coded(self) -> int:
        """The number of gaps: as many as there are of the rarer kind."""
        return min(self.count, self.size - self.count)

    @property
    def plane_bytes(self) -> int:
        return _bytes_for(self.coded)

    @property
    def nbytes(self) -> int:
        """What the positions take."""
        if self.kind == "mask":
            return _bytes_for(self.size)
        return self.low_bits * self.plane_bytes + self.unary_bytes


def bound(size: int, count: int, itemsize: int) -> float:
    """The bytes below which no code gets that knows no more than how many non-zeros there are.

    The values, and the lesser of a bit for each element and the entropy of the positions; never
    more than all elements take.
    """
    return min(count * itemsize + _entropy(size, count) / 8, size * itemsize)


def _entropy(size: int, count: int) -> float:
    """In bits; at most a bit for each element, so that a mask is never below it."""
    if not 0 < count < size:
        return 0.0
    rest = size - count
    return count * math.log2(size / count) + rest * math.log2(size / rest)


def encode(
    marks: Callable[[], Iterable[Marks]], size: int, count: int
) -> tuple[Encoding, list[Bytes]]:
    """The smaller encoding of some positions, and its bytes.

    Args:
        marks: gives the tensor's elements in blocks of :data:`BLOCK`, True where they are not
            zero. It may be called twice.
        size, count: the number of elements, and of non-zeros.
    """
    mask = Encoding("mask", size, count)
    # A gap takes 2 bits or more in all codes but the shortest, which is about as long as the mask.
    if 2 * mask.coded < size:
        gaps = list(_gaps(marks(), of_zeros=2 * count > size))
        encoding = _best_rice(gaps, mask)
        if encoding.nbytes < mask.nbytes:
            return encoding, _write_gaps(gaps, encoding)
    return mask, [np.packbits(block, bitorder="little") for block in marks()]


def check(encoding: Encoding, data: Bytes) -> None:
    """Refuse positions that are not exactly as many as promised, or not all inside the tensor."""
    if encoding.kind == "mask":
        if _ones(data) != encoding.count or _last_one(data) >= encoding.size:
            raise FileFormatError(f"its mask does not mark {encoding.count:,} of its elements")
    elif encoding.kind == "gaps":
        planes, unary = _parts(encoding, data)
        lowest = 0
        for bit, plane in enumerate(planes):
            lowest += _ones(plane) << bit
            if _last_one(plane) >= encoding.coded:
                raise FileFormatError("its gaps have bits beyond the last gap")
        unary_bits = _last_one(unary) + 1
        if _ones(unary) != encoding.coded or _bytes_for(unary_bits) != len(unary):
            raise FileFormatError(f"its gaps are not {encoding.coded:,}")
        reach = ((unary_bits - encoding.coded) << encoding.low_bits) + lowest + encoding.coded
        if reach > encoding.size:
            raise FileFormatError(f"its gaps reach beyond its {encoding.size:,} elements")


def positions(encoding: Encoding, data: Bytes) -> Iterator[Positions]:
    """The non-zeros' positions, ascending, in blocks. The data must have passed :func:`check`."""
    # A small file is worked on in small pieces: memory stays a small multiple of the file's size.
    step = min(max(len(data) // 16, 64), BLOCK // 8)
    if encoding.kind == "mask":
        for start in range(0, len(data), step):
            yield np.flatnonzero(_bits(data[start : start + step])) + 8 * start
    elif encoding.coded == encoding.count:
        yield from _read_gaps(encoding, data, step)
    else:
        elements = min(max(encoding.count // 8, 512), BLOCK)
        yield from _others(_read_gaps(encoding, data, step), encoding.size, elements)


def _gaps(marks: Iterable[Marks], of_zeros: bool) -> Iterator[NDArray[np.unsignedinteger]]:
    """Block by block, how many elements stand before each marked one, after the one before it."""
    start, last = 0, -1
    for block in marks:
        found = np.flatnonzero(~block if of_zeros else block)
        if len(found):
            gaps = np.diff(found, prepend=last - start) - 1
            last = start + int(found[-1])
            yield gaps.astype(np.min_scalar_type(int(gaps.max())))
        start += len(block)


def _best_rice(gaps: list[NDArray[np.unsignedinteger]], mask: Encoding) -> Encoding:
    """The number of low bits for which the code is shortest, by the code's exact length."""
    mean = (mask.size - mask.coded) / max(mask.coded, 1)
    near = max(math.frexp(mean)[1] - 1, 0)  # the best code has about log2(mean) low bits
    options = []
    for low_bits in range(max(near - 2, 0), near + 2):
        unary_bits = sum(int((g >> low_bits).sum(dtype=np.int64)) for g in gaps) + mask.coded
        options.append(Encoding("gaps", mask.size, mask.count, low_bits, _bytes_for(unary_bits)))
    return min(options, key=lambda option: option.nbytes)


def _write_gaps(gaps: list[NDArray[np.unsignedinteger]], encoding: Encoding) -> list[Bytes]:
    data = np.zeros(encoding.nbytes, np.uint8)
    planes, unary = _parts(encoding, data)
    written = unary_bits = 0
    for block in gaps:
        for bit, plane in enumerate(planes):
            _put(plane, written, (block >> bit & 1).astype(np.uint8))
        ends = np.cumsum((block >> encoding.low_bits).astype(np.int64) + 1)
        ones = np.zeros(ends[-1], np.uint8)
        ones[ends - 1] = 1
        _put(unary, unary_bits, ones)
        written += len(block)
        unary_bits += len(ones)
    return [data]


def _read_gaps(encoding: Encoding, data: Bytes, step: int) -> Iterator[Positions]:
    """The positions that are coded, be they the non-zeros' or the zeros'."""
    planes, unary = _parts(encoding, data)
    narrow = np.min_scalar_type((1 << encoding.low_bits) - 1)
    done, last = 0, -1
    waiting = 0  # unary bits of a gap whose end is in a later piece
    for start in range(0, len(unary), step):
        bits = _bits(unary[start : start + step])
        ends = np.flatnonzero(bits)
        if not len(ends):
            waiting += len(bits)
            continue
        gaps = np.diff(ends, prepend=-1 - waiting) - 1
        waiting = len(bits) - 1 - int(ends[-1])
        lowest = np.zeros(len(ends), narrow)
        for bit, plane in enumerate(planes):
            piece = _bits(plane[done // 8 : _bytes_for(done + len(ends))])
            lowest |= piece[done % 8 :][: len(ends)].astype(narrow) << bit
        gaps <<= encoding.low_bits
        gaps += lowest.astype(np.int64)
        gaps += 1
        np.cumsum(gaps, out=gaps)
        gaps += last
        done += len(ends)
        last = int(gaps[-1])
        yield gaps


def _others(zeros: Iterable[Positions], size: int, step: int) -> Iterator[Positions]:
    """All positions but those given, `step` elements at a time."""
    start = 0
    for block in chain(zeros, [np.array([size])]):  # as if a zero followed the last element
        stop = int(block[-1])
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            inside = block[slice(*np.searchsorted(block, (begin, end)))]
            marks = np.ones(end - begin, bool)
            marks[inside - begin] = False
            yield np.flatnonzero(marks) + begin
        start = stop + 1


def _parts(encoding: Encoding, data: Bytes) -> tuple[Bytes, Bytes]:
    """The bit planes, one a row, and the unary part."""
    split = encoding.low_bits * encoding.plane_bytes
    return data[:split].reshape(encoding.low_bits, encoding.plane_bytes), data[split:]


def _put(target: Bytes, offset: int, bits: Bytes) -> None:
    """Add bits to a string of bits, from `offset` on, where there are zeros so far."""
    packed = np.packbits(np.concatenate([np.zeros(offset % 8, np.uint8), bits]), bitorder="little")
    target[offset // 8 : offset // 8 + len(packed)] |= packed


def _bits(data: Bytes) -> Marks:
    # As truth values: numpy finds those that are set in half the time.
    return np.unpackbits(data, bitorder="little").view(np.bool_)


def _bytes_for(bits: int) -> int:
    return -(-bits // 8)


def _ones(data: Bytes) -> int:
    return int(np.bitwise_count(data).sum(dtype=np.int64))


def _last_one(data: Bytes) -> int:
    """Where the last 1 bit is, if it is in the last byte; else a place before that byte."""
    if not len(data):
        return -1
    return 8 * (len(data) - 1) + int(data[-1]).bit_length() - 1
