"""Atomic replacement of files: permissions, special files and failed writes."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import pdecay
from pdecay._utils import files
from pdecay._utils.files import check_output_file, check_owner, lock, replacing


@pytest.fixture
def limited_file_size():
    """Make writes beyond 100 kB fail, as they do when the disk is full."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_replacing_keeps_permissions(tmp_path, mode):
    path = tmp_path / "model"
    path.write_bytes(b"old")
    path.chmod(mode)
    pdecay.save({"w": torch.ones(3)}, path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert pdecay.load(path)["w"].sum() == 3


@pytest.mark.parametrize("name", ["a" * 255, "\u00e9" * 127, "\U0001f600" * 63])
def test_longest_file_names(tmp_path, name):
    with replacing(tmp_path / name) as file:
        file.write(b"new")
    assert (tmp_path / name).read_bytes() == b"new"


def test_link_into_a_missing_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "missing" / "file")
    with (
        pytest.raises(FileNotFoundError, match=r"create it first: .*missing'$"),
        replacing(tmp_path / "link"),
    ):
        pass


@pytest.mark.parametrize("exists", [True, False])
def test_link_of_another_user_in_a_shared_folder_is_refused(tmp_path, exists):
    """It may lead to any file of this user; Linux does not open it either."""
    if not hasattr(os, "getuid") or os.getuid() != 0:
        pytest.skip("only root can create another user's link")
    shared, mine = tmp_path / "shared", tmp_path / "mine"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "model").symlink_to(mine)
    if exists:
        mine.write_bytes(b"precious")
    os.lchown(shared / "model", 65533, 65533)
    (tmp_path / "link").symlink_to(shared / "model")
    for path in (shared / "model", tmp_path / "link"):
        with pytest.raises(PermissionError, match="another user"), replacing(path) as file:
            file.write(b"new")
    assert mine.exists() == exists
    assert not exists or mine.read_bytes() == b"precious"
    os.lchown(shared / "model", os.getuid(), -1)
    with replacing(tmp_path / "link") as file:
        file.write(b"new")
    assert mine.read_bytes() == b"new"


@pytest.mark.parametrize("link", [False, True])
def test_folder_of_another_user_in_the_current_folder_is_refused(tmp_path, monkeypatch, link):
    """It may have links to files of this user, under the names that pdecay writes to."""
    if not hasattr(os, "getuid") or os.getuid() != 0:
        pytest.skip("only root can create another user's folder")
    shared, mine = tmp_path / "shared", tmp_path / "mine"
    shared.mkdir()
    mine.mkdir()
    if link:
        (shared / "runs").symlink_to(mine)
    else:
        (shared / "runs").mkdir()
    (shared / "runs" / "digits").mkdir()
    monkeypatch.chdir(shared)
    os.lchown("runs", 65533, 65533)
    for mode, refused in [(0o1777, True), (0o1755, False), (0o755, False)]:
        shared.chmod(mode)
        for path in (Path("runs"), Path("runs/digits"), Path("runs/digits/..")):
            with pytest.raises(PermissionError, match="another") if refused else nullcontext():
                check_owner(path)
        check_owner(shared / "runs")
    shared.chmod(0o1777)
    os.lchown("runs", os.getuid(), -1)
    for path in (Path("runs/digits"), Path(), Path("../mine"), Path("..")):
        check_owner(path)


@pytest.mark.parametrize(("folder", "mode"), [(0o1777, 0o644), (0o770, 0o666)])
def test_permissions_of_another_users_file(tmp_path, folder, mode):
    """In a folder such as /tmp, that user could change the new file, and so the model that runs."""
    if os.getuid() != 0:
        pytest.skip("only root can create another user's file")
    path = tmp_path / "shared" / "model"
    path.parent.mkdir()
    path.parent.chmod(folder)
    path.touch()
    path.chmod(0o666)
    os.chown(path, 65533, 65533)
    before = os.umask(0o022)
    try:
        with replacing(path) as file:
            file.write(b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_link_that_another_user_puts_in_place_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "mine").touch()
    (tmp_path / "model").symlink_to(tmp_path / "mine")
    monkeypatch.setattr(files, "_follow", lambda path: path)  # there was none before
    with pytest.raises(OSError, match="Not a regular file"), replacing(tmp_path / "model"):
        pass
    assert (tmp_path / "model").is_symlink()


