"""Compilation of this folder's C files at first use, with a cache of the results.

`load("step")` compiles `step.c` with the system's compiler into a shared library and opens it with
ctypes. The library is kept per source, compiler, processor and OpenMP runtime in a private folder
(`PDECAY_CACHE`, else `$XDG_CACHE_HOME/pdecay`, else `~/.cache/pdecay`). Every failure raises
`KernelUnavailable` with a reason of one line; the caller falls back to another implementation.
`PDECAY_CFLAGS` has further options for the compiler, such as `-march=haswell`.

If the cache is not private (see ``private_folders.py``), has a relative path, is full, or is on a
file system that runs no code, each process compiles in a temporary folder instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pdecay._native.private_folders import OTHERS_WRITE, create, is_private, read_proc, resolve

__all__ = ["KernelUnavailable", "load"]

SOURCES = Path(__file__).absolute().parent
TIMEOUT = 60.0  # seconds, for one run of the compiler and before the last one starts
NO_RUNTIME = "none"  # for kernels that run on one thread
DIGEST_SIZE = hashlib.sha256().digest_size
PROBE_SIZE = 4 << 20  # bytes, more than the files of one compilation take

# Not -ffast-math: it would break the rounding trick of fastpow.h and hide NaN, and gcc before 13
# links a library that has it with crtfastmath.o, which flushes denormals in the whole process.
# These options, to compile and to link with, cancel it in `CC`. They also cancel sanitizers there:
# that of addresses ends a process that loads a library with it.
EXACT = (
    *("-O2", "-fno-fast-math", "-fno-unsafe-math-optimizations", "-fno-finite-math-only"),
    "-fno-sanitize=all",
)
COMMON = (
    *EXACT,
    *("-x", "c"),  # a C++ compiler in `CC` would change the names of the functions
    "-std=c11",
    "-fPIC",
    "-fvisibility=default",  # ctypes finds no hidden functions
    "-ftree-vectorize",
    "-fno-math-errno",  # sqrt as one instruction
    "-fno-trapping-math",  # conditions as masks
    "-ffp-contract=fast",  # fused multiply-add
)
# From the fastest to the most portable. The first (gcc's) asks for full vectors.
TUNINGS = (
    ("-march=native", "-mprefer-vector-width=512", "-fvect-cost-model=dynamic"),
    ("-march=native", "-O3"),
    ("-O3",),
)
# Prefetches in every loop that walks memory: 15 to 20 % of a step on an Intel Xeon, measured on one
# thread. On an AMD EPYC they make the step 5 % slower.
PREFETCH = (
    "-fprefetch-loop-arrays",
    "--param=simultaneous-prefetches=100",
    "--param=prefetch-latency=1000",
    "--param=prefetch-min-insn-to-mem-ratio=1",
    "--param=min-insn-to-prefetch-ratio=4",
)

# ccache before 4.3 and sccache do not distinguish processors with -march=native. With a home folder
# that machines share, they would return code whose instructions this processor may not have.
NO_COMPILER_CACHE = {"CCACHE_DISABLE": "1", "SCCACHE_RECACHE": "1"}
# The variables in which the compiler and its programs find files, and those put into the library.
SEARCH_PATHS = (
    *("PATH", "COMPILER_PATH", "CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH"),
    *("LD_LIBRARY_PATH", "LD_RUN_PATH"),
)


class KernelUnavailable(RuntimeError):  # noqa: N818 (a state of this machine, not a mistake)
    """A kernel cannot be compiled or loaded; the message gives the reason in one line."""


def _digest_of_sources() -> bytes:
    content = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    return hashlib.sha256(b"\0".join(content)).digest()


_imported = _digest_of_sources()
_lock = threading.RLock()  # a signal handler may load a kernel while its thread builds one
_loaded: dict[str, ctypes.CDLL | KernelUnavailable] = {}


def _renew_lock() -> None:
    """Replace the lock: in a forked process, no thread would release a lock that was held."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def load(name: str, threads: bool = True) -> ctypes.CDLL:
    """Return the shared library of `name`.c, compiled now or loaded from the cache.

    A failure is cached too, so that a process tries only once.

    Args:
        name: the C file, without its extension.
        threads: whether the kernel runs on several threads. One that does not needs no OpenMP
            runtime, and torch is not imported to find one.
    """
    with _lock:
        if name not in _loaded:
            try:
                _loaded[name] = _load(name, threads)
            except KernelUnavailable as reason:
                _loaded[name] = reason
            except OSError as error:
                _loaded[name] = KernelUnavailable(f"cannot build {name}.c: {_one_line(str(error))}")
        found = _loaded[name]
    if isinstance(found, KernelUnavailable):
        raise KernelUnavailable(str(found))  # a new error: the traceback of a cached one would grow
    return found


