"""Atomic file writes and a folder lock that survive a killed process."""

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
    """Open a binary file that atomically replaces `path` when the block ends without an error.

    The data is written to a temporary file in the same folder and flushed to disk before the
    rename. A reader therefore sees either the old file or the complete new one, even after a
    crash.
    """
    target = Path(os.path.realpath(path))  # replace the file that a symbolic link points to
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
    """Delete temporary files that killed processes left in a folder.

    Hold the folder's :func:`lock`: this also deletes files that another process is writing.
    """
    for part in folder.glob(f".*{_UNFINISHED}"):
        part.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush the folder, because a rename is on disk only once its folder is."""
    if os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class LockedError(Exception):
    """Another process holds the lock of a folder."""


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
                f"another process is using {folder}: wait for it to finish, or choose another "
                "folder"
            ) from None
        yield