def test_permissions_of_another_file_are_not_changed(tmp_path, monkeypatch):
    """In a folder that others can write to, the unfinished file may be replaced by a link."""
    path, private = tmp_path / "model", tmp_path / "private"
    for file, mode in ((path, 0o666), (private, 0o600)):
        file.touch()
        file.chmod(mode)
    sync = os.fsync

    def replaced(handle):
        for part in tmp_path.glob(".*.part"):
            part.unlink()
            part.symlink_to(private)
        sync(handle)

    monkeypatch.setattr(os, "fsync", replaced)
    with replacing(path) as file:
        file.write(b"new")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


def test_links_that_lead_nowhere(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "link")
    with pytest.raises(OSError, match="symbolic links"), replacing(tmp_path / "link"):
        pass


def test_unfinished_file_is_as_private_as_the_old_one(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with replacing(path) as file:
        file.write(b"new")
        (part,) = tmp_path.glob(".*.part")
        assert stat.S_IMODE(part.stat().st_mode) == 0o600


def test_new_file_follows_the_umask(tmp_path):
    previous = os.umask(0o027)
    try:
        pdecay.save({"w": torch.ones(3)}, tmp_path / "model")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o640


@pytest.mark.parametrize("kind", ["device", "fifo", "link to device"])
def test_special_files_are_not_replaced(tmp_path, kind):
    # Never the system's own devices: a failing test run by root would replace them.
    path = target = tmp_path / "special"
    if kind == "fifo":
        os.mkfifo(target)
    else:
        target = tmp_path / "device" if kind == "link to device" else path
        try:
            os.mknod(target, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except OSError:
            pytest.skip("only root can create devices")
        if target != path:
            path.symlink_to(target)
    before = path.stat()
    with pytest.raises(OSError, match="Not a regular file"):
        pdecay.save({"w": torch.ones(3)}, path)
    assert path.stat().st_ino == before.st_ino
    assert not list(tmp_path.glob(".*"))


def test_failed_write_reports_its_own_error(tmp_path, limited_file_size):
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="File too large") as caught, replacing(path) as file:
        torch.save({"w": torch.ones(100_000)}, file)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_only_regular_files_are_output_files(tmp_path):
    path = tmp_path / "model.onnx"
    assert check_output_file(path, (".onnx",)) == path
    path.write_bytes(b"old")
    assert check_output_file(path, (".onnx",)) == path
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a pipe or a device"):
        check_output_file(path, (".onnx",))


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_folders_that_cannot_be_flushed(tmp_path, monkeypatch, code):
    def fsync(handle, real=os.fsync):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    path, state = tmp_path / "model.safetensors", {"weight": torch.ones(2)}
    if code == errno.EINVAL:
        pdecay.save(state, path)
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            pdecay.save(state, path)
    assert torch.equal(pdecay.load(path)["weight"], state["weight"])


def test_lock_keeps_a_file_of_the_same_name(tmp_path):
    """It may belong to another program, or be another user's link to a file of this user."""
    (tmp_path / "own").write_text("content")
    (tmp_path / ".lock").symlink_to(tmp_path / "own")
    with lock(tmp_path):
        pass
    assert (tmp_path / "own").read_text() == "content"


def test_file_system_without_locks_is_reported(tmp_path, monkeypatch):
    """Lustre has locks only if it is mounted with the option flock."""
    fcntl = pytest.importorskip("fcntl")

    def refuse(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="no file locks") as caught, lock(tmp_path):
        pass
    assert caught.value.filename == str(tmp_path)
