"""Files of ``torch.save``, read as data without ``torch.load``.

A new file is a zip archive: a pickle, and one entry for each storage. An old one is a sequence of
pickles, followed by the storages. Files are untrusted. Each tensor is checked to lie within its
storage, and each storage within the file, before torch sees it. Nothing is decompressed. Copies and
sparse tensors take at most `EXPANSION` times the file's size.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from pdecay.deployment.files.container import MAX_DIMENSIONS
from pdecay.deployment.files.dtypes import BY_TORCH
from pdecay.deployment.files.table import EXPANSION
from pdecay.deployment.inspect.pickles import Name, PickleError, check_keys, expect, read_pickle

# The first bytes of the files. Two bytes are too few: a safetensors file starts with the length of
# its header, which may be 0x280.
_ARCHIVE, _OLD_PICKLE = b"PK\x03\x04", b"\x80\x02\x8a\n"
_OLD_MAGIC, _OLD_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_LOCAL_HEADER = struct.Struct("<4s22x2H")  # of a zip entry; the lengths of its name and extra data
_ALIGNMENT = 16  # bytes; the largest element
_SPARSE_BYTES, _QUANTIZED_BYTES = 40, 28  # of memory for an element, while it is counted
_TENSOR_BYTES = 1000  # of memory for a tensor, without its elements
_MAX_ARGUMENTS = 16  # of a call; torch.save writes at most 8

_INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "QInt8": torch.qint8,
    "QUInt8": torch.quint8,
    "QInt32": torch.qint32,
    "Untyped": torch.uint8,
}
_LAYOUTS = {
    str(layout): layout
    for layout in (
        torch.sparse_coo,
        *(torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc),
    )
}


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    data: Tensor  # bytes


# Returns the position and the size in bytes of the storage with a key.
_Find = Callable[[str], tuple[int, int]]


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a file starts like a zip archive or an old torch pickle."""
    if not Path(path).is_file():
        return False  # the safetensors reader reports the error
    with open(path, "rb") as file:
        return file.read(len(_ARCHIVE)) in (_ARCHIVE, _OLD_PICKLE)


def read_torch_file(path: str | os.PathLike[str]) -> Any:
    """Return the object of a file of ``torch.save``: plain data and tensors.

    The tensors read the file when their elements are used.

    Raises:
        PickleError: if the file contains other objects.
        Exception: of any kind, if the file is damaged.
    """
    with open(path, "rb") as file:
        # Private: a write to a tensor does not reach the file.
        contents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if contents[: len(_ARCHIVE)] == _ARCHIVE:
            return _read_archive(path, contents)
        return _read_old(file, contents)


def _read_archive(path: str | os.PathLike[str], contents: mmap.mmap) -> Any:
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) < len(archive.infolist()):
            raise PickleError("the archive has two entries of one name")
        folder = next(iter(entries)).split("/")[0]
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise PickleError(
                "the archive is compressed, but torch.save compresses nothing; save the state dict "
                "again"
            )
        order = f"{folder}/byteorder"
        if order in entries and archive.read(order) != b"little":
            raise PickleError("the file was written on a big-endian machine; save it on this one")
        pickled = archive.read(f"{folder}/data.pkl")

    def find(key: str) -> tuple[int, int]:
        entry = entries[f"{folder}/data/{key}"]
        signature, *lengths = _LOCAL_HEADER.unpack_from(contents, entry.header_offset)
        if signature != _ARCHIVE:
            raise PickleError(f"storage {key!r} is not where the archive lists it")
        return entry.header_offset + _LOCAL_HEADER.size + sum(lengths), entry.file_size

    return _Contents(contents, find).read(io.BytesIO(pickled))


