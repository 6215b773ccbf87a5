"""CIFAR-10: 50,000 + 10,000 colour images of 32x32, ten classes, from its official Python files.

The files are pickles, and a pickle can call any function. They are read by an unpickler that only
knows the functions that build numpy arrays, so a malicious file cannot run code. The last 5,000
training images are the validation split.
"""

from __future__ import annotations

import functools
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdecay.lab.data import sources
from pdecay.lab.data.sources import DataError, Images, Labelled, Remote

FOLDER = "cifar-10-batches-py"
TRAIN = tuple(f"data_batch_{k}" for k in range(1, 6))
TEST = "test_batch"
ROWS = 10_000  # in each file
VALIDATION = 5_000  # training images that are held out
_LARGEST = 64 << 20  # bytes, twice a batch file: protects against a decompression bomb

_REMOTE = Remote(
    "cifar-10-python.tar.gz",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
    "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)


def load() -> Images:
    """Load CIFAR-10, unpacked or as the archive, from ``PDECAY_DATA``, the cache or a download."""
    put = f"{_REMOTE.name} ({_REMOTE.urls[0]}), or its folder {FOLDER},"
    path = sources.find_or_fetch((FOLDER, _REMOTE.name), _REMOTE, what="CIFAR-10", put=put)
    names = (*TRAIN, TEST)
    contents = _read_folder(path, names) if path.is_dir() else _read_archive(path, names)
    batches = []
    for name in names:
        batch = read_batch(contents[name], path / name)
        if len(batch[1]) != ROWS:
            raise sources.altered(path / name, f"it has {len(batch[1])} images, not {ROWS}")
        batches.append(batch)
    *train, test = batches
    pixels, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
    for part in (labels, test[1]):  # all classes have the same number of images
        if (torch.bincount(part, minlength=10) != len(part) // 10).any():
            raise sources.altered(path, "its labels are not those of CIFAR-10")
    return sources.hold_out((pixels, labels), test, VALIDATION)


def read_batch(raw: bytes, path: Path) -> Labelled:
    """Return the images (N, 3, 32, 32) and labels in the content of a batch file."""
    try:
        batch = AllowList(io.BytesIO(raw), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path} {error}") from error
    except Exception as error:  # a damaged pickle can raise any exception
        raise sources.altered(path, f"it cannot be unpickled ({error})") from error
    if not isinstance(batch, dict) or b"data" not in batch or b"labels" not in batch:
        raise sources.altered(path, "it has no b'data' and b'labels'")
    pixels, labels = batch[b"data"], batch[b"labels"]
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.ndim != 2
        or pixels.shape[1] != 3072
    ):
        raise sources.altered(path, "its images are not rows of 3072 bytes")
    if (
        not isinstance(labels, list)
        or len(labels) != len(pixels)
        or not all(isinstance(label, int) and 0 <= label < 10 for label in labels)
    ):
        raise sources.altered(path, f"its labels are not {len(pixels)} numbers from 0 to 9")
    images = torch.from_numpy(np.ascontiguousarray(pixels).reshape(-1, 3, 32, 32))
    return images, torch.tensor(labels, dtype=torch.int64)


class AllowList(pickle.Unpickler):
    """An unpickler for dictionaries, lists, strings, numbers and numpy byte arrays only."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = _allowed_functions().get((module.replace("numpy._core", "numpy.core"), name))
        if allowed is None:
            raise DataError(
                f"is a pickle that calls {module}.{name}, which CIFAR-10 does not need; nothing "
                "was run. Delete it: it may be malicious."
            )
        return allowed

    def persistent_load(self, pid: Any) -> Any:
        raise DataError("is a pickle with references to external objects. Delete it.")


@functools.cache
def _allowed_functions() -> dict[tuple[str, str], Callable[..., Any]]:
    """Return the functions that a pickled numpy array may call, by module and name.

    The rebuild function is taken from an array's ``__reduce__``, because its module is private to
    numpy and has moved before.
    """
    rebuild = np.zeros(1, np.uint8).__reduce__()[0]
    assert callable(rebuild)
    return {
        ("numpy.core.multiarray", "_reconstruct"): rebuild,
        ("numpy.core.numeric", "_frombuffer"): _from_buffer,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _encode,
    }


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any, axis_order: Any = None) -> Any:
    """Rebuild an array from a protocol 5 pickle."""
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


def _encode(text: str, encoding: str) -> bytes:
    """Encode Latin-1 text, which is how Python 3 writes bytes with protocol 2."""
    if encoding != "latin1":
        raise DataError(f"is a pickle that needs the codec {encoding!r}. Delete it.")
    return text.encode("latin1")


def _read_folder(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in names}
    except FileNotFoundError as error:
        lacking = Path(error.filename).name
        raise DataError(
            f"{folder} has no {lacking}: unpack {_REMOTE.name} again, or delete the folder so that "
            "it is downloaded."
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error}. Check its permissions.") from error


def _read_archive(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read the archive's files into memory; nothing is unpacked to the disk."""
    sources.check_digest(path, _REMOTE.digest)
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                folder, _, name = member.name.partition("/")
                expected = folder == FOLDER and name in names and member.size <= _LARGEST
                file = archive.extractfile(member) if expected and member.isreg() else None
                if file:
                    files[name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise sources.altered(path, f"it cannot be unpacked ({error})") from error
    lacking = sorted(set(names) - set(files))
    if lacking:
        raise sources.altered(path, f"it lacks {', '.join(lacking)}")
    return files
