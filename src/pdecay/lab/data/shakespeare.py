"""Tiny Shakespeare: 1,115,394 characters of 65 kinds; the first 90 % train, the rest validates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdecay.lab.data import sources as data
from pdecay.lab.data.sources import Remote

NAMES = ("tinyshakespeare.txt", "tinyshakespeare/input.txt", "shakespeare_char/input.txt")
SYMBOLS = 65

_REMOTE = Remote(
    "tinyshakespeare.txt",
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
    "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)


@dataclass(frozen=True)
class Text:
    """A text as numbers, one a character, in two parts; `symbols[i]` is the character i."""

    train: Tensor
    test: Tensor
    symbols: str

    def decode(self, tokens: Tensor) -> str:
        """The characters of a row of numbers."""
        return "".join(self.symbols[i] for i in tokens.tolist())


def load(*, download: bool = True) -> Text:
    """Tiny Shakespeare from ``PDECAY_DATA``, the cache, or a download."""
    path = data.find(*NAMES)
    if path is None:
        put = f"{NAMES[0]} ({_REMOTE.urls[0]})"
        path = data.fetch_or_tell(_REMOTE, "Tiny Shakespeare", put, download=download)
    data.check_digest(path, _REMOTE.digest)
    return encode(path.read_bytes().decode("ascii"))


def encode(text: str) -> Text:
    """Number the characters of a text in the order of their codes, and split it 90/10."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    symbols, tokens = np.unique(codes, return_inverse=True)
    cut = int(0.9 * len(tokens))
    both = torch.from_numpy(tokens.astype(np.int64))
    return Text(both[:cut], both[cut:], "".join(chr(code) for code in symbols))
