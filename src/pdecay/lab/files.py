"""Files that are either whole or not there, whenever the process or the machine dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_UNFINISHED = ".part"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write, which takes the name `path` at once when the block has ended well.

    It is written beside its place and flushed to the disk before it gets its name; a reader, or
    a process that starts after a crash, sees the old file or the new one and nothing between.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}{_UNFINISHED}")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Delete what killed processes were writing in a folder; no other may be at work there."""
    for part in folder.glob(f".*{_UNFINISHED}"):
        part.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """The file's new name is on the disk only when its folder is."""
    if os.name == "nt":  # where folders cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class LockedError(Exception):
    """Another process is at work in a folder."""


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Be the only process at work in a folder; the lock goes with the process, however it ends."""
    import fcntl  # not on Windows, where nothing else here needs it

    with open(folder / ".lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(
                f"another process is at work in {folder}: wait for it, or choose another folder"
            ) from None
        yield
