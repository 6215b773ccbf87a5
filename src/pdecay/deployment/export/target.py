"""Checks of the path of a file to write."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def check_target(path: str | os.PathLike[str], suffixes: Iterable[str]) -> Path:
    """Return the path of a file to write; raise ValueError before any work if it is invalid."""
    target = Path(path)
    if target.suffix not in suffixes:
        raise ValueError(f"the name must end with {' or '.join(suffixes)}, got {str(target)!r}")
    if target.is_dir():
        raise ValueError(f"{str(target)!r} is a folder: give the name of a file")
    if target.exists() and not target.is_file():
        raise ValueError(f"{str(target)!r} is a pipe or a device: give the name of a file")
    return target
