"""Workers: processes that take trials from the queue with ``study.optimize`` and train them.

A worker stops with a checkpoint as soon as anything arrives on its connection. This includes the
end of the connection, so that the workers of a killed launcher stop too.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from optuna.exceptions import OptunaError, StorageInternalError
from optuna.trial import Trial, TrialState

from pdecay._utils.files import LockedError
from pdecay.lab.sweep.plan import Plan
from pdecay.lab.sweep.storage import open_storage
from pdecay.lab.sweep.study import SweepStudy
from pdecay.lab.train.records import Record
from pdecay.lab.train.training import RunError, Settings, StoppedError, train

_IDLE = 0.5  # seconds between two looks at an empty queue or a locked folder
_RETRY = 2.0  # seconds between two calls to a database that does not answer
_STEPS = 0.2  # seconds between two messages about a run's steps

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """The launcher's settings for all of its workers; `home` names its folder in a database."""

    plan: Plan
    storage: str | None
    study: str
    out: Path
    home: str
    threads: int
    device: str | None
    checkpoint_every: float
    grace: float

    def run_folder(self, run: str) -> Path:
        """Return the folder of a run."""
        return self.out / "runs" / run


class NotCurrentError(Exception):
    """A trial from the queue need not be run."""


def work(job: Job, connection: Connection) -> None:
    """Run cells until the launcher asks to stop: the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    torch.set_num_threads(job.threads)
    try:
        with open_storage(job.storage, job.out, job.grace) as storage:
            _Worker(job, connection, SweepStudy(storage, job.study, job.plan)).run()
    except Exception:
        with suppress(OSError):
            connection.send(("crash", traceback.format_exc()))
        raise SystemExit(1) from None


class _Worker:
    """A worker; it also reports the progress of its current run."""

    def __init__(self, job: Job, connection: Connection, study: SweepStudy) -> None:
        self._job, self._connection, self._study = job, connection, study
        self._trial: Trial | None = None
        self._last_message = 0.0

    def run(self) -> None:
        with suppress(StoppedError):
            while not self._connection.poll():
                if self._retry(self._study.has_waiting):
                    self._run_trial()
                else:
                    self._send("idle")
                    self._connection.poll(_IDLE)

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
        key = trial.user_attrs["cell"]
        try:
            settings = self._job.plan.settings(
                key, lambda sampler: self._study.bind(trial, sampler)
            )
            mark = {"home": self._job.home, "pid": os.getpid(), "run": settings.id}
            trial.set_user_attr("worker", mark)
            self._send("busy")
            record = self._train(settings)
        except StoppedError:
            self._send("stopped")
            raise
        except Exception as error:
            if not isinstance(error, OptunaError):  # the run's own error, not the storage's
                text = traceback.format_exc()
                self._send("error", key, text)
                self._retry(lambda: trial.set_user_attr("error", text))
            raise
        self._send("trained", key, record)
        self._retry(lambda: trial.set_user_attr("record", record))
        return self._job.plan.values(record)

    def _train(self, settings: Settings) -> Record:
        while True:
            try:
                return train(
                    settings,
                    self._job.run_folder(settings.id),
                    device=self._job.device,
                    checkpoint_every=self._job.checkpoint_every,
                    progress=self,
                    stop=self._connection.poll,
                )
            except RunError as error:
                # The worker of a killed launcher, or a cell that drew the same settings.
                if not isinstance(error.__cause__, LockedError):
                    raise
                if self._connection.poll(_IDLE):
                    raise StoppedError from None

    def _retry(self, call: Callable[[], T]) -> T:
        """Call until the database answers; stop if the launcher asks to."""
        while True:
            try:
                return call()
            except StorageInternalError:
                if self._connection.poll(_RETRY):
                    raise StoppedError from None

    def begin(self, settings: Settings, step: int) -> None:
        self._send("begin", settings.to_dict(), step)

    def step(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if now - self._last_message >= _STEPS:
            self._last_message = now
            self._send("step", step)

    def point(self, point: Mapping[str, Any]) -> None:
        pass

    def _send(self, *message: Any) -> None:
        with suppress(OSError):  # the launcher died; the next poll shows it
            self._connection.send(message)
