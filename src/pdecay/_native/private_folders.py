"""Folders that no other user can change.

A folder is private if no other user but root can write to it or rename it or a folder above it.
Otherwise another user could replace a library in it between its check and its use.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ALL_USERS = 2**32 - 1  # the size of the user namespace of the machine itself
# Root's, also where a user namespace hides their owner.
_SYSTEM_FOLDERS = ("/", "/home", "/tmp", "/var", "/var/tmp")
_MOST_LINKS = 40  # as many as Linux follows


def resolve(path: str) -> Path | None:
    """Return a path without its symbolic links; None if another user could lead it elsewhere.

    A link of another user may lead to any folder of ours, such as one with files of that user that
    we have unpacked. Each folder is checked before a name in it is looked up.

    Args:
        path: an absolute path. Its last parts may be missing.
    """
    here, links = Path("/"), 0
    names = [*reversed(Path(path).parts)]
    while names:
        name = names.pop()
        if os.path.isabs(name):
            here = Path("/")
        elif name == "..":
            here = here.parent
        elif (link := here / name).is_symlink():
            links += 1
            if links > _MOST_LINKS or not _is_trusted(link.lstat().st_uid, link):
                return None
            names += reversed(Path(os.readlink(link)).parts)
        else:
            here /= name
        if here.exists() and not are_safe([here]):
            return None
    return here


def create(folder: Path) -> bool:
    """Create a folder and those above it if they are missing; return whether it is private.

    Args:
        folder: a path from :func:`resolve`, or below one.
    """
    for path in (*reversed(folder.parents), folder):
        path.mkdir(mode=0o700, exist_ok=True)
    if not are_safe(folder.parents):
        return False
    found = folder.lstat()
    if (
        stat.S_ISDIR(found.st_mode)
        and found.st_mode & 0o077  # old, and open to others
        and not found.st_mode & OTHERS_WRITE  # who may have moved files of ours into it
        and found.st_uid == os.getuid()
    ):
        folder.chmod(0o700)
    return is_private(folder)


def is_private(folder: Path) -> bool:
    """Return whether no other user but root can write to a folder, rename it or replace it.

    Args:
        folder: an absolute path without symbolic links.
    """
    if not are_safe(folder.parents):
        return False
    found, provider = _look_at(folder)
    closed = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    return closed and found.st_uid == os.getuid() and provider in _trusted_users()[0]


def are_safe(folders: Sequence[Path]) -> bool:
    """Return whether no other user can rename our folders in these folders.

    A sticky folder such as /tmp is safe: only its owner and the owner of an entry can rename that.

    Args:
        folders: from the innermost to the outermost. They are checked in the other order: nobody
            can replace a folder after its check, because the one above it is safe already.
    """
    trusted, _ = _trusted_users()
    return all(
        stat.S_ISDIR(found.st_mode)
        and provider in trusted
        and _is_trusted(found.st_uid, folder)
        and (not found.st_mode & OTHERS_WRITE or found.st_mode & stat.S_ISVTX)
        for folder, (found, provider) in ((folder, _look_at(folder)) for folder in folders[::-1])
    )


def _is_trusted(owner: int, path: Path) -> bool:
    trusted, nobody = _trusted_users()
    return owner in trusted or (owner == nobody and str(path) in _SYSTEM_FOLDERS)


def _look_at(folder: Path) -> tuple[os.stat_result, int | None]:
    """Return the status of a folder, and the user whose program shows it; 0 if the system does.

    A FUSE file system of another user can show any owner. The folder is held open, so that both
    results are of the same file system. The second is None if that was unmounted meanwhile.
    """
    if not hasattr(os, "O_PATH"):  # not Linux
        return folder.lstat(), 0
    handle, root = (os.open(path, os.O_PATH | os.O_NOFOLLOW) for path in (folder, "/"))
    try:
        found, mount = os.fstat(handle), _mount_of(handle)
        # After chroot, the mount of the root folder may not be listed.
        return found, 0 if mount is None or mount == _mount_of(root) else _provider_of(mount)
    finally:
        os.close(handle)
        os.close(root)


def _mount_of(handle: int) -> str | None:
    """Return the number of the mount of an open file; None if the system does not tell."""
    try:
        found = re.search(r"^mnt_id:\s*(\d+)", read_proc(f"fdinfo/{handle}"), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def _provider_of(mount: str) -> int | None:
    """Return the user who provides a mount; None if it is not mounted any more."""
    found = re.search(rf"^{mount} .* - (\S+) \S* (\S+)$", read_proc("mountinfo"), re.MULTILINE)
    if found is None:
        return None
    if not found[1].startswith("fuse"):
        return 0
    user = re.search(r"\buser_id=(\d+)", found[2])
    return int(user[1]) if user else None


def read_proc(name: str) -> str:
    # Not as text: a mount of another user may be at a path with "\r", which would end a line.
    return os.fsdecode(Path("/proc/self", name).read_bytes())


def _trusted_users() -> tuple[set[int], int | None]:
    """Return the users who may own a folder above ours, and the number that stands for no user.

    The owner of the root folder is trusted as root is. In a container it may have another number.
    A user namespace shows one number for all users that it does not map, root and others.
    """
    trusted = {0, os.getuid(), os.stat("/").st_uid}
    try:
        nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
        lines = read_proc("uid_map").splitlines()
    except OSError:  # not Linux
        return trusted, None
    mapped = [[*map(int, line.split())] for line in lines]
    if mapped == [[0, 0, _ALL_USERS]]:
        return trusted, None
    if os.getuid() != nobody or not any(0 <= nobody - first < size for first, _, size in mapped):
        trusted.discard(nobody)
    return trusted, nobody
