from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdecay.lab.data import shakespeare
from pdecay.lab.data import sources as data
from pdecay.lab.data.sources import DataError


def _find():
    try:
        return data.find(*shakespeare.NAMES)
    except DataError:
        return None


REAL = _find()  # before `folder` hides where it is


@pytest.fixture
def real():
    if REAL is None:
        pytest.skip("Tiny Shakespeare is neither under PDECAY_DATA nor in the cache")
    return REAL


def test_encode():
    text = shakespeare.encode("hello world!\n" * 10)
    assert text.symbols == "\n !dehlorw"
    assert (len(text.train), len(text.test)) == (117, 13)
    assert text.decode(text.train[:13]) == "hello world!\n"
    assert text.train.dtype == torch.int64


def test_an_altered_or_truncated_text(folder):
    for content in ("First Citizen:\nBefore we proceed", ""):
        (folder / "tinyshakespeare.txt").write_text(content)
        with pytest.raises(DataError, match=r"sha256 is .* delete it"):
            shakespeare.load()


def test_a_folder_in_the_files_place(folder):
    (folder / "tinyshakespeare.txt").mkdir()
    with pytest.raises(DataError, match="cannot read"):
        shakespeare.load()


def test_what_is_nowhere(folder, monkeypatch):
    remote = replace(shakespeare._REMOTE, urls=("http://127.0.0.1:9/input.txt",))
    monkeypatch.setattr(shakespeare, "_REMOTE", remote)
    with pytest.raises(DataError, match=r"could not download .* Put tinyshakespeare.txt"):
        shakespeare.load()


def test_download(folder, real, monkeypatch):
    remote = replace(shakespeare._REMOTE, urls=(real.as_uri(),))
    monkeypatch.setattr(shakespeare, "_REMOTE", remote)
    assert len(shakespeare.load().symbols) == shakespeare.SYMBOLS
    assert (data.cache_folder() / "tinyshakespeare.txt").read_bytes() == real.read_bytes()


def test_the_real_text(real):
    text = shakespeare.load(download=False)
    assert (len(text.train), len(text.test)) == (1_003_854, 111_540)
    assert len(text.symbols) == shakespeare.SYMBOLS
    assert text.decode(text.train[:14]) == "First Citizen:"
