"""The table of a sparse file: a line for each tensor, its dtype, its shape and its encoding.

Lines of JSON, compressed by zlib as a whole:

    ["conv.weight","F32",[64,32,3,3],"gaps",921,4,260]     values, low bits, bytes of unary code
    ["conv.bias","F32",[64],"dense"]
    ["mask","BOOL",[64],"mask",31]                          values
    ["head.weight","same","embedding.weight"]               tied to a tensor above

It has no offsets: where a tensor's bytes are follows from the lines above it, so that no file can
claim two tensors in one place.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdecay.deployment.files.codec import Encoding
from pdecay.deployment.files.container import (
    NUMBERS,
    STRING,
    FileFormatError,
    count_elements,
    parse_json,
    shown,
)
from pdecay.deployment.files.dtypes import BY_NAME, DType


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor: its dtype, its shape, and how its zeros are left out."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    encoding: Encoding

    @property
    def values_nbytes(self) -> int:
        """The bytes of the values that are stored."""
        return self.encoding.count * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor in memory."""
        return self.encoding.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tie:
    """A name for a tensor that has another one already."""

    name: str
    other: str


# A load takes at most 50 times the file's size: 40 times for what it gives, the rest to work with.
EXPANSION = 40

_LINE = re.compile(rf"\[(?:(?:{STRING}|{NUMBERS}|\d{{1,19}}),?)*+\]")
# zlib's window, as a power of 2: it is memory too, and 40 lines say all about the next one.
_WINDOW = 11


def to_lines(rows: Iterable[Row | Tie]) -> list[bytes]:
    """The table's lines."""
    return [(json.dumps(_fields(row), separators=(",", ":")) + "\n").encode() for row in rows]


def memory_of(line: bytes) -> int:
    """What a line becomes in memory, about: objects of Python's and torch's, without elements."""
    return 600 + 4 * len(line)


def compressed(lines: list[bytes], file_size: int) -> bytes:
    """The table as it is in a file that has `file_size` bytes without it.

    It is only wrapped where a file that small could not be loaded: a tensor takes memory, however
    well its line compresses.
    """
    small = zlib.compress(b"".join(lines), 9, wbits=_WINDOW)
    if 2 * sum(map(memory_of, lines)) > EXPANSION * (file_size + len(small)):
        return zlib.compress(b"".join(lines), 0, wbits=_WINDOW)
    return small


def parsed(data: bytes, max_bytes: int) -> Iterator[tuple[Row | Tie, int]]:
    """The rows and their memory, one by one, up to a limit: a few bytes can become many lines."""
    stream = zlib.decompressobj(wbits=_WINDOW)
    piece_size = min(max(len(data), 1024), 1 << 16)
    text = b""
    memory = 0
    try:
        while not stream.eof:
            piece = stream.decompress(data, piece_size)
            if not piece and not stream.eof:
                raise FileFormatError("its table is cut off")
            data = stream.unconsumed_tail
            text += piece
            start = 0
            while (end := text.find(b"\n", start)) >= 0:
                line = text[start : end + 1]
                memory += memory_of(line)
                _check_limit(memory, max_bytes)
                yield _row(line), memory_of(line)
                start = end + 1
            text = text[start:]
            _check_limit(memory + memory_of(text), max_bytes)
    except zlib.error as error:
        raise FileFormatError(f"its table cannot be decompressed: {error}") from None
    if text or stream.unused_data:
        raise FileFormatError("its table goes on after its last line")


def _check_limit(memory: int, max_bytes: int) -> None:
    if memory > max_bytes:
        raise FileFormatError(
            f"its table alone takes more than {max_bytes:,} bytes of memory, which are all that "
            "is allowed; if you trust it, give load a larger max_bytes"
        )


def _fields(row: Row | Tie) -> list[object]:
    if isinstance(row, Tie):
        return [row.name, "same", row.other]
    fields: list[object] = [row.name, row.dtype.name, row.shape, row.encoding.kind]
    if row.encoding.kind != "dense":
        fields.append(row.encoding.count)
    if row.encoding.kind == "gaps":
        fields += [row.encoding.low_bits, row.encoding.unary_bytes]
    return fields


def _row(line: bytes) -> Row | Tie:
    if not line.isascii() or not _LINE.fullmatch(text := line[:-1].decode()):
        raise FileFormatError(f"its table has a line that is not a tensor's: {line[:50]!r}")
    match parse_json(text):
        case [str(name), "same", str(other)]:
            return Tie(name, other)
        case [str(name), str(dtype), list(shape), "dense"]:
            size = count_elements(name, shape)
            encoding = Encoding("dense", size, size)
        case [str(name), str(dtype), list(shape), "mask", int(count)]:
            encoding = Encoding("mask", count_elements(name, shape), count)
        case [str(name), str(dtype), list(shape), "gaps", int(count), int(low), int(unary)]:
            encoding = Encoding("gaps", count_elements(name, shape), count, low, unary)
        case _:
            raise FileFormatError(f"its table has an encoding that is not known: {text[:100]}")
    if dtype not in BY_NAME:
        raise FileFormatError(f"{shown(name)} has dtype {shown(dtype)}, which is not known")
    if not 0 <= encoding.count <= encoding.size or encoding.low_bits > 62:
        raise FileFormatError(f"{shown(name)} claims an impossible number: {text[:100]}")
    return Row(name, BY_NAME[dtype], tuple(shape), encoding)
