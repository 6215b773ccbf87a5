"""Runs a sweep on this machine: starts workers, replaces those that die, keeps the records whole.

Several launchers may serve one study, on one machine or on many; each writes all records that the
study has into its own folder.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

from optuna.exceptions import StorageInternalError
from rich.console import Console

from pdecay.lab.sweep.locks import is_dead
from pdecay.lab.sweep.plan import Plan
from pdecay.lab.sweep.storage import open_storage, reason
from pdecay.lab.sweep.study import Cell, StudyError, SweepStudy
from pdecay.lab.sweep.view import View
from pdecay.lab.sweep.watch import Watch
from pdecay.lab.sweep.worker import Job, work
from pdecay.lab.tasks import task
from pdecay.lab.train import records
from pdecay.lab.train.records import Record
from pdecay.lab.train.training import CHECKPOINT

RECORDS, ERRORS = "records.jsonl", "errors.txt"
STUDY = "sweep"  # the name in a journal, whatever its folder is called next year

_LOOK = 1.0  # seconds between two looks at what others have done
_DEATHS = 10  # of workers at one cell, without a new checkpoint between them, before it is given up
_FALSE_STARTS = 10  # of workers in a row that die before they have a cell


class SweepError(Exception):
    """A sweep cannot go on; the message says why."""


class SweepStoppedError(Exception):
    """A sweep was asked to stop, and can be resumed."""


@dataclass(frozen=True)
class Outcome:
    """How a sweep has ended.

    Args:
        records: of all runs, by id.
        failed: the names of the cells that were given up, with the last error's traceback.
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
        out: gets the runs' folders, the journal and ``records.jsonl``.
        storage: the URL of a database for many machines; None for a journal in `out`.
        study: the study's name there; None for the folder's.
        workers: how many processes run cells here.
        threads: of torch, in each; None to share the cores out among the workers.
        device: where to train; None for the CPU.
        checkpoint_every: seconds.
        grace: seconds without a sign of life after which a worker on another machine is held for
            dead, and its run begun again elsewhere.
        resume: go on with a study that is there, or join others at it.
        retry_failed: with `resume`, give cells that were given up another try.
        console: shows how it goes.

    Raises:
        DataError, StorageError, StudyError: the data or the study cannot be had.
        SweepError: the workers cannot work.
        SweepStoppedError: interrupted; all workers have written checkpoints.
    """
    _ = task(plan.task, plan.scale).stream  # data that are missing are told before all else
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    job = Job(
        plan=plan,
        storage=storage,
        study=study or (STUDY if storage is None else out.name),
        out=out,
        home=f"{socket.gethostname()}:{out}",
        threads=threads or max(1, _cores() // workers),
        device=device,
        checkpoint_every=checkpoint_every,
        grace=grace,
    )
    with open_storage(storage, out) as place:
        try:
            opened = SweepStudy.open(place, job.study, plan, job.home, resume=resume)
        except StudyError as error:
            raise StudyError(f"{out}: {error}" if storage is None else str(error)) from None
        try:
            if retry_failed:
                opened.retry_failed()
            return _Launcher(job, opened, console or Console(quiet=True)).run(workers)
        except StorageInternalError as error:
            raise SweepError(f"no answer from the study: {reason(error)}") from None


class _Worker:
    """A worker as its launcher sees it: a process, a line to it, and the run that it is at."""

    def __init__(self, job: Job, place: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_imports(job.plan.task))
        self.name = uuid.uuid4().hex
        self.place = place
        self.run: str | None = None
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(job, self.name, theirs))
        self.process.start()
        theirs.close()  # a second open end here would keep the line alive when the worker is not

    def news(self) -> Iterator[tuple[Any, ...]]:
        """What it has said since. A word that its death cut short is lost."""
        with contextlib.suppress(EOFError, OSError):
            while self.line.poll():
                yield self.line.recv()

    def stop(self) -> None:
        """Ask it to stop with a checkpoint."""
        with contextlib.suppress(OSError):
            self.line.send("stop")

    def how_it_died(self) -> str:
        code = self.process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class _Launcher:
    """One launcher at work."""

    def __init__(self, job: Job, study: SweepStudy, console: Console) -> None:
        self._job, self._study, self._console = job, study, console
        self._watch = Watch(job.workers, job.grace)
        self._workers: list[_Worker] = []
        self._finished: set[str] = set()  # the keys of cells that are over, here and elsewhere
        self._looked = 0.0
        self._written: list[str] = []
        self._deaths: Counter[tuple[str, int]] = Counter()
        self._false_starts = 0

    def run(self, workers: int) -> Outcome:
        cells = self._forget_the_dead()
        left = sum(not cell.finished for cell in cells)
        view = View(self._console, min(workers, left), len(cells), len(cells) - left)
        with view, _termination_interrupts():
            try:
                self._workers = [_Worker(self._job, place) for place in range(min(workers, left))]
                self._serve(view)
            except KeyboardInterrupt:
                self._stop(view)
                raise SweepStoppedError from None
            finally:
                for worker in self._workers:
                    worker.process.kill()
        failed = {
            self._job.plan.name(cell.key): cell.errors[-1]
            for cell in self._refresh()
            if cell.failed
        }
        self._write_errors(failed)
        return Outcome(self._study.records(), failed)

    def _serve(self, view: View) -> None:
        """Listen to the workers until none is left."""
        answers = True
        while self._workers:
            self._listen(view)
            try:
                for worker in self._ended(view):
                    self._bury(worker, view)
                if time.monotonic() - self._looked >= _LOOK:
                    self._refresh()
                    view.finished(len(self._finished))
                answers = True
            except StorageInternalError as error:
                if answers:
                    view.say(f"no answer from the study, the runs go on: {reason(error)}")
                answers = False
                time.sleep(_LOOK)

    def _stop(self, view: View) -> None:
        view.say("stopping: the workers write checkpoints; once more to stop at once")
        for worker in self._workers:
            worker.stop()
        while self._workers:
            self._listen(view)
            for worker in self._ended(view):
                self._workers.remove(worker)
        self._forget_the_dead()

    def _listen(self, view: View) -> None:
        lines: list[Any] = [worker.line for worker in self._workers]
        ends: list[Any] = [worker.process.sentinel for worker in self._workers]
        wait(lines + ends, timeout=_LOOK)
        for worker in self._workers:
            self._hear(worker, view)

    def _hear(self, worker: _Worker, view: View) -> None:
        for news in worker.news():
            self._note(worker, news, view)

    def _note(self, worker: _Worker, news: tuple[Any, ...], view: View) -> None:
        match news:
            case ("begin", settings, step):
                self._false_starts = 0
                worker.run = records.run_id(settings)
                view.begins(worker.place, settings, step)
            case ("step", step):
                view.steps(worker.place, step)
            case ("done", key, record):
                self._looked = 0.0
                self._finished.add(key)  # the study may have told us before the worker did
                view.ran(record, len(self._finished))
            case ("error", key, error):
                view.say(f"{self._job.plan.name(key)} raised {_last_line(error)}")
            case ("idle",):
                view.waits(worker.place)
            case ("crash", error):
                raise SweepError(f"a worker cannot work: {_last_line(error)}")

    def _ended(self, view: View) -> list[_Worker]:
        """The workers that are no more, their last words heard."""
        ended = [worker for worker in self._workers if not worker.process.is_alive()]
        for worker in ended:
            self._hear(worker, view)
        return ended

    def _bury(self, worker: _Worker, view: View) -> None:
        """Take a dead worker's cell back, and put another in its place if there is work."""
        died = worker.process.exitcode != 0
        if died:
            cell = self._study.claimed_by(worker.name)
            if cell is None:
                self._false_starts += 1
            else:
                self._mourn(worker, cell, view)
        cells = self._refresh()
        self._workers.remove(worker)
        worker.line.close()
        (self._job.workers / worker.name).unlink(missing_ok=True)
        if self._false_starts >= _FALSE_STARTS:
            raise SweepError(
                f"{_FALSE_STARTS} workers in a row died before they had anything to do "
                f"({worker.how_it_died()}): is there memory for {len(self._workers) + 1} of them?"
            )
        if died and not all(cell.finished for cell in cells):
            self._workers.append(_Worker(self._job, worker.place))

    def _mourn(self, worker: _Worker, cell: Cell, view: View) -> None:
        name = self._job.plan.name(cell.key)
        deaths = self._deaths_at(cell.key, worker.run)
        if deaths < _DEATHS:
            view.say(f"a worker was {worker.how_it_died()} at {name}: it is taken up again")
        else:
            self._study.give_up(
                cell,
                f"{deaths} workers died at it ({worker.how_it_died()}) and it got no further: is "
                "there memory for it?",
            )

    def _deaths_at(self, key: str, run: str | None) -> int:
        """How many have died at a cell since its last checkpoint, this one included."""
        reached = 0
        if run is not None:
            with contextlib.suppress(FileNotFoundError):
                reached = (self._job.run_folder(run) / CHECKPOINT).stat().st_mtime_ns
        self._deaths[key, reached] += 1
        return self._deaths[key, reached]

    def _refresh(self) -> list[Cell]:
        """See to it that nothing is stuck, and that all records are in our folder."""
        self._study.bury(self._watch)
        self._study.top_up()
        cells = list(self._study.cells().values())
        done = [cell.key for cell in cells if cell.done]
        if done != self._written:
            records.write(self._job.out / RECORDS, self._study.records())
            self._written = done
        self._finished = {cell.key for cell in cells if cell.finished}
        self._looked = time.monotonic()
        return cells

    def _write_errors(self, failed: dict[str, str]) -> None:
        path = self._job.out / ERRORS
        if failed:
            texts = (f"{name}\n{error.rstrip()}\n" for name, error in failed.items())
            path.write_text("\n".join(texts), encoding="utf-8")
        else:
            path.unlink(missing_ok=True)

    def _forget_the_dead(self) -> list[Cell]:
        """End the trials of dead workers; only then remove the locks that tell of their deaths."""
        signs = self._job.workers.glob("[!.]*")
        dead = [path for path in signs if is_dead(path.parent, path.name)]
        cells = self._refresh()
        for path in dead:
            path.unlink(missing_ok=True)
        return cells


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """Take a polite kill, as of a cluster that wants its machine back, for Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _imports(task: str) -> list[str]:
    """What a server imports once, so that workers forked from it start at once.

    It has no threads when it is forked: it only imports, and never computes.
    """
    data = ["pdecay.lab.data.digits"] if task == "digits" else []
    return [work.__module__, "torch._dynamo", *data]  # all optimizers import torch._dynamo


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _last_line(error: str) -> str:
    return error.strip().rpartition("\n")[2]
