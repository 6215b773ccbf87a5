"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


def warn_user(message: str) -> None:
    """Warn with the location of the first frame outside this package."""
    level = 1
    frame: FrameType | None = sys._getframe(0)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("pdecay"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
