"""Tests of the kernel build: compilers, failures, and side effects on the process."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdecay._native import build
from tests.native.processes import LOAD, TRY, environment, libraries, run

pytestmark = pytest.mark.usefixtures("needs_native")


def test_cached_library_is_not_recompiled(filled):
    (library,) = libraries(filled)
    before = library.stat()
    assert run(LOAD, filled) == "loaded"
    after = library.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


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


def test_library_of_another_process_is_not_replaced(tmp_path):
    """Over NFS, a process on another machine may crash if the library that it uses is replaced."""
    code = """
    import os
    from pdecay._native import build
    original = build._run
    def overtaken(*args, **kwargs):
        original(*args, **kwargs)
        build._run = original
        if os.fork() == 0:  # a process that starts later and ends first
            build.load("ranking", False)
            os._exit(0)
        os.wait()
        [path] = build._cache_folder().glob("*.so")
        published.append(path.stat().st_ino)
    published = []
    build._run = overtaken
    library = build.load("ranking", False)
    [path] = build._cache_folder().iterdir()
    print(path.stat().st_ino == published[0], library._name == str(path))
    """
    assert run(code, tmp_path / "cache") == "True True"


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


def test_compiler_variable_with_an_open_quote(tmp_path):
    output = run(TRY, tmp_path, CC="gcc'")
    assert output.count("cannot be split into words: No closing quotation") == 2


def test_extra_compiler_flags(tmp_path):
    output = run(TRY, tmp_path, PDECAY_CFLAGS="-include 'no such.h'")
    assert output.count("unavailable: cannot compile step.c:") == 2
    output = run(TRY, tmp_path, PDECAY_CFLAGS="-O1")
    assert "unavailable" not in output


@pytest.mark.parametrize("flag", ["-ffast-math", "-funsafe-math-optimizations"])
def test_flags_that_make_powers_wrong_are_refused(tmp_path, flag):
    """With -ffast-math, factors of the decay were wrong by up to a third."""
    assert "powers would be wrong with -ffast-math" in run(TRY, tmp_path, PDECAY_CFLAGS=flag)


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-funsafe-math-optimizations"])
def test_fast_math_of_the_compiler_variable_is_cancelled(tmp_path, flag):
    """gcc before 13 linked libraries that flush the denormals of the whole process."""
    code = """
    import torch
    from pdecay._native.build import load
    for name in ("step", "ranking"):
        load(name)
    print((torch.full((8,), 1e-40) * 1).min().item() > 0)
    """
    assert run(code, tmp_path, CC=f"{build._compiler()[0]} {flag}") == "True"


def test_sanitizers_of_the_compiler_variable_are_cancelled(tmp_path):
    """The address sanitizer ends a process that loads a library with it."""
    assert run(LOAD, tmp_path, CC=f"{build._compiler()[0]} -fsanitize=address") == "loaded"


def test_functions_are_found_if_the_compiler_variable_hides_them(tmp_path):
    code = """
    from pdecay._native.build import load
    load("ranking", False).pdecay_scores
    print("found")
    """
    assert run(code, tmp_path, CC=f"{build._compiler()[0]} -fvisibility=hidden") == "found"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_cpp_compiler_compiles_c(tmp_path):
    """As C++, functions have other names: the library was cached, but nothing could be called."""
    code = """
    from pdecay._native.build import load
    from pdecay.sklearn._kernels import CompiledKernels
    load("step").pdecay_adam, CompiledKernels()
    print("found")
    """
    assert run(code, tmp_path, CC="g++") == "found"


def test_compiler_does_not_read_the_input_of_the_process(tmp_path):
    code = "from pdecay._native import build; build._run(['cat'], '.'); print(input())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input="line", capture_output=True, text=True, check=True)
    assert done.stdout == "line\n"


def test_ctrl_c_does_not_end_the_compiler(tmp_path):
    """A step defers it. A kernel by the next options, which is slower, would stay in the cache."""
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nkill -s INT -- "-$PPID"\nexec cc "$@"\n')
    compiler.chmod(0o755)
    code = """
    import os, signal
    from pdecay._native import build
    os.setsid()
    received = []
    signal.signal(signal.SIGINT, lambda *_: received.append(1))
    best = build._attempts(build.NO_RUNTIME)[:1]
    build._attempts = lambda _: best
    build.load("bridge", False)
    print(bool(received))
    """
    assert run(code, tmp_path / "cache", CC=compiler) == "True"


def test_cache_of_the_compiler_is_not_used(tmp_path):
    """Old versions of ccache return code for the processor of another machine."""
    compiler = tmp_path / "cc"
    compiler.write_text("""#!/bin/sh
