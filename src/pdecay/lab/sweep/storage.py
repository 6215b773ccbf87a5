"""Where a sweep's study lives: a journal in its folder, or a database that many machines reach.

Optuna does the storing. What is added here is what killed processes need. Optuna's own locks on a
journal are files that stay behind a kill, to be broken by force after half a minute; and a line
that was cut off in its middle makes the whole journal unreadable once another line follows it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from pdecay.lab.sweep.locks import FileLock

JOURNAL = "study.log"

_ATTEMPTS = 8  # at the tables of a new database
_CHUNK = 1 << 16


class StorageError(Exception):
    """The study's storage cannot be used; the message says why and what to do."""


@contextmanager
def open_storage(url: str | None, folder: Path) -> Iterator[BaseStorage]:
    """The storage at a URL; without one, the journal in a sweep's folder."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it reports each study that it makes
    if url is None:
        yield open_journal(folder)
        return
    database = _open_database(with_driver(url))
    try:
        # get_storage keeps finished trials in memory, where a bare RDBStorage reads them each time
        yield optuna.storages.get_storage(database)
    finally:
        database.engine.dispose()


def with_driver(url: str) -> str:
    """The URL with the driver that our extra installs, where it names none.

    Example:
        >>> with_driver("postgresql://me@db.example.org/sweeps")
        'postgresql+psycopg://me@db.example.org/sweeps'
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise StorageError(
            f"--storage must be a database's URL, such as postgresql://user@host/name, got "
            f"{url!r}; leave it out for a journal file in the --out folder"
        )
    if scheme in ("postgresql", "postgres"):
        scheme = "postgresql+psycopg"
    return f"{scheme}://{rest}"


def open_journal(folder: Path) -> BaseStorage:
    """The journal in a sweep's folder."""
    path = folder / JOURNAL
    try:
        return JournalStorage(JournalFileBackend(str(path), lock_obj=_JournalLock(path)))
    except (ValueError, KeyError) as error:
        raise StorageError(
            f"{path} is no Optuna journal, or was altered ({error!r}): give another --out"
        ) from None


class _JournalLock(JournalFileOpenLock):
    """A lock that no kill leaves behind, and that mends the journal before it is written to.

    A line without its end was not finished by its writer and is not seen by readers: it goes.
    """

    def __init__(self, path: Path) -> None:
        self._journal = path
        self._lock = FileLock(path.with_name(f"{path.name}.lock"))

    def acquire(self) -> bool:
        self._lock.acquire()
        try:
            _drop_torn_line(self._journal)
        except BaseException:
            self._lock.release()
            raise
        return True

    def release(self) -> None:
        self._lock.release()


def _drop_torn_line(path: Path) -> None:
    with open(path, "rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        length = 1  # nearly always, the last byte ends the last line
        while end > 0:
            start = max(0, end - length)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end, length = start, _CHUNK
        if end < size:
            file.truncate(end)


def _open_database(url: str) -> RDBStorage:
    options: dict[str, Any] = {"pool_pre_ping": True}  # a connection may have been cut meanwhile
    if url.startswith("sqlite"):
        options["connect_args"] = {"timeout": 60}  # seconds to wait for one's turn
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            storage = _Database(url, engine_kwargs=options)
        except (ImportError, ValueError, sqlalchemy.exc.ArgumentError) as error:
            raise StorageError(f"{_told(url, error)}: {_cure(error)}") from None
        except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            # Launchers that make the tables at once get into each other's way, and find them made
            # a moment later. A server that does not answer says so the first time.
            if attempt == _ATTEMPTS or isinstance(error, sqlalchemy.exc.OperationalError):
                raise StorageError(f"{_told(url, error)}: {_cure(error)}") from None
            time.sleep(random.uniform(0.1, 0.5))
        else:
            if storage.engine.name == "sqlite":
                _take_turns(storage)
            return storage
    raise AssertionError("the last attempt returns or raises")


class _Database(RDBStorage):
    """A database whose connections are closed also if it cannot be used."""

    def __init__(self, url: str, engine_kwargs: dict[str, Any]) -> None:
        try:
            super().__init__(url, engine_kwargs=engine_kwargs)
        except BaseException:
            if hasattr(self, "engine"):
                self.engine.dispose()
            raise


def _take_turns(storage: RDBStorage) -> None:
    """Lock an SQLite file when a transaction begins, not when it first writes.

    Without it two workers may both read that a trial waits, and both claim it.
    """

    @sqlalchemy.event.listens_for(storage.engine, "connect")
    def _leave_transactions_to_us(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @sqlalchemy.event.listens_for(storage.engine, "begin")
    def _begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    storage.engine.dispose()  # connections from before know nothing of this


def reason(error: BaseException) -> str:
    """Why a storage failed, in one line: the driver's words under all that is wrapped around."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def _told(url: str, error: Exception) -> str:
    """An error, without the password."""
    try:
        shown = sqlalchemy.engine.make_url(url).render_as_string(hide_password=True)
    except (ValueError, sqlalchemy.exc.ArgumentError):
        shown = url.partition("://")[0] + "://..."
    return f"--storage {shown}: {reason(error)}"


def _cure(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "install its driver (PostgreSQL: pip install 'pdecay[postgres]')"
    if isinstance(error, ValueError | sqlalchemy.exc.ArgumentError):
        return "a URL looks like postgresql://user:password@host:5432/name"
    return "is the server up, and does the database exist?"
