"""A worker: a process that claims cells and runs them, one after another, until none is left.

It takes no orders but one: whatever comes in on its line, also the line's end when the launcher
has died, means to stop with a checkpoint.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from optuna.exceptions import StorageInternalError

from pdecay.lab.sweep.locks import FileLock, Presence
from pdecay.lab.sweep.plan import Plan
from pdecay.lab.sweep.storage import open_storage
from pdecay.lab.sweep.study import Claim, LostError, SweepStudy
from pdecay.lab.sweep.watch import PULSES
from pdecay.lab.train.training import Settings, StoppedError, train

_IDLE = 0.5  # seconds between two looks for something to do
_NEWS = 0.2  # seconds between two reports of steps
_AWAY = 2.0  # seconds between two calls to a database that does not answer

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What all workers of a launcher are told.

    Args:
        plan: what is to be run.
        storage: the storage's URL; None for the journal in `out`.
        study: the study's name.
        out: the sweep's folder.
        threads: of torch, in each worker.
        device: where to train; None for the CPU.
        checkpoint_every: seconds.
        grace: seconds without a sign of life after which other machines hold a worker for dead.
    """

    plan: Plan
    storage: str | None
    study: str
    out: Path
    home: str
    threads: int
    device: str | None
    checkpoint_every: float
    grace: float

    @property
    def workers(self) -> Path:
        """Where the workers' locks are."""
        return self.out / "workers"

    def run_folder(self, run: str) -> Path:
        """Where the run of an id is."""
        return self.out / "runs" / run


def work(job: Job, name: str, line: Connection) -> None:
    """The life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which tells us
    torch.set_num_threads(job.threads)
    try:
        _presence = Presence(job.workers, name)
        with open_storage(job.storage, job.out) as storage:
            study = SweepStudy(storage, job.study, job.plan, job.home)
            _Worker(job, name, line, study).run()
    except Exception:
        _send(line, ("crash", traceback.format_exc()))
        raise SystemExit(1) from None


class _Worker:
    """One worker at its work; it is the progress of its runs, too."""

    def __init__(self, job: Job, name: str, line: Connection, study: SweepStudy) -> None:
        self._job, self._name, self._line, self._study = job, name, line, study
        self._last_news = 0.0

    def run(self) -> None:
        while not self._line.poll():
            claim = self._patiently(lambda: self._study.claim(self._name))
            if claim is not None:
                self._attempt(claim)
            elif self._patiently(self._all_finished):
                return
            else:  # what others run may come back to us
                self._tell("idle")
                self._line.poll(_IDLE)

    def _attempt(self, claim: Claim) -> None:
        study = self._study
        try:
            with self._pulse(claim) as lost:
                settings = self._patiently(lambda: study.settings(claim))
                record = self._train(settings, lost)
                self._patiently(lambda: study.complete(claim, record))
        except StoppedError:
            study.release(claim)
        except LostError:
            pass  # whoever has the claim now finds our checkpoint, or does it all again
        except StorageInternalError:
            raise
        except Exception:
            error = traceback.format_exc()
            self._patiently(lambda: study.fail(claim, error))
            self._tell("error", claim.key, error)
        else:
            self._tell("done", claim.key, record)

    def _all_finished(self) -> bool:
        return all(cell.finished for cell in self._study.cells().values())

    def _patiently(self, do: Callable[[], T]) -> T:
        """Ask the study again while it does not answer. No harm is in what it did all the same."""
        while True:
            try:
                return do()
            except StorageInternalError:
                if self._line.poll(_AWAY):
                    raise

    def _train(self, settings: Settings, lost: threading.Event) -> dict[str, Any]:
        folder = self._job.run_folder(settings.id)
        folder.mkdir(parents=True, exist_ok=True)
        # Two trials of a search may have drawn the same settings: the second waits for the record.
        lock = FileLock(folder / ".sweep")
        while not lock.acquire(wait=False):
            if self._line.poll(_IDLE):
                raise StoppedError
        try:
            return train(
                settings,
                folder,
                device=self._job.device,
                checkpoint_every=self._job.checkpoint_every,
                progress=self,
                stop=lambda: self._line.poll() or lost.is_set(),
            )
        finally:
            lock.release()

    @contextmanager
    def _pulse(self, claim: Claim) -> Iterator[threading.Event]:
        """Sign the claim now and then; the event is set if it was taken from us all the same."""
        lost, over = threading.Event(), threading.Event()

        def beat() -> None:
            count = 0
            while not over.wait(self._job.grace / PULSES):
                count += 1
                try:
                    self._study.pulse(claim, count)
                except LostError:
                    lost.set()
                    return
                except StorageInternalError:
                    continue  # a database that is away for a moment

        # Whoever shares a journal shares the folder of locks, too.
        thread = threading.Thread(target=beat, daemon=True)
        if self._job.storage is not None:
            thread.start()
        try:
            yield lost
        finally:
            over.set()
            if thread.ident is not None:
                thread.join()

    # The run's progress

    def begin(self, settings: Settings, step: int) -> None:
        self._tell("begin", settings.to_dict(), step)

    def step(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if now - self._last_news >= _NEWS:
            self._last_news = now
            self._tell("step", step)

    def point(self, point: Mapping[str, Any]) -> None:
        pass

    def _tell(self, *news: Any) -> None:
        _send(self._line, news)


def _send(line: Connection, news: tuple[Any, ...]) -> None:
    with suppress(OSError):  # the launcher is gone, as the next look at the line will show
        line.send(news)
