"""Finding and fetching: whole files, checked, or an error that says what to do."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pdecay.lab.data import sources as data
from pdecay.lab.data.sources import DataError, Remote


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "source.bin"
    file.write_bytes(b"x" * 3_000_000)
    return file


def remote(source: Path, *urls: str) -> Remote:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    return Remote("file.bin", (*urls, source.as_uri()), f"sha256:{digest}")


def test_fetch_gives_the_whole_file_and_leaves_nothing_else(source, tmp_path):
    path = data.fetch(remote(source), tmp_path / "new" / "place")
    assert path.read_bytes() == source.read_bytes()
    assert list(path.parent.iterdir()) == [path]


def test_fetch_goes_on_to_the_next_address(source, tmp_path):
    gone = (tmp_path / "gone").as_uri()
    path = data.fetch(remote(source, gone), tmp_path / "place")
    assert path.read_bytes() == source.read_bytes()


def test_fetch_refuses_an_altered_file(source, tmp_path):
    asked = remote(source)
    source.write_bytes(b"y" + source.read_bytes()[1:])
    with pytest.raises(DataError, match="sha256 is"):
        data.fetch(asked, tmp_path / "place")
    assert list((tmp_path / "place").iterdir()) == []


def test_fetch_without_a_network_says_why(tmp_path):
    asked = Remote("file.bin", ("http://127.0.0.1:9/file.bin",), "sha256:0")
    with pytest.raises(DataError, match=r"could not download file\.bin"):
        data.fetch(asked, tmp_path)


def test_fetch_to_where_it_cannot_write(source, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        data.fetch(remote(source), tmp_path / "taken")


def test_fetch_shows_progress_on_a_terminal(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    data.fetch(remote(source), tmp_path / "place")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "downloading file.bin" in captured.err
    data.fetch(remote(source), tmp_path / "place", progress=False)
    assert capsys.readouterr().err == ""


def test_the_named_folder_comes_before_the_cache(folder):
    cache = data.cache_folder()
    cache.mkdir(parents=True)
    (cache / "one").touch()
    assert data.find("none", "one") == cache / "one"
    (folder / "one").touch()
    assert data.find("none", "one") == folder / "one"
    assert data.find("none") is None


def test_without_a_named_folder_there_is_the_cache(folder, monkeypatch):
    monkeypatch.delenv("PDECAY_DATA")
    assert data.folders() == [data.cache_folder()]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.cache_folder() == Path.home() / ".cache" / "pdecay" / "data"


def test_a_named_folder_that_is_not_there(folder, monkeypatch):
    monkeypatch.setenv("PDECAY_DATA", str(folder / "nowhere"))
    with pytest.raises(DataError, match=r"PDECAY_DATA is '.*nowhere', which is not a folder"):
        data.find("one")
