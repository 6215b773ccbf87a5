"""Atomic file writes and a folder lock that survive a killed process, and checks of paths."""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_UNFINISHED = ".part"
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM, errno.EBADF)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
_MOST_LINKS = 40  # as many as Linux follows
_TOKEN = 4  # random bytes in the name of a temporary file


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that atomically replaces `path` when the block ends without an error.

    The data is written to a temporary file in the same folder and flushed to disk before the
    rename. A reader therefore sees either the old file or the complete new one, even after a
    crash. The new file has the permissions of the old one, unless that is another user's file in a
    shared folder.

    Raises:
        OSError: if the path is a folder or a device or another user's link in a shared folder, or
            if writing fails. An error of a write is raised when the block ends, even if the block
            raises another one.
    """
    target = _follow(path)
    mode = _permissions(target)
    check_folder_of(path)
    # The limit of a file name is in bytes, of which a character takes up to four.
    part = target.with_name(f".{target.name[:50]}.{secrets.token_hex(_TOKEN)}{_UNFINISHED}")
    raw = _RawFile(part, 0o666 if mode is None else mode & 0o600)
    try:
        with io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            if raw.write_error is not None:
                raise raw.write_error
            os.fsync(file.fileno())
            if mode is not None and hasattr(os, "fchmod"):  # missing on Windows
                os.fchmod(file.fileno(), mode)  # another user may have replaced the file by a link
        os.replace(part, target)
    except BaseException as error:
        part.unlink(missing_ok=True)
        failed = raw.write_error
        if failed is not None and isinstance(error, Exception):
            raise OSError(failed.errno, failed.strerror, str(path)) from error
        raise
    _sync_folder(target.parent)


def _follow(path: Path) -> Path:
    """Return the absolute path of a file, or of the one that a symbolic link leads to.

    Refuse a link that another user put into a shared folder such as /tmp, as Linux does by default
    when a program opens it: it may lead to any file of this user.
    """
    path = path.absolute()
    for _ in range(_MOST_LINKS):
        if not path.is_symlink():
            return path
        if _is_of_another_user(path):
            message = "This link belongs to another user, choose another path"
            raise PermissionError(errno.EACCES, message, str(path))
        path = path.parent / os.readlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _is_of_another_user(path: Path) -> bool:
    """Return whether another user put something into a shared folder such as /tmp."""
    folder = path.parent.stat()
    shared = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
    return bool(shared) and path.lstat().st_uid not in (os.geteuid(), folder.st_uid)


def check_owner(folder: Path) -> None:
    """Raise PermissionError if another user put a folder to write to into the current one.

    In /tmp, anyone can create the folder that a program uses by default, with links in it that lead
    to files of this user. An absolute path was chosen on purpose, and is not checked.
    """
    for path in [] if folder.is_absolute() else [folder, *folder.parents]:
        if path.name not in ("", "..") and _is_of_another_user(path):
            message = "This folder belongs to another user, choose another or give its full path"
            raise PermissionError(errno.EACCES, message, str(path))


def check_folder_of(path: Path) -> None:
    """Raise FileNotFoundError if the folder of a file to write does not exist."""
    parent = path.parent
    if path.is_symlink():
        parent = Path(os.path.realpath(path)).parent
    if not parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder, create it first", str(parent))


def check_output_file(path: str | os.PathLike[str], suffixes: Iterable[str]) -> Path:
    """Return the path of a file to write; raise ValueError before any work if it is invalid."""
    target = Path(path)
    if target.suffix not in suffixes:
        raise ValueError(f"the name must end with {' or '.join(suffixes)}, got {str(target)!r}")
    if target.is_dir():
        raise ValueError(f"{str(target)!r} is a folder: give the name of a file")
    if target.exists() and not target.is_file():
        raise ValueError(f"{str(target)!r} is a pipe or a device: give the name of a file")
    return target


def _permissions(path: Path) -> int | None:
    """Return the permissions that replace those of a new file; None if there is no old file.

    Those of another user's file in a shared folder such as /tmp do not count: that user may have
    created it to be able to write to the new file.

    Args:
        path: a path from :func:`_follow`. A link is there only if another user has just put it.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file, choose another path", str(path))
    if path.parent.stat().st_mode & stat.S_ISVTX and found.st_uid != os.geteuid():
        return None
    return stat.S_IMODE(mode) & 0o777


class _RawFile(io.FileIO):
    """A new file whose writes never fail: it keeps the first error and ignores later data.

    The writers of torch hide an error: with a full disk, ``torch.save`` reports an unexpected
    position. That of ``torch.export.save`` writes again when it is deleted, where an error ends the
    process.
    """

    def __init__(self, path: Path, mode: int) -> None:
        super().__init__(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))
        self.write_error: OSError | None = None

    def write(self, data: Any, /) -> int:
        if self.write_error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.write_error = error
        return memoryview(data).nbytes


def remove_unfinished(folder: Path) -> None:
    """Delete temporary files that killed processes left in a folder.

    Hold the folder's :func:`lock`: this also deletes files that another process is writing. Files
    of other programs, such as unfinished downloads, have other names.
    """
    for part in folder.glob(f".*.{'[0-9a-f]' * 2 * _TOKEN}{_UNFINISHED}"):
        part.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush the folder, because a rename is on disk only once its folder is.

    The file is complete and in its place already. Some network and shared folders cannot be flushed
    (EINVAL), and some that can be written to cannot be opened (EACCES): this is no failure.
    """
    if os.name == "nt":  # Windows cannot open folders
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


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
        OSError: the folder's file system has no locks, such as Lustre without the option `flock`.
    """
    import fcntl  # missing on Windows, where the rest of this module works

    with open(folder / name, "ab") as file:  # "wb" would erase a file of another program
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise LockedError(
                f"another process is using {folder}: wait for it to finish, or choose another "
                "folder"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            message = "This file system has no file locks, choose a folder on another one"
            raise OSError(error.errno, message, str(folder)) from error
        yield