def _load(name: str, threads: bool) -> ctypes.CDLL:
    compiler = _compiler()
    runtime = _openmp_runtime() if threads else NO_RUNTIME
    file_name = f"{name}-{_key(name, compiler, runtime)}.so"
    folder = _cache_folder()
    if folder is not None:
        library = _open(folder / file_name)
        if library is not None:
            return library
        if _runs_code(folder):
            return _build(name, compiler, runtime, folder / file_name)
    with _temporary_folder("pdecay-") as temporary:
        folder = Path(temporary).resolve()
        if "$" in str(folder) or not is_private(folder) or not _runs_code(folder):
            raise KernelUnavailable(
                f"{folder.parent} is full, runs no code, is writable by other users or has a $ in "
                "its path: set PDECAY_CACHE to a folder that only you can write to"
            )
        return _build(name, compiler, runtime, folder / file_name)


def _open(path: Path) -> ctypes.CDLL | None:
    """Return the library in a private folder, or None if it is missing, damaged or not ours.

    The file ends with its own digest, because loading a truncated library crashes (SIGBUS). The
    read neither waits for a writer of a named pipe nor takes more than the size of a library.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.getuid() or found.st_mode & OTHERS_WRITE:
                return None
            content = file.read(PROBE_SIZE)
        if hashlib.sha256(content[:-DIGEST_SIZE]).digest() != content[-DIGEST_SIZE:]:
            return None
        return ctypes.CDLL(str(path))
    except (OSError, UnicodeDecodeError):  # the loader's message is not always UTF-8
        return None


def _build(name: str, compiler: list[str], runtime: str | None, path: Path) -> ctypes.CDLL:
    """Compile into `path`, in a private folder, by the first set of options that works; load it.

    The finished file is moved into place atomically, so that processes that compile the same
    kernel at the same time never load a partial file.
    """
    reason = "no option tried"
    give_up = time.monotonic() + TIMEOUT
    with _temporary_folder(f"{name}-", path.parent) as folder:
        object_file, part = (os.path.join(folder, f"{name}.{suffix}") for suffix in ("o", "so"))
        run = functools.partial(_run, folder=folder)
        for options, link in _attempts(runtime):
            if time.monotonic() > give_up:
                break
            try:
                source = str(SOURCES / f"{name}.c")
                flags = [*COMMON, *options, *_extra_flags()]
                run([*compiler, *flags, "-c", source, "-o", object_file])
                run([*compiler, *EXACT, "-shared", object_file, *link, "-lm", "-o", part])
                # Do not replace a library that was published meanwhile: a process on another
                # machine may use it, and over NFS a page of a replaced file may be unreadable.
                library = _open(path)
                if library is not None:
                    return library
                _check_sources()
                library = ctypes.CDLL(part)  # all symbols resolve: others may see it
                with contextlib.suppress(OSError):  # such as a folder in its place
                    _publish(part, path)
                return library
            except KernelUnavailable as error:
                reason = str(error)
            except (OSError, UnicodeDecodeError) as error:
                reason = _one_line(str(error))
    raise KernelUnavailable(f"cannot compile {name}.c: {reason}")


@contextlib.contextmanager
def _temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[str]:
    """Create a folder that is removed at the end of the context.

    Unlike tempfile.TemporaryDirectory, a process that another thread forks meanwhile does not
    remove the folder at its own exit.
    """
    folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(part: str, path: Path) -> None:
    """Append a library's digest, and move it to its place in the cache."""
    content = Path(part).read_bytes()
    with open(part, "ab") as file:
        file.write(hashlib.sha256(content).digest())
    os.chmod(part, 0o700)
    os.replace(part, path)


