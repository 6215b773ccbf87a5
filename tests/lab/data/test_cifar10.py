from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pdecay.lab.data import cifar10, sources
from pdecay.lab.data.sources import DataError

HERE = Path("data_batch_1")


def test_load(small_cifar):
    images = cifar10.load()
    assert images.train[0].shape == (90, 3, 32, 32)
    assert images.train[0].dtype == torch.uint8
    assert images.validation[1].tolist() == [i % 10 for i in range(10, 20)]
    assert images.test[0].shape == (20, 3, 32, 32)
    assert images.test[1].tolist() == [i % 10 for i in range(20)]


@pytest.mark.parametrize("protocol", range(6))
def test_batch_of_any_protocol(batch, protocol):
    pixels, labels = cifar10.read_batch(batch(protocol=protocol), HERE)
    expected, _ = cifar10.read_batch(batch(), HERE)
    assert torch.equal(pixels, expected)
    assert labels.tolist() == [i % 10 for i in range(20)]


def test_batch_written_by_python_2():
    """The official files use protocol 2, byte strings and old module names."""

    def string(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    pixels = bytes(i % 256 for i in range(3072))
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
        + string(b"b")
        + b"\x87R"
        b"(K\x01K\x01M" + struct.pack("<H", 3072) + b"\x86"
        b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R"
        b"(K\x03" + string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<I", 3072) + pixels + b"tb"
    )
    raw = b"\x80\x02}(" + string(b"labels") + b"](K\x07e" + string(b"data") + array + b"u."
    images, labels = cifar10.read_batch(raw, HERE)
    assert images.shape == (1, 3, 32, 32)
    assert images.flatten().tolist() == list(pixels)
    assert labels.tolist() == [7]


class Call:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "call",
    [
        lambda mark: Call(os.system, f"touch {mark}"),
        lambda mark: Call(eval, f"open({str(mark)!r}, 'w')"),
        lambda mark: Call(exec, f"open({str(mark)!r}, 'w')"),
        lambda mark: Call(getattr, mark, "touch"),
        lambda mark: Call(np.save, str(mark), 1),
        lambda mark: Call(np.fromfile, str(mark)),
        lambda mark: Call(open, str(mark), "w"),
    ],
)
def test_malicious_pickle_runs_no_code(small_cifar, batch, tmp_path, call, protocol):
    mark = tmp_path / "mark.npy"
    raw = batch(protocol=protocol, labels=[call(mark)])
    (small_cifar / "data_batch_3").write_bytes(raw)
    with pytest.raises(DataError, match="nothing was run") as raised:
        cifar10.load()
    assert "data_batch_3" in str(raised.value)
    assert not mark.exists()
    mark.unlink(missing_ok=True)


def test_pickle_with_codec_or_external_reference_is_refused():
    with pytest.raises(DataError, match="codec 'rot13'"):
        cifar10.read_batch(b"c_codecs\nencode\n(Vabc\nVrot13\ntR.", HERE)
    with pytest.raises(DataError, match="external objects"):
        cifar10.read_batch(b"Pabc\n.", HERE)


def test_truncated_batch_is_reported(batch):
    raw = batch(rows=2)
    for end in range(0, len(raw), 97):
        with pytest.raises(DataError, match="cannot be unpickled"):
            cifar10.read_batch(raw[:end], HERE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": [1, 2]}, "rows of 3072 bytes"),
        ({"data": np.zeros((20, 3071), np.uint8)}, "rows of 3072 bytes"),
        ({"data": np.zeros((20, 3072), np.float32)}, "rows of 3072 bytes"),
        ({"data": np.zeros((), np.uint8)}, "rows of 3072 bytes"),
        ({"labels": [0] * 19}, "are not 20 numbers"),
        ({"labels": [0] * 19 + [10]}, "are not 20 numbers"),
        ({"labels": [0] * 19 + [0.5]}, "are not 20 numbers"),
        ({"labels": None}, "are not 20 numbers"),
    ],
)
def test_invalid_content_is_reported(batch, changes, message):
    with pytest.raises(DataError, match=message):
        cifar10.read_batch(batch(**changes), HERE)


