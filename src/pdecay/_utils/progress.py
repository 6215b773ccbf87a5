"""A progress bar on standard error."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Self

_WIDTH = 24  # characters of the bar
_INTERVAL = 0.1  # seconds between updates


class Progress:
    """A bar in the last line of a terminal, with the current work beside it.

    Args:
        title: the first word of the line.
        shown: whether to draw it; None draws it if standard error is a terminal.
    """

    def __init__(self, title: str, shown: bool | None = None) -> None:
        self._title = title
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._start = time.monotonic()
        self._drawn = 0.0
        self._text = ""

    def __call__(self, share: float, text: str) -> None:
        """Show that a share of the work, from 0 to 1, is done."""
        now = time.monotonic()
        if not self._shown or (text == self._text and now - self._drawn < _INTERVAL):
            return
        self._drawn, self._text = now, text
        bar = ("#" * round(_WIDTH * min(1.0, share))).ljust(_WIDTH, ".")
        line = f"{self._title} [{bar}] {now - self._start:.0f} s  {text}"
        columns = shutil.get_terminal_size().columns
        sys.stderr.write(f"\r{line[: columns - 1]}\033[K")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
