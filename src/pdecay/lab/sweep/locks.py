"""Locks that end with the process that holds them, however it ends.

A lock that is a file's mere existence stays behind when its holder is killed. These are held by
the kernel on an open file: whoever can take one knows that its last holder is gone.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class FileLock:
    """An exclusive lock on a file that is made if it is missing and never removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def acquire(self, *, wait: bool = True) -> bool:
        """Take the lock; without `wait`, say whether it could be had."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(handle)
            return False
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        return True

    def release(self) -> None:
        """Give the lock back."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Presence:
    """A worker's sign of life in a folder: a locked file under the worker's name.

    The file gets its name when it is locked already, so that a name without a lock is a death.
    """

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / f".{name}")
        self._lock.acquire()
        self._lock.path.write_text(f"{os.getpid()}\n")  # for whoever looks after a stuck worker
        os.rename(self._lock.path, folder / name)


def is_dead(folder: Path, name: str) -> bool | None:
    """Whether the worker of a name is dead; None where the folder does not know of it."""
    path = folder / name
    if not path.exists():
        return None
    lock = FileLock(path)
    free = lock.acquire(wait=False)
    lock.release()
    return free
