from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdecay.lab.data import shakespeare, sources
from pdecay.lab.data.sources import DataError


def _find():
    try:
        return sources.find(*shakespeare.NAMES)
    except DataError:
        return None


REAL = _find()  # found before the fixture `folder` changes PDECAY_DATA


@pytest.fixture
def real():
    if REAL is None:
        pytest.skip("Tiny Shakespeare is neither under PDECAY_DATA nor in the cache")
    return REAL


def test_encode():
    text = shakespeare.encode("hello world!\n" * 10)
    assert text.symbols == "\n !dehlorw"
    assert (len(text.train), len(text.validation), len(text.test)) == (117, 6, 7)
    assert text.decode(text.train[:13]) == "hello world!\n"
    assert text.train.dtype == torch.int64


def test_altered_text_is_reported(folder):
    for content in ("First Citizen:\nBefore we proceed", ""):
        (folder / "tinyshakespeare.txt").write_text(content)
        with pytest.raises(DataError, match=r"sha256 is .* delete it"):
            shakespeare.load()


def test_folder_instead_of_file_is_reported(folder):
    (folder / "tinyshakespeare.txt").mkdir()
    with pytest.raises(DataError, match="cannot read"):
        shakespeare.load()


def test_missing_data_error(folder, monkeypatch):
    remote = replace(shakespeare._REMOTE, urls=("http://127.0.0.1:9/input.txt",))
    monkeypatch.setattr(shakespeare, "_REMOTE", remote)
    with pytest.raises(DataError, match=r"could not download .* Put tinyshakespeare.txt"):
        shakespeare.load()


def test_download(folder, real, tmp_path, monkeypatch, url):
    served = tmp_path / "input.txt"
    served.write_bytes(real.read_bytes())
    remote = replace(shakespeare._REMOTE, urls=(url(served),))
    monkeypatch.setattr(shakespeare, "_REMOTE", remote)
    assert len(shakespeare.load().symbols) == shakespeare.SYMBOLS
    assert (sources.cache_folder() / "tinyshakespeare.txt").read_bytes() == real.read_bytes()


def test_official_text(real):
    text = shakespeare.load()
    assert (len(text.train), len(text.validation), len(text.test)) == (1_003_854, 55_770, 55_770)
    assert len(text.symbols) == shakespeare.SYMBOLS
    assert text.decode(text.train[:14]) == "First Citizen:"