if [ -z "$CCACHE_DISABLE" ] || [ -z "$SCCACHE_RECACHE" ]; then
    echo "error: the compiler's cache is in use" >&2
    exit 1
fi
exec cc "$@"
""")
    compiler.chmod(0o755)
    assert run(TRY, tmp_path / "cache", CC=compiler) == "loaded\nloaded"


def test_headers_in_the_current_folder_are_not_used(tmp_path, monkeypatch):
    """An empty part of CPATH is the current folder, which may belong to another user."""
    monkeypatch.chdir(tmp_path)
    Path("math.h").write_text("#error foreign header")
    assert run(LOAD, tmp_path / "cache", CPATH=":/usr/local/include") == "loaded"


def test_environment_without_a_path(tmp_path, monkeypatch):
    monkeypatch.delenv("PATH")
    assert run(LOAD, tmp_path) == "loaded"


@pytest.mark.parametrize("variable", ["PATH", "CPATH", "LD_RUN_PATH"])
def test_relative_search_paths_are_not_used(tmp_path, variable):
    """Seen from the compiler's folder, they may lead to the files of another user."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / "math.h").write_text("#error foreign header")
    (cache / "as").write_text("#!/bin/sh\nexit 1\n")
    (cache / "as").chmod(0o755)
    absolute = os.environ["PATH"]  # where the programs of the compiler are
    assert run(LOAD, cache, **{variable: f"../..:{absolute}"}) == "loaded"
    (library,) = libraries(cache)
    assert b"../.." not in library.read_bytes()


@pytest.mark.parametrize("variable", ["CC", "PDECAY_CFLAGS"])
def test_relative_options_do_not_lead_to_folders_above_the_cache(tmp_path, variable):
    """Above a temporary folder is /tmp, where another user may have put files."""
    (tmp_path / "kernels").mkdir(mode=0o700)
    (tmp_path / "math.h").write_text("#error foreign header")
    command = build._compiler()[0] if variable == "CC" else ""
    value = f"{command} -I. -I.. -I../.. -I../../.."
    assert run(LOAD, tmp_path, **{variable: value}) == "loaded"


@pytest.mark.parametrize("name", [None, "gcc"])
def test_compiler_in_the_current_folder_is_not_used(tmp_path, monkeypatch, name):
    """Other users may have put it there: an empty part of PATH is the current folder."""
    expected = build._compiler()
    for program in ("cc", "gcc", "clang"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f":.:{os.environ['PATH']}")
    assert build._compiler() == expected
    if name:
        monkeypatch.setenv("CC", name)
    monkeypatch.setenv("PATH", "/nowhere:")
    with pytest.raises(build.KernelUnavailable, match="no C compiler"):
        build._compiler()


def test_processor_without_proc_runs_no_program(monkeypatch):
    """A program `uname` in the current folder may be another user's."""

    def fail(*args, **kwargs):
        raise OSError

    calls = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: calls.append(args) or fail())
    monkeypatch.setattr(Path, "read_text", fail)
    monkeypatch.setattr(platform, "_uname_cache", None)
    assert build._processor() == os.uname().nodename
    assert not calls


@pytest.mark.parametrize("info", ["", "processor : 0\n\nprocessor : 1\n"])
def test_machines_with_unknown_processors_have_kernels_of_their_own(monkeypatch, info):
    """They may share a home folder, and one may not have all instructions of the other."""
    compiler, keys = build._compiler(), set()
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path: info if path.name == "cpuinfo" else read(path)
    )
    machine = os.uname()
    for name in ("one", "other"):
        renamed = os.uname_result((machine.sysname, name, *machine[2:]))
        monkeypatch.setattr(os, "uname", lambda renamed=renamed: renamed)
        keys.add(build._key("ranking", compiler, build.NO_RUNTIME))
    assert len(keys) == 2


