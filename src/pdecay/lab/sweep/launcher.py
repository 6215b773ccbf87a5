"""The launcher: runs a sweep on this machine by starting workers and replacing those that die.

Several launchers may share one study in a database. Each has its own folder and writes all records
of the study into it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from optuna.exceptions import StorageInternalError
from rich.console import Console

from pdecay._utils.errors import root_cause
from pdecay._utils.files import LockedError, lock
from pdecay._utils.signals import stop_requests
from pdecay.lab.sweep.monitor import Monitor
from pdecay.lab.sweep.plan import Plan
from pdecay.lab.sweep.storage import open_storage
from pdecay.lab.sweep.study import StudyError, SweepStudy
from pdecay.lab.sweep.view import View
from pdecay.lab.sweep.worker import Job, work
from pdecay.lab.tasks import get_task
from pdecay.lab.train.records import Record

ERRORS = "errors.txt"
STUDY = "sweep"  # the study's name in a journal

_FALSE_STARTS = 10  # workers in a row that die before they take a cell
_PATIENCE = 5.0  # seconds for a worker without a run to exit before it is killed


class SweepError(Exception):
    """A sweep cannot continue; the message says why."""


class SweepStoppedError(Exception):
    """A sweep was interrupted and can be resumed."""


@dataclass(frozen=True)
class Outcome:
    """The result of a sweep.

    Args:
        records: the records of all runs, by id.
        failed: the last traceback of each cell that was given up, by the cell's label.
    """

    records: list[Record]
    failed: dict[str, str]


def sweep(
    plan: Plan,
    out: Path,
    *,
    storage: str | None = None,
    study: str | None = None,
    workers: int = 1,
    threads: int | None = None,
    device: str | None = None,
    checkpoint_every: float = 30.0,
    grace: float = 90.0,
    resume: bool = False,
    retry_failed: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Run all cells of a plan.

    Args:
        plan: the cells.
        out: the folder for the runs, the journal and ``records.jsonl``.
        storage: the URL of a database that several machines share; None for a journal in `out`.
        study: the study's name in the database; None for the folder's name.
        workers: the number of worker processes.
        threads: torch threads of each worker; None divides the cores among the workers.
        device: the device to train on; None for the CPU.
        checkpoint_every: seconds between two checkpoints of a run.
        grace: seconds without a heartbeat after which a run on another machine is started again.
        resume: continue or join an existing study.
        retry_failed: with `resume`, retry cells that were given up.
        console: shows the progress.

    Raises:
        DataError, StorageError, StudyError: the data or the study is not available.
        SweepError: the workers cannot run.
        SweepStoppedError: interrupted; the workers have written checkpoints.
    """
    _ = get_task(plan.task, plan.scale).stream  # report missing data before anything else
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    job = Job(
        plan=plan,
        storage=storage,
        study=study or (STUDY if storage is None else out.name),
        out=out,
        home=f"{socket.gethostname()}:{out}",
        threads=threads or max(1, torch.get_num_threads() // workers),
        device=device,
        checkpoint_every=checkpoint_every,
        grace=grace,
    )
    try:
        with open_storage(storage, out, grace) as opened, lock(out):
            queue = SweepStudy.open(opened, job.study, plan, resume=resume)
            if retry_failed:
                queue.top_up(retry_failed=True)
            return _Launcher(job, queue, workers, console or Console(quiet=True)).run()
    except LockedError as error:
        raise StudyError(str(error)) from None
    except StudyError as error:
        raise StudyError(f"{out}: {error}" if storage is None else str(error)) from None
    except StorageInternalError as error:
        raise SweepError(f"the study does not answer: {root_cause(error)}") from None


class _Worker:
    """A worker process, the connection to it, and its state as reported by its messages."""

    def __init__(self, job: Job, place: int) -> None:
        context = multiprocessing.get_context("forkserver")
        # The server only imports: workers forked from it start fast and inherit no threads.
        # All torch optimizers import torch._dynamo.
        context.set_forkserver_preload([work.__module__, "torch._dynamo"])
        self.place = place
        self.started = False  # it has taken a cell
        self.busy = False  # it has a run that needs a checkpoint before it stops
        self.changed = 0.0
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(job, theirs))
        self.process.start()
        theirs.close()  # otherwise the connection would not end with the worker

    def messages(self) -> list[tuple[Any, ...]]:
        """Return all messages that have arrived; a message that a kill cut short is lost."""
        found = []
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                found.append(self.connection.recv())
        return found

    def exit_reason(self) -> str:
        code = self.process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class _Launcher:
    """A running launcher."""

    def __init__(self, job: Job, study: SweepStudy, workers: int, console: Console) -> None:
        self._job = job
        self._view = View(console, workers, len(job.plan.keys))
        self._monitor = Monitor(job, study, self._view.say)
        self._number = workers
        self._workers: list[_Worker] = []
        self._trained: set[str] = set()  # cells whose results the study may not have yet
        self._false_starts = 0

    def run(self) -> Outcome:
        monitor = self._monitor
        monitor.look()
        left = len(monitor.cells) - len(monitor.finished)
        monitor.start()
        notice = "stopping: the workers write checkpoints; once more to stop at once"
        with self._view, stop_requests(lambda: self._view.say(notice)) as stopped:
            try:
                for place in range(min(self._number, left)):
                    self._start(place)
                while monitor.is_alive() and not stopped():
                    self._listen()
                    for worker in self._ended():
                        self._replace(worker)
                    self._view.show_finished(len(monitor.finished | self._trained))
                self._stop_workers()
                monitor.stop()
            finally:
                for worker in self._workers:
                    worker.process.kill()
                monitor.stop(timeout=0)
        if monitor.error is not None:
            raise monitor.error
        if len(monitor.finished) < len(monitor.cells):
            raise SweepStoppedError
        label = self._job.plan.label
        failed = {label(cell.key): cell.errors[-1] for cell in monitor.cells if cell.failed}
        self._write_errors(failed)
        return Outcome(monitor.records, failed)

    def _start(self, place: int) -> None:
        worker = _Worker(self._job, place)
        self._workers.append(worker)
        self._monitor.workers.add(worker.process.pid or 0)

    def _ended(self) -> list[_Worker]:
        """Remove the workers whose processes have ended and return them."""
        ended = [worker for worker in self._workers if not worker.process.is_alive()]
        for worker in ended:
            self._handle_messages(worker)
            self._workers.remove(worker)
            worker.connection.close()
            pid = worker.process.pid or 0
            self._monitor.exits[pid] = worker.exit_reason()
            self._monitor.workers.discard(pid)
        return ended

    def _replace(self, worker: _Worker) -> None:
        self._false_starts = 0 if worker.started else self._false_starts + 1
        if self._false_starts >= _FALSE_STARTS:
            raise SweepError(
                f"{_FALSE_STARTS} workers in a row died at their start ({worker.exit_reason()}): "
                f"is there enough memory for {self._number} of them?"
            )
        self._start(worker.place)

    def _stop_workers(self) -> None:
        """Wait for the checkpoints; kill a worker without a run that a database blocks."""
        began = time.monotonic()
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.send("stop")
        while self._workers:
            self._listen()
            self._ended()
            for worker in self._workers:
                if not worker.busy and time.monotonic() - max(began, worker.changed) > _PATIENCE:
                    worker.process.kill()

    def _listen(self) -> None:
        connections: list[Any] = [worker.connection for worker in self._workers]
        wait(connections + [worker.process.sentinel for worker in self._workers], timeout=0.5)
        for worker in self._workers:
            self._handle_messages(worker)

    def _handle_messages(self, worker: _Worker) -> None:
        view, label = self._view, self._job.plan.label
        for message in worker.messages():
            worker.started = True
            match message:
                case ("begin", settings, step):
                    view.begin(worker.place, settings, step)
                case ("step", step):
                    view.show_step(worker.place, step)
                case ("trained", key, record):
                    self._trained.add(key)
                    view.trained(record, len(self._monitor.finished | self._trained))
                case ("error", key, error):
                    view.say(f"{label(key)} raised {_last_line(error)}")
                case ("idle",):
                    view.idle(worker.place)
                case ("crash", error):
                    raise SweepError(f"a worker cannot run: {_last_line(error)}")
            if message[0] not in ("begin", "step"):
                worker.busy, worker.changed = message[0] == "busy", time.monotonic()

    def _write_errors(self, failed: dict[str, str]) -> None:
        path = self._job.out / ERRORS
        if failed:
            texts = (f"{name}\n{error.rstrip()}\n" for name, error in failed.items())
            path.write_text("\n".join(texts), encoding="utf-8")
        else:
            path.unlink(missing_ok=True)


def _last_line(error: str) -> str:
    return error.strip().rpartition("\n")[2]
