"""Workers: processes that take trials from the queue with ``study.optimize`` and train them.

A worker writes its results to the study. It stops with a checkpoint as soon as its connection to
the launcher ends, so that the workers of a killed launcher stop too.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar, cast

import torch
from optuna.exceptions import OptunaError, StorageInternalError
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.trial import Trial, TrialState

from pdecay._utils.files import LockedError
from pdecay.lab.sweep.plan import Plan
from pdecay.lab.sweep.storage import UnavailableError, open_storage
from pdecay.lab.sweep.study import SweepStudy
from pdecay.lab.train.records import Record
from pdecay.lab.train.training import RunError, Settings, StoppedError, train

STARTED = "started"  # sent by a worker that has taken a cell; other messages are tracebacks

_IDLE = 0.5  # seconds between two checks of an empty queue or a locked folder
_RETRY = 2.0  # seconds between two calls to a database that does not answer
_PATIENCE = 5.0  # seconds for a stopping worker without a run, before it exits without its storage

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """The launcher's settings for all of its workers."""

    plan: Plan
    storage: str | None
    study: str
    out: Path
    threads: int
    device: str | None
    checkpoint_every: float
    grace: float

    @property
    def home(self) -> str:
        """The name of the launcher's folder in a database."""
        return f"{socket.gethostname()}:{self.out}"

    def run_folder(self, run: str) -> Path:
        """Return the folder of a run."""
        return self.out / "runs" / run


class NotCurrentError(Exception):
    """A trial from the queue need not be run."""


class BusyError(Exception):
    """Another process of this machine holds the folder of a run for too long."""


def work(job: Job, connection: Connection) -> None:
    """Run cells until the launcher asks to stop: the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    torch.set_num_threads(job.threads)
    worker = _Worker(job, connection)
    threading.Thread(target=worker.wait_for_stop, daemon=True).start()
    try:
        worker.run()
    except Exception:
        with suppress(OSError):  # the launcher died
            connection.send(traceback.format_exc())
        raise SystemExit(1) from None


class _Worker:
    def __init__(self, job: Job, connection: Connection) -> None:
        self._job, self._connection = job, connection
        self._trial: Trial | None = None
        self._stop = threading.Event()
        self._started = False
        self._training = False  # it has a run that needs a checkpoint before it stops

    def wait_for_stop(self) -> None:
        """Ask the main thread to stop when the connection ends; exit if a database blocks it."""
        self._connection.poll(None)
        self._stop.set()
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            time.sleep(0.2)
            if self._training:
                deadline = time.monotonic() + _PATIENCE
        os._exit(1)

    def run(self) -> None:
        job, opened = self._job, ExitStack()

        def open_study() -> SweepStudy:
            storage = opened.enter_context(open_storage(job.storage, job.out, job.grace))
            return SweepStudy(storage, job.study, job.plan)

        with suppress(StoppedError), opened:
            self._study = study = self._retry(open_study)  # the database may be away just now
            while not self._stop.is_set():
                if self._retry(study.has_waiting):
                    self._run_trial()
                else:
                    self._stop.wait(_IDLE)

    def _run_trial(self) -> None:
        self._trial = None
        try:  # the objective sets self._trial
            self._study.optuna.optimize(self._objective, n_trials=1, catch=(Exception,))
        except Exception as error:
            # Optuna could not store the result: the trial was failed meanwhile, because this
            # worker seemed dead, or the database is away. In both cases another trial follows.
            trial = cast(Trial | None, self._trial)
            if trial is None and not isinstance(error, StorageInternalError):
                raise
            if trial is not None:
                self._retry(lambda: self._study.end(trial, TrialState.FAIL))

    def _objective(self, trial: Trial) -> list[float]:
        self._trial = trial
        if not self._study.is_current(trial):
            raise NotCurrentError
        try:
            settings = self._job.plan.settings(
                trial.user_attrs["cell"], lambda sampler: self._study.bind(trial, sampler)
            )
            mark = {"home": self._job.home, "pid": os.getpid(), "run": settings.id}
            # Optuna never reports a trial without a heartbeat as stale. Record the first one before
            # the mark, which other hosts take as the sign that heartbeats follow.
            if isinstance(self._study.storage, BaseHeartbeat):
                self._study.storage.record_heartbeat(trial._trial_id)
            trial.set_user_attr("worker", mark)
            self._send_started()
            record = self._train(settings)
        except (StoppedError, BusyError, OptunaError):
            raise
        except Exception:
            text = traceback.format_exc()
            self._retry(lambda: trial.set_user_attr("error", text))
            raise
        self._retry(lambda: trial.set_user_attr("record", record))
        return self._job.plan.values(record)

    def _send_started(self) -> None:
        if not self._started:  # once: the launcher reads messages only when the worker has ended
            self._started = True
            with suppress(OSError):  # the launcher died
                self._connection.send(STARTED)

    def _train(self, settings: Settings) -> Record:
        self._training = True
        deadline = time.monotonic() + self._job.grace
        try:
            while True:
                try:
                    return train(
                        settings,
                        self._job.run_folder(settings.id),
                        device=self._job.device,
                        checkpoint_every=self._job.checkpoint_every,
                        stop=self._stop.is_set,
                    )
                except RunError as error:
                    # The worker of a killed launcher, or a cell that drew the same settings.
                    if not isinstance(error.__cause__, LockedError):
                        raise
                    if self._stop.wait(_IDLE):
                        raise StoppedError from None
                    # The other process may be suspended. Give the trial back: another machine
                    # can then run the cell in a folder of its own.
                    if time.monotonic() > deadline:
                        raise BusyError from error
        finally:
            self._training = False

    def _retry(self, call: Callable[[], T]) -> T:
        """Call until the database answers; stop if the launcher asks to."""
        while True:
            try:
                return call()
            except (StorageInternalError, UnavailableError):
                if self._stop.wait(_RETRY):
                    raise StoppedError from None
