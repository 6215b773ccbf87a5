"""The safetensors container: read an untrusted header, write a header.

A safetensors file has three parts: the header's length in 8 bytes, a JSON header (dtype, shape and
byte range of each tensor, and metadata strings), and the tensors' bytes without gaps.

A sparse file of pdecay is a safetensors file too, so one reader serves sparse and ordinary files.
It does not use the ``safetensors`` package, which cannot keep the promises of :func:`pdecay.load`
and :func:`pdecay.save`: it accepts duplicate names without an error, maps the file into memory by
default (a file that shrinks then crashes the process), and needs all tensors contiguous in memory
at once for writing. The tests compare both implementations.
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
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class FileFormatError(ValueError):
    """A file that is damaged or inconsistent, or needs more memory than allowed."""


_REPR = reprlib.Repr()
_REPR.maxstring = 80
_REPR.maxlist = 8


def short_repr(value: object) -> str:
    """Return a repr of bounded length, for error messages about untrusted names and shapes."""
    return _REPR.repr(value)


@contextmanager
def prefix_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Prefix the message of each FileFormatError with the file's path."""
    try:
        yield
    except FileFormatError as error:
        raise FileFormatError(f"{os.fspath(path)}: {error}") from None


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor in the header; `begin` and `end` are offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


# Bits per element of each safetensors dtype.
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
_TORCH_FILES = (b"PK\x03\x04", b"\x80\x02")  # the first bytes of zip archives and old pickles
_MAX_HEADER = 100_000_000  # the limit of safetensors
_MAX_SIZE = 2**63 - 1

# JSON strings and lists of non-negative integers. All repetitions are possessive, so matching takes
# linear time.
_SPACE = r"[ \t\r\n]*+"
STRING = r'"(?:[^"\\\x00-\x1f]++|\\.)*+"'
NUMBERS = rf"\[{_SPACE}(?:\d{{1,19}}{_SPACE}(?:,{_SPACE}|(?=\])))*+\]"
# A string that does not end is a leaf too: else the end would be searched from each quote in it.
_LEAVES = re.compile(rf"{STRING}?|{NUMBERS}")
_INNER_OBJECT = re.compile(r"\{[^{}\[\]\"]*+\}")
_OUTER_REST = re.compile(rf"[:, \t\r\n]*+\}}{_SPACE}")


def check_byte_order() -> None:
    """Raise on big-endian machines: values are copied between memory and file as they are."""
    if sys.byteorder != "little":
        raise NotImplementedError("the file format is little-endian, but this machine is not")


