"""Tests of the cache of compiled kernels: its place, damaged libraries, and other users."""

import hashlib
import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from pdecay._native import build, private_folders
from tests.native.processes import LOAD, TRY, libraries, run

pytestmark = pytest.mark.usefixtures("needs_native")


def test_cache_is_private_and_has_one_library(filled):
    folder = filled / "kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.suffix for path in libraries(filled)] == [".so"]


def damaged(content, damage):
    return {
        "half": content[: len(content) // 2],
        "empty": b"",
        "garbage": os.urandom(5000),
        "flipped": content[:3000] + bytes([content[3000] ^ 255]) + content[3001:],
        "longer": content + b"more",
    }[damage]


@pytest.mark.parametrize("damage", ["half", "empty", "garbage", "flipped", "longer"])
def test_damaged_library_is_not_opened(filled, tmp_path, damage):
    (library,) = libraries(filled)
    copy = tmp_path / library.name
    copy.write_bytes(library.read_bytes())
    assert build._open(copy) is not None
    copy.unlink()  # create a new file: the open library must not change
    copy.write_bytes(damaged(library.read_bytes(), damage))
    assert build._open(copy) is None


def test_loader_message_that_is_not_utf8(tmp_path):
    """It has the path of the file; ctypes then raises UnicodeDecodeError in place of OSError."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir(mode=0o700)
    (folder / "step.so").write_bytes(b"not ELF" + hashlib.sha256(b"not ELF").digest())
    assert build._open(folder / "step.so") is None


def test_damaged_library_is_rebuilt(filled, tmp_path):
    (library,) = libraries(filled)
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    (folder / library.name).write_bytes(damaged(library.read_bytes(), "half"))
    assert run(LOAD, tmp_path) == "loaded"
    assert [path.name for path in libraries(tmp_path)] == [library.name]
    assert build._open(folder / library.name) is not None


def test_cache_location_follows_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("PDECAY_CACHE")
    assert build._cache_folder() == tmp_path / "home" / ".cache" / "pdecay" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert build._cache_folder() == tmp_path / "caches" / "pdecay" / "kernels"
    monkeypatch.setenv("PDECAY_CACHE", str(tmp_path / "here"))
    assert build._cache_folder() == tmp_path / "here" / "kernels"
    assert stat.S_IMODE((tmp_path / "here" / "kernels").stat().st_mode) == 0o700
    monkeypatch.setenv("PDECAY_CACHE", "~/there")
    assert build._cache_folder() == tmp_path / "home" / "there" / "kernels"


def test_unwritable_cache_falls_back_to_temporary_folder(tmp_path):
    """A file in place of the folder blocks root too, which a read-only folder would not."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert run(LOAD, blocked / "cache", TMPDIR=scratch) == "loaded"
    assert list(scratch.iterdir()) == []  # no temporary files remain


def test_user_without_home_creates_no_folder(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "PDECAY_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 471147)  # a user that the system does not list
    monkeypatch.chdir(tmp_path)
    assert build._cache_folder() is None
    assert list(tmp_path.iterdir()) == []


def test_relative_cache_is_not_used(tmp_path, monkeypatch):
    """It may be in a folder with files of others, such as one that was unpacked from an archive."""
    (tmp_path / "cache" / "kernels").mkdir(mode=0o700, parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PDECAY_CACHE", "cache")
    assert build._cache_folder() is None


def test_relative_cache_in_a_deleted_folder(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("PDECAY_CACHE", "cache")
    assert build._cache_folder() is None


def test_cache_that_cannot_be_written_is_read(filled, monkeypatch):
    monkeypatch.setenv("PDECAY_CACHE", str(filled))

    def read_only(*args):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "chmod", read_only)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert build._cache_folder() == filled / "kernels"


@pytest.mark.parametrize("kind", ["pipe", "folder", "large"])
def test_other_objects_in_place_of_the_library(filled, tmp_path, kind):
    (library,) = libraries(filled)
    (tmp_path / "kernels").mkdir(mode=0o700)
    path = tmp_path / "kernels" / library.name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch(mode=0o700)
        os.truncate(path, 1 << 36)  # more than the memory; without blocks on the disk
    assert run(LOAD, tmp_path) == "loaded"


def test_cache_permissions_are_restricted(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o755)
    monkeypatch.setenv("PDECAY_CACHE", str(tmp_path))
    assert build._cache_folder() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_cache_that_others_could_write_to_is_not_used(tmp_path, monkeypatch, mode):
    """They may have moved a file of this user into it, one with their content."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("PDECAY_CACHE", str(tmp_path))
    assert build._cache_folder() is None


def test_cache_that_is_a_link_or_foreign_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kernels").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("PDECAY_CACHE", str(tmp_path))
    assert build._cache_folder() is None
    monkeypatch.setenv("PDECAY_CACHE", str(tmp_path / "mine"))
    assert build._cache_folder() is not None
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert build._cache_folder() is None


OTHER_USER = 65533


@pytest.fixture
def other_users_folder(tmp_path):
    """A folder of another user, which everyone may write to."""
    if os.getuid() != 0:
        pytest.skip("only root can create another user's folder")
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chown(folder, OTHER_USER, OTHER_USER)
    folder.chmod(0o1777)
    return folder


def test_cache_below_another_users_folder_is_not_used(other_users_folder, monkeypatch):
    """The owner of a folder can rename everything in it, also if it is sticky."""
    monkeypatch.setenv("PDECAY_CACHE", str(other_users_folder / "cache"))
    assert build._cache_folder() is None
    monkeypatch.delenv("PDECAY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(other_users_folder))
    assert build._cache_folder() is None
    assert not any(other_users_folder.iterdir())  # sudo keeps HOME: a folder of root would stay


@pytest.mark.parametrize("variable", ["PDECAY_CACHE", "XDG_CACHE_HOME", "HOME"])
@pytest.mark.parametrize("place", ["first", "second", "in another"])
def test_cache_behind_a_link_of_another_user_is_not_used(tmp_path, monkeypatch, variable, place):
    """It may lead to a folder of this user that was unpacked from an archive of the other one."""
    if os.getuid() != 0:
        pytest.skip("only root can create another user's link")
    unpacked, shared, link = (tmp_path / name for name in ("unpacked", "shared", "link"))
    below = {"PDECAY_CACHE": ".", "XDG_CACHE_HOME": "pdecay", "HOME": ".cache/pdecay"}[variable]
    (unpacked / below / "kernels").mkdir(parents=True)
    shared.mkdir()
    shared.chmod(0o1777)
    link.symlink_to(shared / "x")
    where = {"first": shared / "x", "second": shared / "x" / "..", "in another": link}[place]
    for name in ("PDECAY_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    target = unpacked / "sub" if place == "second" else unpacked
    target.mkdir(exist_ok=True)
    (shared / "x").symlink_to(target)
    monkeypatch.setenv(variable, str(where))
    folder = unpacked / below / "kernels"
    mode = folder.stat().st_mode
    os.lchown(shared / "x", OTHER_USER, OTHER_USER)
    assert build._cache_folder() is None
    assert folder.stat().st_mode == mode
    os.lchown(shared / "x", os.getuid(), -1)
    assert build._cache_folder() == folder


def test_many_links(tmp_path, monkeypatch):
    """More than the interpreter's recursion limit; another user may have put them into /tmp."""
    target = tmp_path / "mine"
    target.mkdir()
    for i in range(1500):
        (tmp_path / str(i)).symlink_to(target)
        target = tmp_path / str(i)
    monkeypatch.setenv("PDECAY_CACHE", str(target))
    assert build._cache_folder() is None
    monkeypatch.setenv("PDECAY_CACHE", str(tmp_path / "9"))
    assert build._cache_folder() == tmp_path / "mine" / "kernels"


def test_folder_replaced_during_its_check(tmp_path, monkeypatch):
    """A link leads to a private folder, and is replaced by a shared folder of the system."""
    if os.getuid() != 0:
        pytest.skip("only root can create another user's folder")
    for name in ("mine", "moved"):
        (tmp_path / name / "pdecay" / "kernels").mkdir(mode=0o700, parents=True)
    (tmp_path / "moved").chmod(0o1777)
    os.chown(tmp_path / "moved" / "pdecay", OTHER_USER, OTHER_USER)
    link = tmp_path / "x"
    link.symlink_to(tmp_path / "mine")
    look = private_folders._look_at

    def replaced(folder):
        found = look(folder)
        if folder == link / "pdecay" and link.is_symlink():
            link.unlink()
            (tmp_path / "moved").rename(link)
        return found

    monkeypatch.setattr(private_folders, "_look_at", replaced)
    assert not private_folders.is_private(link / "pdecay" / "kernels")


@pytest.mark.parametrize("mapped", [True, False])
def test_cache_in_a_user_namespace(mapped):
    """There, the root folder and the folders of all other users seem to have one owner."""
    if os.getuid() != 0:
        pytest.skip("only root can create another user's folder")
    code = f"""
    import ctypes, os
    from pdecay._native.build import _cache_folder
    os.setuid({OTHER_USER - 1})
    libc = ctypes.CDLL(None)
    libc.prctl(4, 1)  # else root owns the files in /proc/self
    if libc.unshare(0x10000000):
        raise SystemExit("no user namespaces")
    if {mapped}:
        with open("/proc/self/uid_map", "w") as file:
            file.write("{OTHER_USER - 1} {OTHER_USER - 1} 1")
    print(_cache_folder() is not None)
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        mine = Path(shared, "mine")
        mine.mkdir()
        os.chmod(shared, 0o755)
        for folder in (shared, mine):
            os.chown(folder, OTHER_USER - 1, -1)
        assert run(code, mine) == str(mapped)  # below folders of root and of this user
        os.chown(shared, OTHER_USER, -1)
        assert run(code, mine) == "False"


@pytest.mark.parametrize(("mode", "used"), [(0o777, False), (0o775, False), (0o1777, True)])
def test_cache_below_a_writable_folder_needs_the_sticky_bit(tmp_path, monkeypatch, mode, used):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("PDECAY_CACHE", str(folder / "cache"))
    assert (build._cache_folder() is not None) == used


def test_directory_swapped_during_the_compilation_is_not_loaded(other_users_folder, tmp_path):
    """Another user replaces the cache by a folder with a library of the same name."""
    cache = other_users_folder / "cache"
    real = build._compiler()[0]
    compiler = tmp_path / "cc"
    compiler.write_text(
        f'#!/bin/sh\n{real} "$@"\nresult=$?\n'
        f"if [ -d {cache} ]; then mv {cache} {cache}.old; cp -r {cache}.old {cache}; fi\n"
        "exit $result\n"
    )
    compiler.chmod(0o755)
    maps = "print('shared' in open('/proc/self/maps').read())"
    assert run(f"{LOAD}; {maps}", cache, CC=compiler).split() == ["loaded", "False"]


def test_library_writable_by_others_is_not_opened(filled, tmp_path):
    (library,) = libraries(filled)
    copy = tmp_path / library.name
    copy.write_bytes(library.read_bytes())
    copy.chmod(0o777)
    assert build._open(copy) is None
    copy.chmod(0o755)
    assert build._open(copy) is not None
    (tmp_path / "link.so").symlink_to(copy)
    assert build._open(tmp_path / "link.so") is None


@pytest.fixture
def small_file_system(tmp_path):
    """Mount a file system of 1 MB that runs no code."""
    folder = tmp_path / "mounted"
    folder.mkdir(mode=0o700)
    options = "size=1m,mode=0700,noexec"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("cannot mount a file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(("user", "used"), [(0, True), (OTHER_USER, False)])
def test_fuse_file_system_of_another_user_is_not_used(small_file_system, monkeypatch, user, used):
    """Its owner may show any owner and any content."""
    monkeypatch.setenv("PDECAY_CACHE", str(small_file_system / "cache"))
    read = private_folders.read_proc
    options = f"- fuse.sshfs x rw,user_id={user},group_id=0,"
    monkeypatch.setattr(
        private_folders, "read_proc", lambda name: read(name).replace("- tmpfs tmpfs rw,", options)
    )
    assert (build._cache_folder() is not None) == used
    assert private_folders.is_private(small_file_system) == used


def test_file_system_mounted_without_a_source_is_used(small_file_system, monkeypatch):
    """A program may mount with an empty source: mountinfo then has nothing between two spaces."""
    read = private_folders.read_proc
    monkeypatch.setattr(
        private_folders, "read_proc", lambda name: read(name).replace("- tmpfs tmpfs ", "- tmpfs  ")
    )
    assert private_folders.is_private(small_file_system)


def test_mount_of_another_user_does_not_pass_for_the_one_of_the_cache(monkeypatch):
    """The path of its mount may have a carriage return and the number of another mount."""
    lines = (
        b"50 1 0:9 / /home/other/\r60 rw - fuse.sshfs x rw,user_id=1234\n"
        b"60 1 0:8 / /home rw - ext4 /dev/sda rw\n"
    )
    monkeypatch.setattr(Path, "read_bytes", lambda path: lines)
    assert private_folders._provider_of("60") == 0
    assert private_folders._provider_of("50") == 1234


def test_full_or_noexec_cache_compiles_once_in_a_temporary_folder(small_file_system, tmp_path):
    assert not build._runs_code(small_file_system)  # too small
    subprocess.run(["mount", "-o", "remount,size=99m", str(small_file_system)], check=True)
    assert not build._runs_code(small_file_system)  # noexec
    calls = tmp_path / "calls"
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\necho x >> {calls}\nexec {build._compiler()[0]} "$@"\n')
    compiler.chmod(0o755)
    assert run(LOAD, small_file_system, CC=compiler) == "loaded"
    assert calls.read_text().count("x") == 2  # compile and link
    assert not libraries(small_file_system)


def test_folder_without_space_runs_no_code(tmp_path, monkeypatch):
    assert build._runs_code(tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert not build._runs_code(tmp_path)


def test_folder_that_maps_no_code_is_detected(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(build.mmap, "mmap", refuse)
    assert not build._runs_code(tmp_path)


def test_unusable_cache_and_temporary_folder(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    output = run(TRY, shared / "cache", TMPDIR=shared)
    assert output.count("unavailable:") == 2
    assert "set PDECAY_CACHE to a folder that only you can write to" in output


def test_cache_with_a_variable_of_the_loader_is_not_used(tmp_path, monkeypatch):
    shared = tmp_path / "$LIB"
    shared.mkdir()
    monkeypatch.setenv("PDECAY_CACHE", str(shared))
    assert build._cache_folder() is None
    assert "unavailable: " + str(shared) in run(TRY, shared, TMPDIR=shared)
