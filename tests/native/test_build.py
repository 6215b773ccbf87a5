"""Tests of the kernel build: cache, failures, and side effects on the process."""

import os
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from pdecay._native import build

pytestmark = pytest.mark.usefixtures("needs_native")

LOAD = "from pdecay._native.build import load; load('step'); print('loaded')"
TRY = """
from pdecay._native.build import KernelUnavailable, load
for _ in range(2):
    try:
        load('step')
        print('loaded')
    except KernelUnavailable as reason:
        print('unavailable:', reason)
"""


def environment(cache, **changes):
    result = {name: value for name, value in os.environ.items() if name != "CC"}
    return result | {"PDECAY_CACHE": str(cache)} | {k: str(v) for k, v in changes.items()}


def run(code, cache, **changes):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment(cache, **changes),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Return a cache that contains the kernel."""
    cache = tmp_path_factory.mktemp("cache")
    assert run(LOAD, cache) == "loaded"
    return cache


def libraries(cache):
    return sorted(Path(cache, "kernels").glob("*"))


def test_cache_is_private_and_has_one_library(filled):
    folder = filled / "kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.suffix for path in libraries(filled)] == [".so"]


def test_cached_library_is_not_recompiled(filled):
    (library,) = libraries(filled)
    before = library.stat()
    assert run(LOAD, filled) == "loaded"
    after = library.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


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


def test_damaged_library_is_rebuilt(filled, tmp_path):
    (library,) = libraries(filled)
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    (folder / library.name).write_bytes(damaged(library.read_bytes(), "half"))
    assert run(LOAD, tmp_path) == "loaded"
    assert [path.name for path in libraries(tmp_path)] == [library.name]
    assert build._open(folder / library.name) is not None


def test_missing_compiler_is_reported(tmp_path):
    lines = run(TRY, tmp_path, PATH="").splitlines()
    assert lines == ["unavailable: no C compiler found (cc, gcc, clang)"] * 2
    assert not list(tmp_path.rglob("*.so"))


def test_missing_cc_is_reported(tmp_path):
    output = run(TRY, tmp_path, CC="/no/such/compiler")
    assert output.startswith("unavailable: no C compiler found (/no/such/compiler)")


def test_failing_compiler_is_reported(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'step.c:1: fatal error: no luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    lines = run(TRY, tmp_path / "cache", CC=compiler).splitlines()
    assert lines == [lines[0]] * 2
    assert lines[0].startswith("unavailable: cannot compile step.c:")
    assert lines[0].endswith("fatal error: no luck")
    assert not libraries(tmp_path / "cache")


def test_invalid_compiler_output_is_reported(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho rubbish > "$last"\n')
    compiler.chmod(0o755)
    output = run(TRY, tmp_path / "cache", CC=compiler)
    assert output.count("unavailable: cannot compile step.c:") == 2
    assert not libraries(tmp_path / "cache")


def test_compiler_without_tuning_flags_is_used(tmp_path):
    compiler = tmp_path / "cc"
    real = build._compiler()[0]
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-march*|*-fopenmp*|*gomp*) echo "error" >&2; exit 1;; esac\n'
        f'exec {real} "$@"\n'
    )
    compiler.chmod(0o755)
    assert run(LOAD, tmp_path / "cache", CC=compiler) == "loaded"


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
    folder.chmod(0o777)
    monkeypatch.setenv("PDECAY_CACHE", str(tmp_path))
    assert build._cache_folder() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_cache_that_is_a_link_or_foreign_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kernels").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("PDECAY_CACHE", str(tmp_path))
    assert build._cache_folder() is None
    monkeypatch.setenv("PDECAY_CACHE", str(tmp_path / "mine"))
    assert build._cache_folder() is not None
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert build._cache_folder() is None


def test_two_processes_may_compile_at_once(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD], env=environment(tmp_path), stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0].strip() for process in processes]
    assert outputs == [b"loaded"] * 2
    assert len(libraries(tmp_path)) == 1


def test_loading_and_running_keep_process_state(filled):
    """Denormal mode, rounding mode and thread count are unchanged in all of torch's threads."""
    code = """
    import ctypes, ctypes.util, glob, torch
    libm = ctypes.CDLL(ctypes.util.find_library("m"))

    def state():
        # enough numbers to use all of torch's threads
        denormal = torch.full((1 << 20,), 1e-40)
        return (
            float((denormal * 2).sum(dtype=torch.float64)),
            bool(((denormal + 0) == denormal).all()),
            ctypes.c_float(1e-42).value * 1.0,
            libm.fegetround(),
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
        )

    def runtimes():
        names = {line.split()[-1] for line in open("/proc/self/maps")}
        return {name for name in names if any(n in name for n in ("libgomp", "libomp", "libiomp"))}

    torch.set_num_threads(2)
    before, loaded = state(), runtimes()
    assert before[0] > 0
    from pdecay._optim.kernels import native
    assert native.available() is None
    assert state() == before
    big = [torch.rand(1 << 20) for _ in range(2)]
    for p in (0, 0.5, 0.8, 1, 2):
        native.decay_([big[0]], [big[1]], terms=[(p, 1e-3)], rate=1e-3)
        assert state() == before, p
    assert runtimes() == loaded or not loaded, runtimes()
    print("same")
    """
    assert run(code, filled) == "same"