def _attempts(runtime: str | None) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the options to compile and to link with, in the order to try them.

    The OpenMP runtime that torch has loaded comes first, because a second runtime would start
    threads of its own, which spin while torch works. Without OpenMP, kernels use one thread.
    """
    openmp: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    if runtime == NO_RUNTIME:
        openmp += [(("-fopenmp-simd",), ()), ((), ())]
    else:
        openmp += [(("-fopenmp",), (runtime,))] if runtime else []
        openmp += [(("-fopenmp",), ("-fopenmp",)), ((), ())]
    return [((*tuning, *flags), link) for flags, link in openmp for tuning in _tunings()]


def _tunings() -> list[tuple[str, ...]]:
    fastest, *others = TUNINGS
    return [fastest if "AMD" in _processor() else (*fastest, *PREFETCH), *others]


def _run(command: list[str], folder: str) -> None:
    """Run the compiler with its temporary files in `folder`, which must be private.

    It runs in the root folder: options such as `-I../../include` must not lead to the files of
    another user in the current folder of the process, or above a temporary one.
    """
    settings = {**NO_COMPILER_CACHE, "TMPDIR": folder, "LC_ALL": "C"}  # in English
    try:
        done = subprocess.run(
            command,
            cwd="/",
            env=_environment() | settings,
            stdin=subprocess.DEVNULL,  # a wrapper of the compiler must not read the user's input
            process_group=0,  # Ctrl-C is for this process, which may act on it later
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise KernelUnavailable(f"{command[0]} took more than {TIMEOUT:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        telling = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise KernelUnavailable(f"{command[0]}: {_one_line(telling)}")


def _environment() -> dict[str, str]:
    """Return the environment variables, with a `PATH` and no relative parts of `SEARCH_PATHS`.

    Other users may have put files there: `LD_RUN_PATH=:/opt/lib` names the current folder of each
    process that loads the library.
    """
    result = {"PATH": os.defpath, **os.environ}
    for name in result.keys() & SEARCH_PATHS:
        parts = filter(os.path.isabs, result.pop(name).split(os.pathsep))
        if kept := os.pathsep.join(parts):  # an empty LIBRARY_PATH is the current folder
            result[name] = kept
    return result


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _compiler() -> list[str]:
    """Return the C compiler's command: `CC` if set, else cc, gcc or clang from the path.

    An empty or relative part of `PATH` is not searched: other users may have put a program there.
    """
    if not hasattr(os, "getuid"):
        raise KernelUnavailable("kernels need a POSIX system")
    given = _words_of("CC")
    places = _environment().get("PATH", "")
    for command in [given] if given else [["cc"], ["gcc"], ["clang"]]:
        path = shutil.which(command[0], path=places)
        if path:
            return [os.path.abspath(path), *command[1:]]  # it runs in another folder
    raise KernelUnavailable(f"no C compiler found ({given[0] if given else 'cc, gcc, clang'})")


def _extra_flags() -> list[str]:
    return _words_of("PDECAY_CFLAGS")


def _words_of(variable: str) -> list[str]:
    """Return the words of an environment variable, split as a shell does."""
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        given = f"{variable}={os.environ[variable]!r}"
        raise KernelUnavailable(f"{given} cannot be split into words: {error}") from None


@functools.cache
def _openmp_runtime() -> str | None:
    """Return the file of the OpenMP runtime that this process has loaded, usually torch's."""
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401 (loads its runtime)
    try:
        maps = read_proc("maps")
    except OSError:  # not Linux
        return None
    return _runtime_in(maps)


def _runtime_in(maps: str) -> str | None:
    """Return the first OpenMP runtime in the text of /proc/self/maps; its path may have spaces."""
    found = re.search(r" (/.*/lib(?:gomp|iomp5|omp)[^/]*\.so[.\d]*)$", maps, re.MULTILINE)
    return found[1] if found else None


def _check_sources() -> None:
    """Raise `KernelUnavailable` if pdecay was updated after its import.

    The kernels of another version may have other arguments: the process would crash.
    """
    if _digest_of_sources() != _imported:
        raise KernelUnavailable(f"{SOURCES} has changed since pdecay was imported: restart Python")


def _key(name: str, compiler: list[str], runtime: str | None) -> str:
    """Return a hash of everything that the compiled library depends on."""
    program = os.stat(compiler[0])
    parts = [*compiler, str(program.st_size), str(program.st_mtime_ns), str(runtime)]
    parts += [*COMMON, repr(_tunings()), *_extra_flags()]
    parts += [platform.machine(), platform.system(), _processor()]
    for source in [SOURCES / f"{name}.c", *sorted(SOURCES.glob("*.h"))]:
        parts += [source.name, source.read_text()]
    _check_sources()  # after the last read: pdecay may be updated at any time
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:24]


def _processor() -> str:
    """Return the processor's features: machines may share a home folder, and with it the cache.

    Without them, return the machine's name. platform.processor() would run a program, perhaps one
    of the current folder.
    """
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    first = info.split("\n\n", 1)[0]
    wanted = ("model name", "flags", "features", "cpu part", "cpu variant", "isa", "cpu")
    lines = (line.partition(":") for line in first.splitlines())
    features = [value for key, _, value in lines if key.strip().lower() in wanted]
    return "\n".join(features) or os.uname().nodename


def _cache_folder() -> Path | None:
    """Return the folder of compiled kernels, or None if it is not private or cannot exist."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.path.expanduser(os.environ.get("PDECAY_CACHE") or os.path.join(caches, "pdecay"))
    if not os.path.isabs(root):
        return None  # no home folder, or the current folder, which may have files of others
    try:
        resolved = resolve(root)
        if resolved is None:
            return None  # and create nothing in the home of the user who called sudo
        folder = resolved / "kernels"
        if "$" in str(folder):  # the loader would replace $LIB and $PLATFORM
            return None
        return folder if create(folder) else None
    except OSError:
        return None


def _runs_code(folder: Path) -> bool:
    """Return whether a file can be written to a folder and mapped as code.

    A full disk or a file system mounted with noexec would otherwise fail only after a compilation.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_SIZE))
            probe.flush()
            mmap.mmap(probe.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError:
        return False
    return True
