"""Tiny copies of the data sets and a local web server."""

from __future__ import annotations

import functools
import gzip
import pickle
import struct
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pdecay.lab.data import cifar10, sources


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return an empty PDECAY_DATA; the cache is empty too."""
    place = tmp_path / "data"
    place.mkdir()
    monkeypatch.setenv("PDECAY_DATA", str(place))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return place


@pytest.fixture(autouse=True)
def _no_pause_between_downloads(monkeypatch) -> None:
    """Let pooch repeat a failed download at once."""
    monkeypatch.setattr("pooch.core.time", SimpleNamespace(sleep=lambda seconds: None))


@pytest.fixture
def no_downloads(monkeypatch) -> None:
    """Make all downloads fail: official files are tested only where they exist."""

    def refuse(remote: sources.Remote, folder: Path) -> Path:
        raise sources.DataError("tests download nothing")

    monkeypatch.setattr(sources, "fetch", refuse)


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url(tmp_path):
    """Serve the temporary folder over HTTP and return the URL of a file in it."""
    handler = functools.partial(_QuietHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serve = functools.partial(server.serve_forever, poll_interval=0.01)
        threading.Thread(target=serve, daemon=True).start()
        yield lambda path: f"http://127.0.0.1:{server.server_port}/{path.relative_to(tmp_path)}"
        server.shutdown()


@pytest.fixture
def idx():
    """Write an array as an idx file."""

    def write(path: Path, values: np.ndarray) -> bytes:
        header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
        raw = header + values.astype(np.uint8).tobytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
        return raw

    return write


@pytest.fixture
def batch():
    """Make the content of a small CIFAR-10 batch file."""

    def make(rows: int = 20, protocol: int = 4, **changes: object) -> bytes:
        random = np.random.default_rng(rows)
        content: dict[bytes, object] = {
            b"batch_label": b"training batch 1 of 5",
            b"labels": [i % 10 for i in range(rows)],
            b"data": random.integers(256, size=(rows, 3072), dtype=np.uint8),
            b"filenames": [b"a.png"] * rows,
        }
        content.update({key.encode(): value for key, value in changes.items()})
        return pickle.dumps(content, protocol)

    return make


@pytest.fixture
def small_cifar(folder, batch, monkeypatch) -> Path:
    """Return a CIFAR-10 folder with 20 images in each file."""
    monkeypatch.setattr(cifar10, "ROWS", 20)
    monkeypatch.setattr(cifar10, "VALIDATION", 10)
    place = folder / cifar10.FOLDER
    place.mkdir()
    for name in (*cifar10.TRAIN, cifar10.TEST):
        (place / name).write_bytes(batch())
    return place
