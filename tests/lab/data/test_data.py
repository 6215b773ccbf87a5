"""Finding and downloading files, and the errors when that fails."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest

from pdecay.lab.data import sources
from pdecay.lab.data.sources import DataError, Remote


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "source.bin"
    file.write_bytes(b"x" * 3_000_000)
    return file


@pytest.fixture
def remote(source, url):
    """Describe the served file as a download, behind other mirrors."""

    def make(*mirrors: str) -> Remote:
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        return Remote("file.bin", (*mirrors, url(source)), f"sha256:{digest}")

    return make


def test_fetch_writes_the_complete_file_only(source, remote, tmp_path):
    path = sources.fetch(remote(), tmp_path / "new" / "place")
    assert path.read_bytes() == source.read_bytes()
    assert list(path.parent.iterdir()) == [path]


def test_fetch_falls_back_to_the_next_mirror(source, remote, url, tmp_path):
    path = sources.fetch(remote(url(tmp_path / "missing")), tmp_path / "place")
    assert path.read_bytes() == source.read_bytes()


def test_fetch_refuses_an_altered_file(source, remote, tmp_path):
    asked = remote()
    source.write_bytes(b"y" + source.read_bytes()[1:])
    with pytest.raises(DataError, match="SHA256 hash"):
        sources.fetch(asked, tmp_path / "place")
    assert list((tmp_path / "place").iterdir()) == []


def test_fetch_without_network_is_reported(tmp_path):
    asked = Remote("file.bin", ("http://127.0.0.1:9/file.bin",), "sha256:0")
    with pytest.raises(DataError, match=r"could not download file\.bin"):
        sources.fetch(asked, tmp_path)


def test_fetch_into_unwritable_folder_is_reported(remote, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        sources.fetch(remote(), tmp_path / "taken")


def test_fetch_shows_progress_on_a_terminal_only(remote, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    sources.fetch(remote(), tmp_path / "place")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "100%" in captured.err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    sources.fetch(remote(), tmp_path / "another")
    assert capsys.readouterr().err == ""


def test_pdecay_data_is_searched_before_the_cache(folder):
    cache = sources.cache_folder()
    cache.mkdir(parents=True)
    (cache / "one").touch()
    assert sources.find("none", "one") == cache / "one"
    (folder / "one").touch()
    assert sources.find("none", "one") == folder / "one"
    assert sources.find("none") is None


def test_cache_is_searched_without_pdecay_data(folder, monkeypatch):
    monkeypatch.delenv("PDECAY_DATA")
    assert sources.folders() == [sources.cache_folder()]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert sources.cache_folder() == Path.home() / ".cache" / "pdecay" / "data"


def test_user_without_home(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("PDECAY_DATA", raising=False)
    with pytest.raises(sources.DataError, match=r"no home folder.*: set PDECAY_DATA"):
        sources.find("file")
    monkeypatch.setenv("PDECAY_DATA", str(tmp_path))
    assert sources.find("file") is None
    (tmp_path / "file").touch()
    assert sources.find("file") == tmp_path / "file"


def test_missing_pdecay_data_folder_is_reported(folder, monkeypatch):
    monkeypatch.setenv("PDECAY_DATA", str(folder / "nowhere"))
    with pytest.raises(DataError, match=r"PDECAY_DATA is '.*nowhere', which is not a folder"):
        sources.find("one")
