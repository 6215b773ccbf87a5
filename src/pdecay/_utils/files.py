"""Files that are either whole or not there, whenever the process or the machine dies."""

from __future__ import annotations

import errno
import os
import secrets
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
    target = Path(os.path.realpath(path))  # a link stays one
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    part = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}{_UNFINISHED}")
    try:
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


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
def lock(folder: Path, name: str = ".lock", *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on a folder; the kernel releases it however the process ends.

    Args:
        folder: the folder to lock.
        name: the lock file inside it, which is never removed.
        wait: wait for the current holder instead of raising an error.

    Raises:
        LockedError: another process holds the lock, and `wait` is False.
    """
    import fcntl  # missing on Windows, where the rest of this module works

    with open(folder / name, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise LockedError(
                f"another process is at work in {folder}: wait for it, or choose another folder"
            ) from None
        yield
