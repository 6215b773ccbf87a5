"""The safetensors container, read without trust.

8 bytes: the header's length. The header: JSON, the tensors' dtypes, shapes and places, and strings
of the user's own. Then the tensors' bytes, one after the other, nothing between them.

The ``safetensors`` package is what the tests compare with, but not what reads here: of two equal
names it takes the last and says nothing, it maps the file (which crashes the process when another
one truncates it), and it writes only what lies in memory as a whole. Nor does ``json`` read the
header as a whole: on nested brackets it takes 50 bytes for each one of theirs.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class FileFormatError(ValueError):
    """A file that cannot be what it says it is, or that asks for more memory than is allowed."""


_REPR = reprlib.Repr()
_REPR.maxstring = 80
_REPR.maxlist = 8


def shown(value: object) -> str:
    """A name or a shape for an error message, which a hostile one is not to fill."""
    return _REPR.repr(value)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an error say which file it is about."""
    try:
        yield
    except FileFormatError as error:
        raise FileFormatError(f"{os.fspath(path)}: {error}") from None


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's place in a container; `begin` and `end` count from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


# The bits of an element, for every dtype that safetensors knows.
DTYPE_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
MAX_DIMENSIONS = 64
_MAX_HEADER = 100_000_000  # safetensors' own limit
_MAX_SIZE = 2**63 - 1

# Strings, and lists of whole numbers; every repetition is possessive, so that matching is linear.
_SPACE = r"[ \t\r\n]*+"
STRING = r'"(?:[^"\\\x00-\x1f]++|\\.)*+"'
NUMBERS = rf"\[{_SPACE}(?:\d{{1,19}}{_SPACE}(?:,{_SPACE}|(?=\])))*+\]"
_ENTRY = re.compile(
    rf"{_SPACE}({STRING}){_SPACE}:{_SPACE}"
    rf'(\{{(?:[^"{{}}\[\]]++|{STRING}|{NUMBERS})*+\}}){_SPACE}([,}}])'
)
_EMPTY = re.compile(rf"\{{{_SPACE}\}}")
_REST = re.compile(_SPACE)


def check_byte_order() -> None:
    """Before numbers are copied between memory and a file as they are."""
    if sys.byteorder != "little":
        raise NotImplementedError("files are little-endian, and this machine is not")


