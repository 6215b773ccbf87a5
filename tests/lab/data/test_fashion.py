from __future__ import annotations

import gzip
import hashlib

import numpy as np
import pytest
import torch

from pdecay.lab.data import fashion, sources
from pdecay.lab.data.sources import DataError

SHAPES = {
    "train-images-idx3-ubyte": (30, 28, 28),
    "train-labels-idx1-ubyte": (30,),
    "t10k-images-idx3-ubyte": (10, 28, 28),
    "t10k-labels-idx1-ubyte": (10,),
}


@pytest.fixture
def small(folder, idx, monkeypatch):
    """Fashion-MNIST with 30 + 10 images and matching digests; one file is not gzip."""
    files = []
    for name, shape in SHAPES.items():
        values = np.random.default_rng(0).integers(10, size=shape)
        file = name if name == "t10k-labels-idx1-ubyte" else f"{name}.gz"
        raw = idx(folder / "fashion-mnist" / file, values)
        files.append((name, shape, "no md5", hashlib.sha256(raw).hexdigest()))
    monkeypatch.setattr(fashion, "_FILES", tuple(files))
    monkeypatch.setattr(fashion, "VALIDATION", 6)
    monkeypatch.setattr(fashion, "DEBIAN", folder / "no package")
    return folder / "fashion-mnist"


def test_load(small):
    images = fashion.load()
    assert images.train[0].shape == (24, 1, 28, 28)
    assert images.validation[0].shape == (6, 1, 28, 28)
    assert images.test[0].dtype == torch.uint8
    labels = torch.cat([images.train[1], images.validation[1]])
    assert labels.tolist() == np.random.default_rng(0).integers(10, size=30).tolist()


@pytest.mark.parametrize("place", ["fashion", "FashionMNIST/raw", "."])
def test_load_from_other_folders(small, place):
    (small.parent / place).mkdir(parents=True, exist_ok=True)
    for file in list(small.iterdir()):
        file.rename(small.parent / place / file.name)
    assert len(fashion.load().test[1]) == 10


def test_load_from_debians_package(small, monkeypatch):
    label = small / "t10k-labels-idx1-ubyte"
    label.with_name(f"{label.name}.gz").write_bytes(gzip.compress(label.read_bytes()))
    label.unlink()
    package = small.parent / "package"
    small.rename(package)
    monkeypatch.setattr(fashion, "DEBIAN", package)
    assert len(fashion.load().test[1]) == 10


WHOLE = gzip.compress(bytes(50), mtime=0)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "sha256 of its content"),
        (b"<html>not found</html>", "sha256 of its content"),
        (WHOLE[:-9], "gzip reports"),
        (WHOLE[:-8] + bytes(8), "gzip reports"),
        (b"\x1f\x8b" + bytes(20), "gzip reports"),
    ],
)
def test_damaged_file_is_reported(small, raw, message):
    path = small / "train-labels-idx1-ubyte.gz"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=message) as raised:
        fashion.load()
    assert str(path) in str(raised.value)
    assert "delete it" in str(raised.value)


def test_altered_pixel_is_reported(small, idx):
    path = small / "t10k-labels-idx1-ubyte"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match="sha256 of its content"):
        fashion.load()


def test_download_is_cached(small, monkeypatch, url):
    source = small.parent.parent / "server"
    small.rename(source)
    label = source / "t10k-labels-idx1-ubyte"
    label.with_name(f"{label.name}.gz").write_bytes(gzip.compress(label.read_bytes()))
    files = [
        (name, shape, hashlib.md5((source / f"{name}.gz").read_bytes()).hexdigest(), sha256)
        for name, shape, _, sha256 in fashion._FILES
    ]
    monkeypatch.setattr(fashion, "_FILES", tuple(files))
    monkeypatch.setattr(fashion, "_URLS", (f"{url(source)}/",))
    assert len(fashion.load().test[1]) == 10
    monkeypatch.setattr(fashion, "_URLS", ())
    assert len(fashion.load().test[1]) == 10
    assert len(list((sources.cache_folder() / "fashion-mnist").iterdir())) == 4


def test_missing_data_error(small, folder, monkeypatch):
    for file in small.iterdir():
        file.unlink()
    monkeypatch.setattr(fashion, "_URLS", ("http://127.0.0.1:9/",))
    with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist") as raised:
        fashion.load()
    assert "could not download train-images-idx3-ubyte.gz" in str(raised.value)
    assert f"into {folder}" in str(raised.value)


@pytest.mark.usefixtures("no_downloads")
def test_official_files():
    try:
        images = fashion.load()
    except DataError as error:
        if "was not found" not in str(error):
            raise
        pytest.skip(str(error))
    assert images.train[0].shape == (55_000, 1, 28, 28)
    assert images.validation[0].shape == (5_000, 1, 28, 28)
    assert images.test[0].shape == (10_000, 1, 28, 28)
    labels = torch.cat([images.train[1], images.validation[1]])
    assert torch.bincount(labels).tolist() == [6000] * 10
    assert images.train[1][:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
