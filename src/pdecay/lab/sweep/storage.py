"""Study storage: an Optuna journal file in the sweep's folder, or a database for many machines.

Optuna's journal does not survive a SIGKILL: its lock file stays behind, and a half-written line
makes the whole file unreadable once another line follows. `_JournalLock` solves both.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import optuna
import sqlalchemy
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from pdecay._utils.errors import root_cause
from pdecay._utils.files import lock
from pdecay.lab.sweep.plan import SweepError

JOURNAL = "study.log"

_ATTEMPTS = 8  # at the tables of a new database


class UnavailableError(SweepError):
    """A database does not answer, perhaps only for now."""


@contextmanager
def open_storage(url: str | None, folder: Path, grace: float = 90.0) -> Iterator[BaseStorage]:
    """Open the database at a URL; without a URL, the journal in a sweep's folder.

    Args:
        url: the database, such as ``postgresql://user@host/name``.
        folder: the sweep's folder.
        grace: seconds without a heartbeat after which a database reports a trial as stale.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # failed trials are logged as warnings
    if url is None:
        yield open_journal(folder)
        return
    database = _open_database(with_driver(url), grace)
    try:
        # get_storage adds a cache of finished trials.
        yield optuna.storages.get_storage(database)
    finally:
        database.engine.dispose()


def with_driver(url: str) -> str:
    """Add the driver of the ``postgres`` extra to a URL that names none.

    Example:
        >>> with_driver("postgresql://me@db.example.org/sweeps")
        'postgresql+psycopg://me@db.example.org/sweeps'
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise SweepError(
            f"--storage must be a database URL, such as postgresql://user@host/name, got {url!r}; "
            "leave it out for a journal file in the --out folder"
        )
    if scheme in ("postgresql", "postgres"):
        scheme = "postgresql+psycopg"
    return f"{scheme}://{rest}"


def open_journal(folder: Path) -> BaseStorage:
    """Open the journal in a sweep's folder."""
    path = folder / JOURNAL
    try:
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=_JournalLock(path)))
        _check_last_line(path)
        return storage
    except (ValueError, LookupError, TypeError, AssertionError) as error:  # any line may be wrong
        raise SweepError(
            f"{path} is not an Optuna journal, or was altered ({error!r}): give another --out"
        ) from None


def _check_last_line(path: Path) -> None:
    """Raise ValueError if the last complete line is damaged; Optuna reads it only later."""
    content = path.read_bytes()
    if content.endswith(b"\n"):
        json.loads(content[content.rfind(b"\n", 0, -1) + 1 :])


class _JournalLock(JournalFileOpenLock):
    """A lock that ends with its process, and that removes a half-written last line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = ExitStack()

    def acquire(self) -> bool:
        self._held.enter_context(lock(self._path.parent, f"{self._path.name}.lock", wait=True))
        with open(self._path, "rb+") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) and file.read() != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        self._held.close()


class _Database(RDBStorage):
    """A database that closes its connections on errors and tolerates missed heartbeats."""

    def __init__(self, url: str, grace: float) -> None:
        seconds = max(2, math.ceil(grace))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            try:
                super().__init__(
                    url,
                    engine_kwargs={
                        "pool_pre_ping": True,  # connections may have been cut
                        "connect_args": _connect_args(url, seconds),
                    },
                    heartbeat_interval=max(1, seconds // 6),
                    grace_period=seconds,
                )
            except BaseException:
                if hasattr(self, "engine"):
                    self.engine.dispose()
                raise

    def record_heartbeat(self, trial_id: int) -> None:
        # An error would end Optuna's heartbeat thread; the next heartbeat may succeed.
        with suppress(StorageInternalError):
            super().record_heartbeat(trial_id)


def _connect_args(url: str, seconds: int) -> dict[str, str]:
    """Return driver options that end the transactions of suspended processes.

    A process that is suspended within a transaction keeps its row locks. Without a limit, they
    would block all other hosts until it continues.
    """
    if not url.startswith("postgresql"):
        return {}
    return {"options": f"-c idle_in_transaction_session_timeout={1000 * seconds}"}


def _open_database(url: str, grace: float) -> RDBStorage:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _Database(url, grace)
        except (ImportError, ValueError, sqlalchemy.exc.ArgumentError) as error:
            raise SweepError(_explain(url, error)) from None
        except (sqlalchemy.exc.SQLAlchemyError, StorageInternalError) as error:
            # Launchers that create the tables at the same time disturb each other: retry. A
            # server that does not answer, not even to a statement, is reported at once.
            refused = isinstance(error, sqlalchemy.exc.OperationalError) and not error.statement
            if attempt == _ATTEMPTS or refused:
                raise UnavailableError(_explain(url, error)) from None
            time.sleep(random.uniform(0.1, 0.5))
    raise AssertionError("the last attempt returns or raises")


def _explain(url: str, error: Exception) -> str:
    """Return the reason and the remedy in one line, without the password in the URL."""
    try:
        shown = sqlalchemy.engine.make_url(url).render_as_string(hide_password=True)
    except (ValueError, sqlalchemy.exc.ArgumentError):
        shown = url.partition("://")[0] + "://..."
    remedy = "check that the server is up and that the database exists"
    if isinstance(error, ImportError):
        remedy = "install its driver (PostgreSQL: pip install 'pdecay[postgres]')"
    elif isinstance(error, ValueError | sqlalchemy.exc.ArgumentError):
        remedy = "a URL looks like postgresql://user:password@host:5432/name"
    return f"--storage {shown}: {root_cause(error)}: {remedy}"