@pytest.mark.parametrize("content", [[], {}, {b"data": 1}, None])
def test_other_pickle_is_reported(content):
    with pytest.raises(DataError, match="has no b'data'"):
        cifar10.read_batch(pickle.dumps(content), HERE)


def test_missing_file_is_reported(small_cifar):
    (small_cifar / "test_batch").unlink()
    with pytest.raises(DataError, match="has no test_batch: unpack"):
        cifar10.load()


def test_wrong_number_of_images_is_reported(small_cifar, batch):
    (small_cifar / "data_batch_2").write_bytes(batch(rows=10))
    with pytest.raises(DataError, match=r"data_batch_2 .* 10 images, not 20"):
        cifar10.load()


def test_altered_labels_are_reported(small_cifar, batch):
    (small_cifar / "data_batch_2").write_bytes(
        batch(labels=[0, 0, *(i % 10 for i in range(2, 20))])
    )
    with pytest.raises(DataError, match="labels are not those"):
        cifar10.load()


def pack(place: Path, archive: Path, monkeypatch, leave_out: str = "") -> None:
    """Pack a folder into an archive and make its digest the expected one."""
    with tarfile.open(archive, "w:gz") as tar:
        evil = tarfile.TarInfo("../evil")
        evil.size = 4
        tar.addfile(evil, io.BytesIO(b"evil"))
        for file in sorted(place.iterdir()):
            if file.name != leave_out:
                tar.add(file, f"{cifar10.FOLDER}/{file.name}")
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    digest = f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}"
    monkeypatch.setattr(cifar10, "_REMOTE", replace(cifar10._REMOTE, digest=digest))


def test_archive_is_read_without_unpacking(small_cifar, folder, monkeypatch):
    pack(small_cifar, folder / "cifar-10-python.tar.gz", monkeypatch)
    assert len(cifar10.load().train[1]) == 90
    assert [file.name for file in folder.iterdir()] == ["cifar-10-python.tar.gz"]
    assert not (folder.parent / "evil").exists()


def test_altered_archive_is_reported(small_cifar, folder, monkeypatch):
    archive = folder / "cifar-10-python.tar.gz"
    pack(small_cifar, archive, monkeypatch)
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(DataError, match="sha256 is"):
        cifar10.load()


def test_incomplete_archive_is_reported(small_cifar, folder, monkeypatch):
    pack(small_cifar, folder / "cifar-10-python.tar.gz", monkeypatch, leave_out="test_batch")
    with pytest.raises(DataError, match="lacks test_batch"):
        cifar10.load()


def test_truncated_archive_is_reported(small_cifar, folder, monkeypatch):
    archive = folder / "cifar-10-python.tar.gz"
    pack(small_cifar, archive, monkeypatch)
    archive.write_bytes(archive.read_bytes()[:5000])
    monkeypatch.setattr(sources, "check_digest", lambda *_: None)
    with pytest.raises(DataError, match="cannot be unpacked"):
        cifar10.load()


def test_download(small_cifar, folder, tmp_path, monkeypatch, url):
    archive = tmp_path / "cifar-10-python.tar.gz"
    pack(small_cifar, archive, monkeypatch)
    remote = replace(cifar10._REMOTE, urls=(url(archive),))
    monkeypatch.setattr(cifar10, "_REMOTE", remote)
    assert len(cifar10.load().train[1]) == 90
    assert (sources.cache_folder() / "cifar-10-python.tar.gz").exists()


@pytest.mark.usefixtures("no_downloads")
def test_missing_data_error(folder):
    with pytest.raises(DataError, match=r"CIFAR-10 was not found in .*Put cifar-10-python.tar.gz"):
        cifar10.load()


@pytest.mark.slow
@pytest.mark.usefixtures("no_downloads")
def test_official_files():
    try:
        images = cifar10.load()
    except DataError as error:
        if "was not found" not in str(error):
            raise
        pytest.skip(str(error))
    assert images.train[0].shape == (45_000, 3, 32, 32)
    assert images.validation[0].shape == (5_000, 3, 32, 32)
    assert images.test[0].shape == (10_000, 3, 32, 32)
    mean = images.train[0][:5000].double().mean(dim=(0, 2, 3)) / 255
    assert mean.tolist() == pytest.approx([0.491, 0.482, 0.447], abs=0.01)
