"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_OWN = ("pdecay", "torch.")  # torch calls step() and hooks through functions of its own


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the location of the first frame outside this package and torch."""
    level = 1
    frame: FrameType | None = sys._getframe(0)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