class Container:
    """An open safetensors file with a checked header.

    Attributes:
        size: the file's size in bytes.
        entries: the tensors by name.
        metadata: the strings of the header.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a named pipe would block
            raise FileFormatError("not a regular file")
        # Unbuffered: reads fill the target arrays directly.
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

    def __exit__(self, *error: object) -> None:
        self.close()

    def read_into(self, array: NDArray[Any], begin: int) -> None:
        """Fill a contiguous array with the bytes that start at offset `begin`."""
        rest = array.reshape(-1).view(np.uint8).data
        self._file.seek(begin)
        while rest:
            count = self._file.readinto(rest)
            if not count:
                raise FileFormatError(f"file ends at byte {self._file.tell():,}, inside a tensor")
            rest = rest[count:]

    def read(self, begin: int, nbytes: int) -> NDArray[np.uint8]:
        array = np.empty(nbytes, np.uint8)
        self.read_into(array, begin)
        return array

    def _read_header(self) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
        if self.size < 8:
            raise FileFormatError(f"{self.size} bytes are too few for a safetensors file")
        start = self.read(0, min(self.size, 9)).tobytes()
        length = int.from_bytes(start[:8], "little")
        limit = min(self.size - 8, _MAX_HEADER)
        if length > limit:
            if start.startswith(_TORCH_FILES):
                raise FileFormatError(
                    "this is a file of torch.save or torch.export, not a safetensors file: use "
                    "torch.load(path, weights_only=True), or torch.export.load(path) for .pt2"
                )
            if not start.endswith(b"{"):
                raise FileFormatError(
                    "not a weight file: expected a file written by pdecay.save, safetensors or "
                    "torch.save"
                )
            raise FileFormatError(
                f"claims a header of {length:,} bytes, but at most {limit:,} are possible: the "
                "file is damaged"
            )
        try:
            header = self.read(8, length).tobytes().decode()
        except UnicodeDecodeError as error:
            raise FileFormatError(f"header is not UTF-8: {error.reason}") from None
        entries, metadata = _parse_header(header, 8 + length)
        _check_offsets(entries.values(), 8 + length, self.size)
        return entries, metadata


def header_bytes(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]],
    metadata: Mapping[str, str],
    min_length: int = 0,
) -> bytes:
    """Return the start of a safetensors file, up to the first tensor's bytes.

    Args:
        tensors: name, dtype, shape and number of bytes of each tensor, in file order.
        metadata: the strings to store.
        min_length: pad with spaces to at least this length. The length is always a multiple of 8.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape, nbytes in tensors:
        offsets = (offset, offset + nbytes)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    length = max(len(text), min_length - 8)
    text = text.ljust(-(-length // 8) * 8)
    if len(text) > _MAX_HEADER:
        raise ValueError(
            f"names and metadata take {len(text):,} bytes, more than the {_MAX_HEADER:,} that "
            "safetensors allows: store large metadata elsewhere"
        )
    return len(text).to_bytes(8, "little") + text


def count_elements(name: str, shape: Iterable[int]) -> int:
    """Return the number of elements of a shape read from a file; raise if it is impossible."""
    shape = tuple(shape)
    if len(shape) > MAX_DIMENSIONS:
        raise FileFormatError(
            f"{short_repr(name)} has {len(shape)} dimensions, more than {MAX_DIMENSIONS}"
        )
    # Ignore zeros: torch also multiplies the other sizes, for the strides of an empty tensor.
    if math.prod(filter(None, shape)) > _MAX_SIZE:
        raise FileFormatError(
            f"{short_repr(name)} claims an impossible shape, {short_repr(list(shape))}"
        )
    return math.prod(shape)


def parse_json(text: str) -> Any:
    """Parse JSON; reject duplicate keys, ``NaN`` and unpaired surrogates.

    The caller must have bounded the nesting, see :func:`_check_nesting`.
    """
    try:
        return _DECODER.decode(text)
    except ValueError as error:
        raise FileFormatError(f"{text[:50]!r} is not valid JSON: {error}") from None


def check_strings(values: Iterable[object]) -> None:
    """Raise UnicodeEncodeError for a string with an unpaired surrogate, which JSON can express."""
    for value in values:
        if isinstance(value, str):
            value.encode()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("duplicate key")
    check_strings(result)
    check_strings(result.values())
    return result


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not allowed")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_reject_constant)


def _check_nesting(header: str) -> None:
    """Raise unless the header is an object of objects of strings and lists of integers.

    Python's parser needs more than 50 bytes for each bracket of deeply nested JSON.
    """
    skeleton = _INNER_OBJECT.sub("", _LEAVES.sub("", header[1:]))
    if not header.startswith("{") or not _OUTER_REST.fullmatch(skeleton):
        raise FileFormatError("header is not a JSON object of tensor entries")


def _parse_header(header: str, start: int) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Return the entries and the metadata; `start` is the offset of the first tensor's bytes."""
    _check_nesting(header)
    fields = parse_json(header)
    metadata = fields.pop("__metadata__", {})
    is_plain = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not is_plain:
        raise FileFormatError("metadata is not an object of strings")
    entries = {name: _parse_entry(name, value, start) for name, value in fields.items()}
    return entries, metadata


def _parse_entry(name: str, value: dict[str, Any], start: int) -> HeaderEntry:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            if len(value) == 3:
                return HeaderEntry(name, dtype, tuple(shape), start + begin, start + end)
    raise FileFormatError(
        f"{short_repr(name)} must have a dtype, a shape and data_offsets, and nothing else"
    )


def _check_offsets(entries: Iterable[HeaderEntry], start: int, size: int) -> None:
    """Check that the tensors fill the file without gaps and have the sizes of their shapes."""
    offset = start
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        name, nbytes = short_repr(entry.name), entry.end - entry.begin
        if entry.dtype not in DTYPE_BITS:
            raise FileFormatError(f"{name} has unknown dtype {short_repr(entry.dtype)}")
        bits = count_elements(entry.name, entry.shape) * DTYPE_BITS[entry.dtype]
        if bits % 8 or nbytes != bits // 8:
            raise FileFormatError(
                f"{name} has {nbytes:,} bytes, but shape {short_repr(list(entry.shape))} of "
                f"{entry.dtype} needs {bits / 8:,.0f}"
            )
        if entry.begin != offset:
            raise FileFormatError(
                f"{name} starts at byte {entry.begin:,}, expected {offset:,}: tensors must not "
                "overlap or leave gaps"
            )
        offset = entry.end
    if offset != size:
        raise FileFormatError(f"tensors end at byte {offset:,}, but the file ends at {size:,}")
