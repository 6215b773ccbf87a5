"""Finding and downloading the data sets.

Files are looked up under ``PDECAY_DATA``, then in the cache (``~/.cache/pdecay/data``, or under
``XDG_CACHE_HOME``). A file in neither place is downloaded into the cache by pooch, which checks its
digest before the file gets its final name. If the download fails, a `DataError` says which file to
put where.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pdecay._utils.errors import UserError

_TIMEOUT = 30  # seconds without a byte

Labelled = tuple[Tensor, Tensor]


class DataError(UserError):
    """Missing, truncated or altered data. The message says how to repair it."""


@dataclass(frozen=True)
class Images:
    """The three splits of an image data set: pixels (N, channels, height, width), labels (N,).

    Settings are chosen on the validation split. The test split measures the final model only.
    """

    train: Labelled
    validation: Labelled
    test: Labelled


def hold_out(train: Labelled, test: Labelled, count: int) -> Images:
    """Move the last `count` training images to the validation split."""
    pixels, labels = train
    return Images((pixels[:-count], labels[:-count]), (pixels[-count:], labels[-count:]), test)


@dataclass(frozen=True)
class Remote:
    """A downloadable file: its name, its mirrors and its digest as ``"sha256:..."``."""

    name: str
    urls: tuple[str, ...]
    digest: str


def cache_folder() -> Path:
    """Return the folder for downloads."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):  # as in a container that runs as an unknown user
        raise DataError(
            "This user has no home folder for downloads: set PDECAY_DATA to the folder of the "
            "data, or XDG_CACHE_HOME to a folder for downloads."
        )
    return Path(base) / "pdecay" / "data"


def folders() -> list[Path]:
    """Return the folders to search, in order."""
    named = os.environ.get("PDECAY_DATA")
    if not named:
        return [cache_folder()]
    folder = Path(os.path.expanduser(named))
    if not folder.is_dir():
        raise DataError(
            f"PDECAY_DATA is {named!r}, which is not a folder. Create it and put the data there, "
            f"or unset PDECAY_DATA to use {cache_folder()}."
        )
    try:
        return [folder, cache_folder()]
    except DataError:  # no home
        return [folder]


def find(*names: str) -> Path | None:
    """Return the first existing path among the relative paths `names`, folder by folder."""
    candidates = (folder / name for folder in folders() for name in names)
    return next((path for path in candidates if path.exists()), None)


def missing(what: str, put: str, reason: str) -> DataError:
    """Return the error for data that were not found: `put` names the files to provide."""
    place = os.environ.get("PDECAY_DATA") or str(cache_folder())
    searched = ", ".join(str(folder) for folder in folders())
    return DataError(
        f"{what} was not found in {searched}. {reason}. Put {put} into {place}, or set PDECAY_DATA "
        "to the folder that has it."
    )


def find_or_fetch(
    names: tuple[str, ...],
    remote: Remote,
    *,
    what: str,
    put: str,
    subfolder: str = ".",
) -> Path:
    """Return the path of a file, downloaded into the cache if necessary.

    Args:
        names: relative paths to look for.
        remote: the file to download if none of them exists.
        what, put: the name of the data and the files to provide, for the error message.
        subfolder: the folder inside the cache.
    """
    path = find(*names)
    if path is not None:
        return path
    try:
        return fetch(remote, cache_folder() / subfolder)
    except DataError as error:
        raise missing(what, put, str(error)) from error


def fetch(remote: Remote, folder: Path) -> Path:
    """Download a file into a folder, check its digest and return its path.

    Each mirror is tried twice. A partial or altered download never gets the file's name.
    """
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=_TIMEOUT)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot write to {folder} ({error}). Set PDECAY_DATA to a folder that has "
            f"{remote.name}, or XDG_CACHE_HOME to a writable folder."
        ) from error
    failures = []
    for url in remote.urls:
        source = pooch.create(
            path=folder,
            base_url="",
            registry={remote.name: remote.digest},
            urls={remote.name: url},
            retry_if_failed=1,
        )
        try:
            path = Path(source.fetch(remote.name, downloader=downloader))
        except (OSError, ValueError) as error:  # requests' errors are OSErrors
            failures.append(f"{url}: {error}")
        else:
            path.chmod(0o644)  # the temporary file was readable by its owner only
            return path
    raise DataError(f"could not download {remote.name} ({'; '.join(failures)})")


def check_digest(path: Path, digest: str) -> None:
    """Raise a `DataError` unless the file has the digest, given as ``"sha256:..."``."""
    algorithm, _, expected = digest.partition(":")
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, algorithm).hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}. Check its type and permissions.") from error
    if found != expected:
        raise altered(path, f"its {algorithm} is {found}, not {expected}")


def altered(path: Path | str, how: str) -> DataError:
    """Return the error for a file with unexpected content."""
    return DataError(
        f"{path} is not the expected file: {how}. It was truncated or altered: delete it so that "
        "it is downloaded again, or replace it by a good copy."
    )