def test_compiler_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_cc").symlink_to(build._compiler()[0])
    assert run(LOAD, tmp_path / "cache", CC="./my_cc") == "loaded"


def test_compiler_messages_that_are_not_utf8(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_bytes(b"#!/bin/sh\nprintf 'error: caf\\351\\n' >&2\nexit 1\n")
    compiler.chmod(0o755)
    output = run(TRY, tmp_path / "cache", CC=compiler)
    assert output.count("unavailable: cannot compile step.c:") == 2


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Return a copy of the C files, from which kernels are built."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for path in build.SOURCES.glob("*.[ch]"):
        shutil.copy(path, folder)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setenv("PDECAY_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.mark.parametrize("name", ["ranking.c", "decay.h"])
def test_update_of_pdecay_after_its_import(sources, tmp_path, name):
    """Kernels of another version may have other arguments: the process crashed."""
    before = (sources / name).read_text()
    (sources / name).write_text(before + "\n")
    with pytest.raises(build.KernelUnavailable, match="restart Python"):
        build.load("ranking", threads=False)
    assert not libraries(tmp_path / "cache")
    (sources / name).write_text(before)
    build._loaded.clear()
    build.load("ranking", threads=False)


def test_update_of_pdecay_during_a_build(sources, tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.write_text(
        f'#!/bin/sh\necho >> {sources / "decay.h"}\nexec {build._compiler()[0]} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(build.KernelUnavailable, match="restart Python"):
        build.load("ranking", threads=False)
    assert not libraries(tmp_path / "cache")


def test_update_of_pdecay_before_its_sources_are_read(sources, monkeypatch):
    """The kernel of the new version may be in the cache already."""
    check = build._check_sources

    def late_update():
        check()
        (sources / "decay.h").write_text("// of another version\n")

    monkeypatch.setattr(build, "_check_sources", late_update)
    before = build._key("ranking", build._compiler(), build.NO_RUNTIME)
    monkeypatch.setattr(build, "_check_sources", lambda: None)
    assert build._key("ranking", build._compiler(), build.NO_RUNTIME) != before


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


def test_signal_handler_may_load_during_a_build(tmp_path):
    """Such as one that counts zeros or saves a model before a cluster ends the job."""
    code = """
    import faulthandler, signal
    from pdecay._native import build
    faulthandler.dump_traceback_later(60, exit=True)  # ends a deadlock
    original = build._run
    def interrupted(*args, **kwargs):
        build._run = original
        signal.raise_signal(signal.SIGUSR1)
        return original(*args, **kwargs)
    build._run = interrupted
    signal.signal(signal.SIGUSR1, lambda *_: build.load("ranking", False))
    build.load("bridge", False)
    print(sorted(build._loaded))
    """
    assert run(code, tmp_path / "cache") == "['bridge', 'ranking']"


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


def test_compiler_without_float16(tmp_path):
    """gcc before version 12 has none on x86. torch's own operations then update such weights."""
    code = """
    import torch
    from pdecay import Lp, PAdam, attach
    from pdecay._optim.kernels import native

    weights = {}
    settings = {"fused": {}, "foreach": {"foreach": True}, "plain": {"fused": False}}
    for name, options in settings.items():
        pair = [torch.nn.Parameter(torch.linspace(-1, 1, 64, dtype=dtype).view(8, 8))
                for dtype in (torch.float16, torch.float32)]
        optimizer = PAdam(pair, lr=0.1, eps=1e-3, decay=Lp(0.8, 0.1), **options)
        sgd = torch.optim.SGD(pair, lr=0.1)
        attach(sgd, Lp(0.8, 0.1), fused=options.get("fused"))
        for weight in pair:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        sgd.step()
        weights[name] = pair
    assert native.available() is None
    assert "float16" in native.why_not(weights["fused"][0])
    for name in ("fused", "foreach"):
        for one, other in zip(weights[name], weights["plain"]):
            torch.testing.assert_close(one, other)
    print("equal")
    """
    assert run(code, tmp_path, PDECAY_CFLAGS="-U__FLT16_MAX__") == "equal"