def _read_old(file: BinaryIO, contents: mmap.mmap) -> Any:
    sizes: dict[str, tuple[int, int]] = {}  # of the storages: elements, and bytes of one

    def note(given: object) -> None:
        key, dtype, count = _storage_of(given)
        sizes[key] = count, dtype.itemsize

    def skim() -> Any:
        return read_pickle(file, lambda name, arguments: OrderedDict(), note)

    magic, protocol, system = skim(), skim(), skim()
    if (magic, protocol) != (_OLD_MAGIC, _OLD_PROTOCOL) or system.get("little_endian") is not True:
        raise PickleError("not of a known format and byte order")
    # The storages follow the last pickle. Their sizes are in the one before, which is read twice.
    start = file.tell()
    skim()
    keys = skim()
    places, at = {}, file.tell()
    for key in expect(keys, list):
        count, itemsize = sizes[expect(key, str)]
        if int.from_bytes(contents[at : at + 8], "little") != count:
            raise PickleError(f"storage {key!r} has another size than its tensors expect")
        places[key] = at + 8, count * itemsize
        at += 8 + count * itemsize
    file.seek(start)
    return _Contents(contents, places.__getitem__).read(file)


def _storage_of(given: Any) -> tuple[str, torch.dtype, int]:
    """Return the key, dtype and size of the storage with a persistent id."""
    kind, named, key, _, count, *view = expect(given, tuple)
    if kind != "storage" or view not in ([], [None]) or type(key) is not str:
        raise PickleError("contains an object that is stored in another way than tensors are")
    _check_integers(count)
    name = named.text.rpartition(".")[2].removesuffix("Storage")
    if name not in _STORAGES:
        raise PickleError(f"contains a {named.text}, which cannot be read")
    return key, _STORAGES[name], count


