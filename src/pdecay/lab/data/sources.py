"""Where data lie, how they get there, and what is said when they do not.

Files are looked for under ``PDECAY_DATA``, then in the cache (``~/.cache/pdecay/data``, or under
``XDG_CACHE_HOME``). What is in neither is downloaded into the cache, checked against a known
digest, and only then given its name: a download cut short never passes for a data set. What
cannot be downloaded ends in a `DataError` that says which file to put where.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from torch import Tensor

_CHUNK = 1 << 20
_PATIENCE = 30  # seconds without a byte before a download is given up

Advance = Callable[[int], None]


class DataError(Exception):
    """Data are missing, cut short or altered; the message ends with what to do about it."""


@dataclass(frozen=True)
class Images:
    """A data set of labelled images: pixels (N, channels, height, width) and labels (N,)."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int


@dataclass(frozen=True)
class Remote:
    """A file that can be downloaded: its name, where from, and its digest as ``"sha256:..."``."""

    name: str
    urls: tuple[str, ...]
    digest: str


def cache_folder() -> Path:
    """The folder that downloads go to."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdecay" / "data"


def folders() -> list[Path]:
    """The folders that are searched, first to last."""
    named = os.environ.get("PDECAY_DATA")
    if not named:
        return [cache_folder()]
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"PDECAY_DATA is {named!r}, which is not a folder. Create it and put the data there, "
            f"or unset PDECAY_DATA to use {cache_folder()}."
        )
    return [folder, cache_folder()]


def find(*names: str) -> Path | None:
    """The first of the relative paths `names` that exists in the first folder that has any."""
    for folder in folders():
        for name in names:
            if (folder / name).exists():
                return folder / name
    return None


def missing(what: str, put: str, reason: str = "") -> DataError:
    """The error for data that are nowhere: what is missing, and what to put where."""
    place = os.environ.get("PDECAY_DATA") or str(cache_folder())
    searched = ", ".join(str(folder) for folder in folders())
    because = f" {reason}." if reason else ""
    return DataError(
        f"{what} was not found in {searched}.{because} Put {put} into {place}, or set PDECAY_DATA "
        "to the folder that has it."
    )


def fetch_or_tell(remote: Remote, what: str, put: str, *, download: bool) -> Path:
    """Download a file into the cache; the error, if that cannot be, says what to put where."""
    reason = ""
    if download:
        try:
            return fetch(remote, cache_folder())
        except DataError as error:
            reason = str(error)
    raise missing(what, put, reason)


def fetch(remote: Remote, folder: Path, *, progress: bool = True) -> Path:
    """Download a file into a folder, check its digest, and give its path.

    The file is written beside its place and moved there once it is whole, so that two processes
    that download at once, or one that is killed, leave no half file behind.
    """
    failures = []
    for url in remote.urls:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=f".{remote.name}-", dir=folder)
        except OSError as error:
            raise DataError(
                f"cannot write to {folder} ({error}). Set PDECAY_DATA to a folder that has "
                f"{remote.name}, or XDG_CACHE_HOME to one that can be written."
            ) from error
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                _download(url, file.write, f"downloading {remote.name}", progress)
            check_digest(part, remote.digest, named=url)
            part.chmod(0o644)  # mkstemp's files are the owner's only
            part.replace(folder / remote.name)
            return folder / remote.name
        except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
            failures.append(f"{url}: {error}")
        except DataError as error:
            failures.append(str(error))
        finally:
            part.unlink(missing_ok=True)
    raise DataError(f"could not download {remote.name} ({'; '.join(failures)})")


def check_digest(path: Path, digest: str, named: str = "") -> None:
    """Raise a `DataError` unless the file has the digest, given as ``"sha256:..."``."""
    algorithm, _, expected = digest.partition(":")
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}. Check what it is, and who may.") from error
    if found.hexdigest() != expected:
        raise altered(named or path, f"its {algorithm} is {found.hexdigest()}, not {expected}")


def altered(path: Path | str, how: str) -> DataError:
    """The error for a file that is there but is not what it should be."""
    return DataError(
        f"{path} is not the file it should be: {how}. It was cut short or altered: delete it and "
        "let it be downloaded again, or put a good copy in its place."
    )


def _download(url: str, write: Callable[[bytes], object], title: str, progress: bool) -> None:
    with urllib.request.urlopen(url, timeout=_PATIENCE) as response:
        length = response.headers.get("Content-Length")
        total = int(length) if length else None
        seen = 0
        with _bar(title, total, progress) as advance:
            while chunk := response.read(_CHUNK):
                write(chunk)
                seen += len(chunk)
                advance(len(chunk))
    if total is not None and seen != total:
        raise DataError(f"{url} ended after {seen} of {total} bytes")


@contextlib.contextmanager
def _bar(title: str, total: int | None, progress: bool) -> Iterator[Advance]:
    """A progress bar on the error stream, if rich is there and someone is watching."""
    if progress:
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

            console = Console(stderr=True)
            if console.is_terminal:
                columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
                with Progress(*columns, console=console, transient=True) as bars:
                    bar = bars.add_task(title, total=total)
                    yield lambda count: bars.advance(bar, count)
                return
    yield lambda count: None