def test_denormals_are_kept_without_decay(filled):
    code = """
    import torch
    from pdecay._optim.kernels import native
    w = torch.full((50,), 1e-40)
    native.sgd_([w], [torch.zeros(50)], [], terms=[], lr=1.0, momentum=0.0, dampening=0.0,
                nesterov=False, weight_decay=0.0, maximize=False)
    print(float(w[0]) == float(torch.tensor(1e-40)))
    """
    assert run(code, filled) == "True"


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


def test_compiler_variable_with_an_open_quote(tmp_path):
    output = run(TRY, tmp_path, CC="gcc'")
    assert output.count("cannot be split into words: No closing quotation") == 2


def test_extra_compiler_flags(tmp_path):
    output = run(TRY, tmp_path, PDECAY_CFLAGS="-include 'no such.h'")
    assert output.count("unavailable: cannot compile step.c:") == 2
    output = run(TRY, tmp_path, PDECAY_CFLAGS="-O1")
    assert "unavailable" not in output


def test_compiler_does_not_read_the_input_of_the_process(tmp_path):
    code = "from pdecay._native import build; build._run(['cat'], '.'); print(input())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input="line", capture_output=True, text=True, check=True)
    assert done.stdout == "line\n"


def test_cache_with_a_variable_of_the_loader_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("PDECAY_CACHE", str(tmp_path / "$LIB"))
    assert build._cache_folder() is None


def test_compiler_messages_that_are_not_utf8(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_bytes(b"#!/bin/sh\nprintf 'error: caf\\351\\n' >&2\nexit 1\n")
    compiler.chmod(0o755)
    output = run(TRY, tmp_path / "cache", CC=compiler)
    assert output.count("unavailable: cannot compile step.c:") == 2


def test_fork_during_a_build_does_not_deadlock_the_child(filled):
    code = """
    import os, threading
    from pdecay._native import build
    entered, leave = threading.Event(), threading.Event()
    original = build._load
    def slow(name, threads):
        entered.set()
        leave.wait(60)
        return original(name, threads)
    build._load = slow
    thread = threading.Thread(target=build.load, args=("step",))
    thread.start()
    entered.wait(60)
    child = os.fork()
    if child == 0:
        build._load = original
        build.load("step")
        os._exit(7)
    for _ in range(300):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        threading.Event().wait(0.1)
    else:
        os.kill(child, 9)
    leave.set()
    thread.join()
    print(os.waitstatus_to_exitcode(status) if done else "deadlock")
    """
    assert run(code, filled) == "7"


def test_forked_process_that_exits_does_not_disturb_the_build(tmp_path):
    code = """
    import os, sys, threading
    from pdecay._native import build
    entered, leave = threading.Event(), threading.Event()
    original = build._run
    def slow(*args, **kwargs):
        entered.set()
        leave.wait(60)
        return original(*args, **kwargs)
    build._run = slow
    thread = threading.Thread(target=build.load, args=("ranking", False))
    thread.start()
    entered.wait(60)
    if os.fork() == 0:
        sys.exit()  # runs what is registered to run at exit
    os.wait()
    leave.set()
    thread.join()
    print("loaded" if build.load("ranking", False) else "")
    """
    assert run(code, tmp_path / "cache") == "loaded"


def test_openmp_runtime_in_a_folder_with_spaces():
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 11                         /usr/lib/libm.so.6\n"
        "7f01-7f02 r-xp 00000000 08:01 12                 /my env/torch libs/libgomp-24e2.so.1\n"
    )
    assert build._runtime_in(maps) == "/my env/torch libs/libgomp-24e2.so.1"
    assert build._runtime_in(maps.splitlines()[0]) is None
