"""Fashion-MNIST: 60,000 + 10,000 grey images of 28x28, ten kinds of clothing, in idx files.

An idx file is a magic number (two zero bytes, the type 8 for bytes, the number of dimensions),
the dimensions as big-endian 32-bit numbers, then the bytes. Plain or gzip, both are read.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pdecay.lab.data import sources as data
from pdecay.lab.data.sources import DataError, Images, Remote

FOLDERS = ("fashion-mnist", "fashion", "FashionMNIST/raw", ".")
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist

_URLS = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
# Name, shape, md5 of the official gzip file (its README lists them), sha256 of what is in it.
_FILES = (
    (
        "train-images-idx3-ubyte",
        (60_000, 28, 28),
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    (
        "train-labels-idx1-ubyte",
        (60_000,),
        "25c81989df183df01b3e8a0aad5dffbe",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    (
        "t10k-images-idx3-ubyte",
        (10_000, 28, 28),
        "bef4ecab320f06d8554ea6380940ec79",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    (
        "t10k-labels-idx1-ubyte",
        (10_000,),
        "bb300cfdad3c16e7a12a480ee83cd310",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)


def load(*, download: bool = True) -> Images:
    """Fashion-MNIST from ``PDECAY_DATA``, the cache, Debian's package, or a download."""
    parts = []
    for name, shape, md5, sha256 in _FILES:
        path = _locate(name, md5, download)
        raw = _content(path)
        part = parse_idx(raw, path)
        if tuple(part.shape) != shape:
            raise data.altered(path, f"its shape is {tuple(part.shape)}, not {shape}")
        found = hashlib.sha256(raw).hexdigest()
        if found != sha256:
            raise data.altered(path, f"the sha256 of its content is {found}, not {sha256}")
        parts.append(part)
    train_x, train_y, test_x, test_y = parts
    return Images(
        train_x.unsqueeze(1), train_y.long(), test_x.unsqueeze(1), test_y.long(), classes=10
    )


def read_idx(path: Path) -> Tensor:
    """The bytes of one idx file, plain or gzip, as a tensor of the shape its header gives."""
    return parse_idx(_content(path), path)


def parse_idx(raw: bytes, path: Path) -> Tensor:
    """The tensor in the content of an idx file; `path` is for the errors."""
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise data.altered(path, f"it starts with {raw[:4]!r}, which is no idx magic number")
    kind, dimensions = raw[2], raw[3]
    if kind != 8:
        raise data.altered(path, f"its values are of type {kind:#04x}; 0x08 (bytes) is expected")
    start = 4 + 4 * dimensions
    if dimensions == 0 or len(raw) < start:
        raise data.altered(path, f"its header of {dimensions} dimensions is not whole")
    shape = [int(size) for size in np.frombuffer(raw, ">u4", dimensions, offset=4)]
    expected = 1
    for size in shape:
        expected *= size  # exact, whatever the header claims: numpy's would wrap round
    if len(raw) - start != expected:
        raise data.altered(
            path, f"its header promises {expected} bytes ({shape}), and {len(raw) - start} follow"
        )
    values = np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
    return torch.from_numpy(values.copy())  # a copy can be written to, a buffer cannot


def _content(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise data.altered(path, f"gzip says: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}. Check its permissions.") from error


def _locate(name: str, md5: str, download: bool) -> Path:
    here = [f"{folder}/{file}" for folder in FOLDERS for file in (name, f"{name}.gz")]
    found = data.find(*here)
    if found is not None:
        return found
    packaged = DEBIAN / f"{name}.gz"
    if packaged.exists():
        return packaged
    reason = ""
    if download:
        urls = tuple(f"{url}{name}.gz" for url in _URLS)
        try:
            remote = Remote(f"{name}.gz", urls, f"md5:{md5}")
            return data.fetch(remote, data.cache_folder() / FOLDERS[0])
        except DataError as error:
            reason = str(error)
    raise data.missing(
        f"{name} of Fashion-MNIST",
        f"its four idx files, as {FOLDERS[0]}/{name}.gz (on Debian: apt-get install "
        "dataset-fashion-mnist, and nothing has to be put anywhere),",
        reason,
    )
