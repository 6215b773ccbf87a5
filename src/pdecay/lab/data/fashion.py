"""Fashion-MNIST: 60,000 + 10,000 grey images of 28x28, ten classes of clothing, in idx files.

An idx file is a magic number (two zero bytes, the type 8 for bytes, the number of dimensions), then
the dimensions as big-endian 32-bit numbers, then the bytes. Plain and gzip files are read. The last
5,000 training images are the validation split.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np
import torch

from pdecay.lab.data import sources
from pdecay.lab.data.sources import DataError, Images, Remote

FOLDERS = ("fashion-mnist", "fashion", "FashionMNIST/raw", ".")
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # from the package dataset-fashion-mnist
VALIDATION = 5_000  # training images that are held out

_URLS = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
# Name, shape, md5 of the official gzip file (as its README lists it), sha256 of the content.
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


def load() -> Images:
    """Load Fashion-MNIST from ``PDECAY_DATA``, the cache, Debian's package, or a download."""
    parts = []
    for name, shape, md5, sha256 in _FILES:
        path = _locate(name, md5)
        raw = _content(path)
        found = hashlib.sha256(raw).hexdigest()
        if found != sha256:
            raise sources.altered(path, f"the sha256 of its content is {found}, not {sha256}")
        # The digest vouches for the header: skip it.
        values = np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
        parts.append(torch.from_numpy(values.copy()))  # the buffer is read-only
    train_x, train_y, test_x, test_y = parts
    train, test = (train_x.unsqueeze(1), train_y.long()), (test_x.unsqueeze(1), test_y.long())
    return sources.hold_out(train, test, VALIDATION)


def _content(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise sources.altered(path, f"gzip reports: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}. Check its permissions.") from error


def _locate(name: str, md5: str) -> Path:
    names = tuple(f"{folder}/{file}" for folder in FOLDERS for file in (name, f"{name}.gz"))
    packaged = DEBIAN / f"{name}.gz"
    if packaged.exists() and sources.find(*names) is None:
        return packaged
    remote = Remote(f"{name}.gz", tuple(f"{url}{name}.gz" for url in _URLS), f"md5:{md5}")
    put = (
        f"its four idx files, as {FOLDERS[0]}/{name}.gz, (on Debian, apt-get install "
        "dataset-fashion-mnist is enough)"
    )
    what = f"{name} of Fashion-MNIST"
    return sources.find_or_fetch(names, remote, what=what, put=put, subfolder=FOLDERS[0])