class Container:
    """An open safetensors file, whose header has been read and found to be consistent."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe is to wait for a writer
            raise FileFormatError("it is not a regular file")
        # Unbuffered: what is read goes straight to the arrays that it is for.
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.entries, self.metadata = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def read_into(self, array: NDArray[Any], begin: int) -> None:
        """Fill a contiguous array with the bytes from `begin` on."""
        rest = array.reshape(-1).view(np.uint8).data
        self._file.seek(begin)
        while rest:
            done = self._file.readinto(rest)
            if not done:
                raise FileFormatError(f"it ends at byte {self._file.tell():,}, in mid-tensor")
            rest = rest[done:]

    def read(self, begin: int, nbytes: int) -> NDArray[np.uint8]:
        array = np.empty(nbytes, np.uint8)
        self.read_into(array, begin)
        return array

    def _read_header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        if self.size < 8:
            raise FileFormatError(f"{self.size} bytes are too few for a safetensors file")
        length = int.from_bytes(self.read(0, 8).tobytes(), "little")
        if length > min(self.size - 8, _MAX_HEADER):
            raise FileFormatError(
                f"it claims a header of {length:,} bytes, more than the "
                f"{min(self.size - 8, _MAX_HEADER):,} that it may have: it is damaged, or no "
                "safetensors file"
            )
        try:
            header = self.read(8, length).tobytes().decode()
        except UnicodeDecodeError as error:
            raise FileFormatError(f"its header is not UTF-8: {error.reason}") from None
        entries, metadata = _parse(header, 8 + length)
        _check_places(entries.values(), 8 + length, self.size)
        return entries, metadata


def header_bytes(entries: Iterable[Entry], metadata: Mapping[str, str], at_least: int = 0) -> bytes:
    """A container's first bytes, up to the tensors'. Entries count from the first tensor's byte.

    Padded with spaces to `at_least` bytes, and so that the tensors start at a multiple of 8.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (entry.begin, entry.end),
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    length = max(len(text), at_least - 8)
    text = text.ljust(-(-length // 8) * 8)
    if len(text) > _MAX_HEADER:
        raise ValueError(
            f"names and metadata take {len(text):,} bytes, more than the {_MAX_HEADER:,} that "
            "safetensors allows: keep large metadata elsewhere"
        )
    return len(text).to_bytes(8, "little") + text


def count_elements(name: str, shape: Iterable[int]) -> int:
    """The number of elements, for a shape that a file claims."""
    shape = tuple(shape)
    if len(shape) > MAX_DIMENSIONS:
        raise FileFormatError(
            f"{shown(name)} has {len(shape)} dimensions, more than {MAX_DIMENSIONS}"
        )
    # Zeros aside: torch multiplies the sizes for the strides of an empty tensor too.
    if math.prod(filter(None, shape)) > _MAX_SIZE:
        raise FileFormatError(f"{shown(name)} claims an impossible shape, {shown(list(shape))}")
    return math.prod(shape)


def parse_json(text: str) -> Any:
    """A piece of JSON that is known to be flat; equal keys, ``NaN`` and half characters are not."""
    try:
        value = _DECODER.decode(text)
        parts = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            parts = [*value, *value.values()]
        for part in parts:
            if isinstance(part, str):
                part.encode()  # fails on half of a surrogate pair, which JSON can write
        return value
    except FileFormatError:
        raise
    except ValueError as error:
        raise FileFormatError(f"{text[:50]!r} is not valid: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise FileFormatError("its header has a key twice")
    return result


def _refuse(constant: str) -> None:
    raise FileFormatError(f"its header has {constant}, which is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_refuse)


def _parse(header: str, start: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries and the metadata; the tensors' bytes start at `start`."""
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] | None = None
    match = _EMPTY.match(header)
    position = match.end() if match else 1
    more = match is None and header.startswith("{")
    if not match and not more:
        raise FileFormatError("its header is not JSON")
    while more:
        match = _ENTRY.match(header, position)
        if match is None:
            raise FileFormatError(f"its header is not that of safetensors at character {position}")
        name, value = parse_json(match[1]), parse_json(match[2])
        if name in entries or (name == "__metadata__" and metadata is not None):
            raise FileFormatError(f"its header has {shown(name)} twice")
        if name == "__metadata__":
            metadata = value
        else:
            entries[name] = _entry(name, value, start)
        position = match.end()
        more = match[3] == ","
    if not _REST.fullmatch(header, position):
        raise FileFormatError("its header goes on after its end")
    metadata = metadata or {}
    if not all(isinstance(value, str) for value in metadata.values()):
        raise FileFormatError("its metadata are not all strings")
    return entries, metadata


def _entry(name: str, value: dict[str, Any], start: int) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            if len(value) == 3:
                return Entry(name, dtype, tuple(shape), start + begin, start + end)
    raise FileFormatError(
        f"{shown(name)} needs a dtype, a shape and data_offsets, and nothing else"
    )


def _check_places(entries: Iterable[Entry], start: int, size: int) -> None:
    """Every byte belongs to one tensor, and every tensor has the bytes that its shape needs."""
    place = start
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.dtype not in DTYPE_BITS:
            raise FileFormatError(
                f"{shown(entry.name)} has dtype {shown(entry.dtype)}, which is not known"
            )
        bits = count_elements(entry.name, entry.shape) * DTYPE_BITS[entry.dtype]
        if bits % 8 or entry.end - entry.begin != bits // 8:
            raise FileFormatError(
                f"{shown(entry.name)} has {entry.end - entry.begin:,} bytes, and its shape "
                f"{shown(list(entry.shape))} of {entry.dtype} needs {bits / 8:,.0f}"
            )
        if entry.begin != place:
            raise FileFormatError(
                f"{shown(entry.name)} starts at byte {entry.begin:,} instead of {place:,}: tensors "
                "may neither overlap nor leave gaps"
            )
        place = entry.end
    if place != size:
        raise FileFormatError(f"its tensors end at byte {place:,}, and the file at {size:,}")