class _Contents:
    """The functions that a pickle of torch.save calls, made safe, for the contents of a file."""

    def __init__(self, contents: mmap.mmap, find: _Find) -> None:
        self._contents = contents
        self._find = find
        self._left = EXPANSION * len(contents)  # bytes
        self._storages: dict[str, _Storage] = {}
        self._functions: dict[str, Callable[..., object]] = {
            "collections.OrderedDict": self._ordered_dict,
            "collections.Counter": self._counter,
            "torch.Size": self._size,
            "torch.device": lambda *where: where,
            "torch.serialization._get_layout": lambda name: _LAYOUTS[expect(name, str)],
            "_codecs.encode": self._bytes,
            "builtins.set": self._set,
            "builtins.complex": complex,
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor_v2,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
            "torch._utils._rebuild_device_tensor_from_cpu_tensor": lambda data, *_: data,
            "torch._tensor._rebuild_from_type_v2": self._with_attributes,
            "torch._utils._rebuild_meta_tensor_no_storage": self._meta_tensor,
            "torch._utils._rebuild_sparse_tensor": self._sparse_tensor,
            "torch._utils._rebuild_qtensor": self._quantized_tensor,
        }

    def read(self, file: BinaryIO) -> Any:
        """Return the object of the next pickle."""
        return read_pickle(file, self._call, self._storage)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> object:
        name = name.replace("__builtin__.", "builtins.")  # pickles have names of Python 2
        if name not in self._functions:
            raise PickleError(
                f"contains a {name}, which is neither a tensor nor plain data; expected a file "
                "written by torch.save(model.state_dict(), path)"
            )
        # Python copies the arguments of a call: a few bytes can repeat one with a million of them.
        if len(arguments) > _MAX_ARGUMENTS:
            raise PickleError(
                f"passes {len(arguments):,} arguments to {name}, expected at most {_MAX_ARGUMENTS}"
            )
        return self._functions[name](*arguments)

    def _take(self, nbytes: int) -> None:
        """Count memory that is not in the file."""
        self._left -= nbytes
        if self._left < 0:
            raise PickleError(
                f"contents take more than {EXPANSION} times the file's size in memory; save "
                "contiguous tensors"
            )

    # Plain data

    def _size(self, sizes: Sequence[int]) -> tuple[int, ...]:
        self._take(8 * len(expect(sizes, list | tuple)))
        return tuple(sizes)

    def _bytes(self, text: str, encoding: str) -> bytes:
        if expect(encoding, str) != "latin1":
            raise PickleError(f"contains bytes in the encoding {encoding!r}")
        self._take(len(expect(text, str)))
        return text.encode(encoding)

    def _ordered_dict(self, items: Sequence[Sequence[Any]] = ()) -> OrderedDict[Any, Any]:
        self._take(64 * len(expect(items, list | tuple)))
        check_keys(key for key, _ in (expect(item, list | tuple) for item in items))
        return OrderedDict((key, value) for key, value in items)

    def _counter(self, counts: dict[Any, Any]) -> dict[Any, Any]:
        self._take(64 * len(expect(counts, dict)))
        return dict(counts)

    def _set(self, elements: list[Any]) -> set[Any]:
        self._take(64 * len(expect(elements, list)))
        check_keys(elements)
        return set(elements)

    # Tensors

    def _storage(self, given: Any) -> _Storage:
        key, dtype, _ = _storage_of(given)
        if key not in self._storages:
            start, size = self._find(key)
            if start < 0 or start + size > len(self._contents):
                raise PickleError(f"storage {key!r} is outside the file: it is truncated")
            data = torch.empty(0, dtype=torch.uint8)
            if size:
                data = torch.from_numpy(np.frombuffer(self._contents, np.uint8, size, start))
            if start % _ALIGNMENT:
                self._take(size)
                data = data.clone()
            self._storages[key] = _Storage(dtype, data)
        return self._storages[key]

    def _tensor(
        self,
        storage: _Storage,
        offset: int,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        self._take(_TENSOR_BYTES)
        dtype = dtype or expect(storage, _Storage).dtype
        if expect(dtype, torch.dtype) not in BY_TORCH:
            raise PickleError(f"contains a tensor of dtype {dtype}, which cannot be read")
        _check_shape(size)
        _check_integers(offset, *expect(stride, list | tuple))
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        typed = storage.data[: len(storage.data) // dtype.itemsize * dtype.itemsize].view(dtype)
        if math.prod(size) and last >= len(typed):
            raise PickleError(f"a tensor of shape {list(size)[:9]} is outside its storage")
        if not math.prod(size):
            return torch.empty(tuple(size), dtype=dtype)
        return typed.as_strided(tuple(size), tuple(stride), offset)

    def _tensor_v2(
        self,
        storage: _Storage,
        offset: int,
        size: Sequence[int],
        stride: Sequence[int],
        requires_grad: bool,
        hooks: object,
        lazy: dict[str, bool] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        tensor = self._tensor(storage, offset, size, stride, dtype)
        if lazy and lazy.get("conj"):
            tensor = tensor.conj()
        negative = lazy and lazy.get("neg") and tensor.is_floating_point() and tensor.itemsize > 1
        return torch._neg_view(tensor) if negative else tensor

    def _tensor_v3(
        self,
        storage: _Storage,
        offset: int,
        size: Sequence[int],
        stride: Sequence[int],
        requires_grad: bool,
        hooks: object,
        dtype: Name,
        lazy: dict[str, bool] | None = None,
    ) -> Tensor:
        rest = (requires_grad, hooks, lazy, _dtype_of(dtype))
        return self._tensor_v2(storage, offset, size, stride, *rest)

    def _with_attributes(
        self, function: Name, kind: Name, arguments: tuple[Any, ...], state: object
    ) -> object:
        if kind.text not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
            raise PickleError(f"contains a {kind.text}, expected plain tensors")
        return self._call(function.text, expect(arguments, tuple))

    def _meta_tensor(self, dtype: Name, size: Sequence[int], *_: object) -> Tensor:
        self._take(_TENSOR_BYTES)
        _check_shape(size)
        return torch.empty(tuple(size), dtype=_dtype_of(dtype), device="meta")

    def _sparse_tensor(self, layout: torch.layout, data: tuple[Any, ...]) -> Tensor:
        *parts, size = expect(data, tuple)[: 3 if layout == torch.sparse_coo else 4]
        if not all(map(_is_dense, parts)):
            raise PickleError("a sparse tensor consists of something else than dense tensors")
        _check_shape(size)
        # There may be any number of values that have no elements.
        elements = sum(part.numel() + sum(part.shape[:2]) for part in parts)
        self._take(_TENSOR_BYTES + _SPARSE_BYTES * elements)
        # Checked apart: torch turns the option check_invariants into a switch of the whole process,
        # which a sparse tensor of another thread may turn off before it is read.
        if layout == torch.sparse_coo:
            indices, values = parts
            indices = indices.long()
            torch._validate_sparse_coo_tensor_args(indices, values, tuple(size))
            return torch.sparse_coo_tensor(indices, values, tuple(size), check_invariants=True)
        compressed, plain, values = (part.contiguous() for part in parts)
        _check_slices(compressed, plain)
        args = compressed, plain, values, tuple(size)
        torch._validate_sparse_compressed_tensor_args(*args, layout)
        return torch.sparse_compressed_tensor(*args, layout=layout, check_invariants=True)

    def _quantized_tensor(
        self,
        storage: _Storage,
        offset: int,
        size: Sequence[int],
        stride: Sequence[int],
        quantizer: tuple[Any, ...],
        *_: object,
    ) -> Tensor:
        if storage.dtype not in _INTEGERS:
            raise PickleError("a quantized tensor is damaged: its storage has other numbers")
        integers = self._tensor(storage, offset, size, stride, _INTEGERS[storage.dtype])
        self._take(_QUANTIZED_BYTES * integers.numel())
        kind, scale, zero, *axis = expect(quantizer, tuple)[:4]
        if kind.text == "torch.per_tensor_affine":
            return (integers.double() - int(zero)).mul_(float(scale)).float()
        if kind.text != "torch.per_channel_affine":
            raise PickleError(f"contains a tensor quantized as {kind.text}")
        _check_integers(*axis)
        count = size[axis[0]]
        if not all(_is_dense(one) and one.shape == (count,) for one in (scale, zero)):
            raise PickleError("a quantized tensor is damaged: its scales do not fit its shape")
        rows = integers.double().movedim(axis[0], -1)
        return rows.sub(zero).mul(scale).movedim(-1, axis[0]).float()


def _is_dense(value: object) -> bool:
    return type(value) is Tensor and value.layout == torch.strided and not value.is_meta


def _check_slices(ends: Tensor, indices: Tensor) -> None:
    """Raise unless the rows of a compressed sparse tensor are slices of its indices.

    The check of torch reads the indices of a row before it compares the row with their number.
    """
    if not (
        torch.all(ends[..., :1] == 0)
        and torch.all(ends[..., -1:] == indices.shape[-1])
        and torch.all(ends[..., 1:] >= ends[..., :-1])
    ):
        raise PickleError("a sparse tensor is damaged: its rows do not fit its indices")


def _dtype_of(name: Name) -> torch.dtype:
    module, _, own = name.text.partition(".")
    # getattr(torch, ...) imports modules.
    dtype = vars(torch).get(own) if module == "torch" else None
    if not isinstance(dtype, torch.dtype):
        raise PickleError(f"found {name.text} instead of a dtype")
    return dtype


def _check_integers(*numbers: object) -> None:
    if any(type(number) is not int or number < 0 for number in numbers):
        raise PickleError("a tensor is damaged: expected whole numbers that are not negative")


def _check_shape(size: Sequence[int]) -> None:
    _check_integers(*expect(size, list | tuple))
    if len(size) > MAX_DIMENSIONS or math.prod(size) >= 2**63:
        raise PickleError(f"a tensor has the shape {list(size)[:9]}, which is not possible")
