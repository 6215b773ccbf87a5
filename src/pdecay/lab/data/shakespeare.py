"""Tiny Shakespeare: 1,115,394 characters of 65 kinds.

The first 90 % are for training, the next 5 % for validation, the last 5 % for testing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdecay.lab.data import sources
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
    """The three splits of a text as character numbers; number i is the character `symbols[i]`."""

    train: Tensor
    validation: Tensor
    test: Tensor
    symbols: str

    def decode(self, tokens: Tensor) -> str:
        """Return the characters of a row of numbers."""
        return "".join(self.symbols[i] for i in tokens.tolist())


def load() -> Text:
    """Load Tiny Shakespeare from ``PDECAY_DATA``, the cache, or a download."""
    put = f"{NAMES[0]} ({_REMOTE.urls[0]})"
    path = sources.find_or_fetch(NAMES, _REMOTE, what="Tiny Shakespeare", put=put)
    sources.check_digest(path, _REMOTE.digest)
    return encode(path.read_bytes().decode("ascii"))


def encode(text: str) -> Text:
    """Number the characters of a text by their code points and split the text 90/5/5."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    symbols, numbers = np.unique(codes, return_inverse=True)
    tokens = torch.from_numpy(numbers.astype(np.int64))
    first, second = int(0.9 * len(tokens)), int(0.95 * len(tokens))
    parts = tokens[:first], tokens[first:second], tokens[second:]
    return Text(*parts, "".join(chr(code) for code in symbols))
