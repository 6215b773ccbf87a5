"""CIFAR-10: 50,000 + 10,000 colour images of 32x32, ten classes, from its official python files.

Those files are pickles, and a pickle may call anything. Here they are read by an unpickler that
knows three names, those of which numpy arrays are made, so that a malicious file runs nothing.
"""

from __future__ import annotations

import functools
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdecay.lab.data import sources as data
from pdecay.lab.data.sources import DataError, Images, Remote

FOLDER = "cifar-10-batches-py"
TRAIN = tuple(f"data_batch_{k}" for k in range(1, 6))
TEST = "test_batch"
ROWS = 10_000  # of each file
_LARGEST = 64 << 20  # bytes; twice a batch file: an archive that claims more is not CIFAR-10

_REMOTE = Remote(
    "cifar-10-python.tar.gz",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
    "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)


def load(*, download: bool = True) -> Images:
    """CIFAR-10 from ``PDECAY_DATA`` or the cache, unpacked or as the archive, or a download."""
    path = data.find(FOLDER, _REMOTE.name)
    if path is None:
        put = f"{_REMOTE.name} ({_REMOTE.urls[0]}), or the folder {FOLDER} in it,"
        path = data.fetch_or_tell(_REMOTE, "CIFAR-10", put, download=download)
    read = (lambda name: _from_folder(path, name)) if path.is_dir() else _archive(path)
    batches = [read_batch(read(name), path / name) for name in (*TRAIN, TEST)]
    for (_, labels), name in zip(batches, (*TRAIN, TEST), strict=True):
        if len(labels) != ROWS:
            raise data.altered(path / name, f"it has {len(labels)} images, not {ROWS}")
    train_y = torch.cat([labels for _, labels in batches[:-1]])
    for labels in (train_y, batches[-1][1]):  # every class is there equally often
        if (torch.bincount(labels, minlength=10) != len(labels) // 10).any():
            raise data.altered(path, "its labels are not those of CIFAR-10")
    train_x = torch.cat([pixels for pixels, _ in batches[:-1]])
    return Images(train_x, train_y, *batches[-1], classes=10)


def read_batch(raw: bytes, path: Path) -> tuple[Tensor, Tensor]:
    """The images (N, 3, 32, 32) and labels in the content of a batch file."""
    try:
        batch = AllowList(io.BytesIO(raw), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path} {error}") from error
    except Exception as error:  # pickle's documentation promises no list of what damage raises
        raise data.altered(path, f"it cannot be unpickled ({error})") from error
    if not isinstance(batch, dict) or b"data" not in batch or b"labels" not in batch:
        raise data.altered(path, "it has no b'data' and b'labels'")
    pixels, labels = batch[b"data"], batch[b"labels"]
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.ndim != 2
        or pixels.shape[1] != 3072
    ):
        raise data.altered(path, "its images are not rows of 3072 bytes")
    if (
        not isinstance(labels, list)
        or len(labels) != len(pixels)
        or not all(isinstance(label, int) and 0 <= label < 10 for label in labels)
    ):
        raise data.altered(path, f"its labels are not {len(pixels)} numbers from 0 to 9")
    images = torch.from_numpy(np.ascontiguousarray(pixels).reshape(-1, 3, 32, 32))
    return images, torch.tensor(labels, dtype=torch.int64)


class AllowList(pickle.Unpickler):
    """Unpickles dictionaries, lists, strings, numbers and numpy byte arrays, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = _names().get((module.replace("numpy._core", "numpy.core"), name))
        if allowed is None:
            raise DataError(
                f"is a pickle that asks for {module}.{name}, which CIFAR-10 does not; nothing of "
                "it was run. Delete it: it may be malicious."
            )
        return allowed

    def persistent_load(self, pid: Any) -> Any:
        raise DataError("is a pickle that refers to objects outside of it. Delete it.")


@functools.cache
def _names() -> dict[tuple[str, str], Callable[..., Any]]:
    """What a pickled numpy array asks for, under numpy's old and new module names.

    The functions are taken from an array's own ``__reduce__``: where numpy keeps them is private
    and has moved before.
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
    """What protocol 5 makes of an array."""
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


def _encode(text: str, encoding: str) -> bytes:
    """Bytes as python 3 writes them for protocol 2: Latin-1 text, encoded; no other codec."""
    if encoding != "latin1":
        raise DataError(f"is a pickle that asks for the codec {encoding!r}. Delete it.")
    return text.encode("latin1")


def _from_folder(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} has no {name}: unpack {_REMOTE.name} again, whole, or delete the folder and "
            "let it be downloaded."
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {folder / name}: {error}. Check its permissions.") from error


def _archive(path: Path) -> Callable[[str], bytes]:
    """A reader of the archive's files; they are read into memory and unpacked nowhere."""
    data.check_digest(path, _REMOTE.digest)
    wanted = {f"{FOLDER}/{name}": name for name in (*TRAIN, TEST)}
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = wanted.get(member.name)
                file = archive.extractfile(member) if name and member.isreg() else None
                if name and file and member.size <= _LARGEST:
                    files[name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise data.altered(path, f"it cannot be unpacked ({error})") from error
    if len(files) < len(wanted):
        lacking = ", ".join(sorted(set(wanted.values()) - set(files)))
        raise data.altered(path, f"it lacks {lacking}")
    return files.__getitem__
