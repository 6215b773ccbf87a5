"""The table of a sparse file: one line per tensor with its name, dtype, shape and encoding.

The table is zlib-compressed lines of JSON:

    ["conv.weight","F32",[64,32,3,3],"gaps",921,4,260]     values, low bits, bytes of unary code
    ["conv.bias","F32",[64],"dense"]
    ["mask","BOOL",[64],"mask",31]                          values
    ["head.weight","same","embedding.weight"]               tied to an earlier tensor

It contains no offsets. A tensor's data follows the data of the previous tensors, so two tensors
cannot overlap.
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
    check_strings,
    count_elements,
    parse_json,
    short_repr,
)
from pdecay.deployment.files.dtypes import BY_NAME, DType


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor's name, dtype, shape and encoding."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    encoding: Encoding

    @property
    def values_nbytes(self) -> int:
        """The bytes of the stored values."""
        return self.encoding.count * self.dtype.itemsize

    @property
    def stored_nbytes(self) -> int:
        """The bytes of the stored values and their positions."""
        return self.values_nbytes + self.encoding.nbytes

    @property
    def nbytes(self) -> int:
        """The bytes of the dense tensor in memory."""
        return self.encoding.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tie:
    """A second name of a tensor."""

    name: str
    other: str


# Tensors may take up to 40 times the file's size in memory; a load takes up to 50 times in total.
EXPANSION = 40

_LINE = re.compile(rf"\[(?:(?:{STRING}|{NUMBERS}|\d{{1,19}}),?)*+\]")
# log2 of zlib's window size. A small window limits zlib's memory and still covers about 40 lines.
_WINDOW = 11


def format_lines(rows: Iterable[Row | Tie]) -> list[bytes]:
    """Return the table's lines."""
    return [(json.dumps(_fields(row), separators=(",", ":")) + "\n").encode() for row in rows]


def line_memory(line: bytes | bytearray) -> int:
    """Estimate the memory of a line's Python and torch objects, without the tensor's elements."""
    return 600 + 4 * len(line)


def compress(lines: list[bytes], file_size: int) -> bytes:
    """Compress the table of a file that has `file_size` bytes without it.

    The table is stored uncompressed if the compressed file would be so small that its tensors
    exceed the memory limit of :data:`EXPANSION`.
    """
    small = zlib.compress(b"".join(lines), 9, wbits=_WINDOW)
    if 2 * sum(map(line_memory, lines)) > EXPANSION * (file_size + len(small)):
        return zlib.compress(b"".join(lines), 0, wbits=_WINDOW)
    return small


def parse(data: bytes, max_bytes: int) -> Iterator[tuple[Row | Tie, int]]:
    """Yield each row with its estimated memory; stop with an error at `max_bytes`.

    Lines are decompressed and parsed one by one: a few bytes may expand to many lines.
    """
    stream = zlib.decompressobj(wbits=_WINDOW)
    piece_size = min(max(len(data), 1024), 1 << 16)
    text = bytearray()  # bytes would copy a long line for each piece
    memory = 0
    try:
        while not stream.eof:
            piece = stream.decompress(data, piece_size)
            if not piece and not stream.eof:
                raise FileFormatError("table is truncated")
            data = stream.unconsumed_tail
            start, end = 0, len(text)
            text += piece
            while (end := text.find(b"\n", end)) >= 0:
                line = bytes(text[start : end + 1])
                memory += line_memory(line)
                _check_limit(memory, max_bytes)
                yield _parse_row(line), line_memory(line)
                start = end = end + 1
            del text[:start]
            _check_limit(memory + line_memory(text), max_bytes)
    except zlib.error as error:
        raise FileFormatError(f"table cannot be decompressed: {error}") from None
    if text or stream.unused_data:
        raise FileFormatError("table has data after its last line")


def _check_limit(memory: int, max_bytes: int) -> None:
    if memory > max_bytes:
        raise FileFormatError(
            f"table alone takes more than the allowed {max_bytes:,} bytes of memory; if you trust "
            "the file, call load(path, trusted=True)"
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


def _parse_row(line: bytes) -> Row | Tie:
    if not line.isascii() or not _LINE.fullmatch(text := line[:-1].decode()):
        raise FileFormatError(f"table has an invalid line: {line[:50]!r}")
    fields = parse_json(text)
    try:
        check_strings(fields)
    except UnicodeEncodeError as error:
        raise FileFormatError(f"table has an invalid line: {error}") from None
    match fields:
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
            raise FileFormatError(f"table has an unknown encoding: {text[:100]}")
    if dtype not in BY_NAME:
        raise FileFormatError(f"{short_repr(name)} has unknown dtype {short_repr(dtype)}")
    if not 0 <= encoding.count <= encoding.size or encoding.low_bits > 62:
        raise FileFormatError(f"{short_repr(name)} claims an impossible number: {text[:100]}")
    return Row(name, BY_NAME[dtype], tuple(shape), encoding)
