"""The launcher: runs a sweep on this machine by starting workers and replacing those that die.

Several launchers may share one study in a database. Each has its own folder and writes all records
of the study into it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.text import Text

from pdecay._utils.errors import root_cause
from pdecay._utils.files import LockedError, lock
from pdecay._utils.imports import safe_path
from pdecay._utils.signals import stop_requests
from pdecay.lab.sweep.plan import Plan, SweepError, label
from pdecay.lab.sweep.storage import open_storage
from pdecay.lab.sweep.study import Cell, SweepStudy
from pdecay.lab.sweep.worker import STARTED, Job, work
from pdecay.lab.tasks import get_task
from pdecay.lab.train import records
from pdecay.lab.train.records import Record
from pdecay.lab.train.training import CHECKPOINT

RECORDS, ERRORS = "records.jsonl", "errors.txt"
STUDY = "sweep"  # the study's name in a journal

_KEPT = "Nothing is lost: continue with --resume"
_FALSE_STARTS = 10  # stop the sweep after this many workers in a row died before taking a cell
_DEATHS = 10  # give a cell up after this many worker deaths without a new checkpoint
_INTERVAL = 1.0  # seconds between two reads of the study
_UNMARKED = 30.0  # seconds after which a running trial without a worker's name is abandoned


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
        DataError: the data are not available.
        SweepError: the study is not available, or the workers cannot run.
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
        threads=threads or max(1, torch.get_num_threads() // workers),
        device=device,
        checkpoint_every=checkpoint_every,
        grace=grace,
    )
    with open_storage(storage, out, grace) as opened:
        try:
            with lock(out):
                queue = SweepStudy.open(opened, job.study, plan, resume=resume)
                launcher = Launcher(job, queue, workers, console or Console(quiet=True))
                if retry_failed:
                    launcher.look()  # a killed launcher may not have ended the last attempt
                    queue.top_up(retry_failed=True)
                return launcher.run()
        except LockedError as error:
            raise SweepError(str(error)) from None
        except SweepError as error:
            raise SweepError(f"{out}: {error}" if storage is None else str(error)) from None
        except StorageInternalError as error:
            raise SweepError(f"the study does not answer: {root_cause(error)}. {_KEPT}") from None


class Launcher:
    """The workers of one folder, and a thread that watches the study.

    The main thread replaces dead workers. The other thread calls :meth:`look`, because a database
    that does not answer blocks its caller and must not block a stop.

    Args:
        job: the settings of the workers.
        study: the study.
        workers: the number of workers.
        console: shows the progress.
    """

    def __init__(self, job: Job, study: SweepStudy, workers: int, console: Console) -> None:
        self.cells: list[Cell] = []
        self.records: list[Record] = []
        self.workers: dict[int, tuple[BaseProcess, Connection]] = {}  # live ones, by process id
        self.exits: dict[int, str] = {}  # the exit reasons of dead workers
        self._job, self._study, self._number = job, study, workers
        self._false_starts = 0
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._unmarked: dict[int, float] = {}
        self._deaths: Counter[tuple[str, int]] = Counter()
        self._reported: set[int] | None = None  # the numbers of the trials that were reported
        self._progress = Progress(
            *Progress.get_default_columns(),
            MofNCompleteColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=3600,
        )
        self._bar = self._progress.add_task("runs", total=len(job.plan.keys))

    @property
    def finished(self) -> set[str]:
        """The keys of the finished cells."""
        return {cell.key for cell in self.cells if cell.finished}

    def run(self) -> Outcome:
        """Run all cells.

        Raises:
            SweepError, SweepStoppedError: see :func:`sweep`.
        """
        self.look()
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        number = min(self._number, len(self.cells) - len(self.finished))
        notice = "stopping: the workers write checkpoints; press Ctrl-C again to stop at once"
        try:
            if number > 0:
                self._start_worker()  # waits for the imports of the server; Ctrl-C interrupts it
            with self._progress, stop_requests(lambda: self._say(notice)) as stopped:
                for _ in range(1, number):
                    self._start_worker()
                while thread.is_alive() and not stopped():
                    wait([process.sentinel for process, _ in self.workers.values()], timeout=0.5)
                    self._replace_dead_workers()
                for _, connection in self.workers.values():
                    connection.close()  # asks the worker to stop
                for pid, (process, _) in list(self.workers.items()):
                    process.join()
                    del self.workers[pid]
                self._stopping.set()
                thread.join(timeout=10)  # a last look queues the cells of the stopped workers
        finally:
            self._stopping.set()
            for process, _ in self.workers.values():
                process.kill()
        if self._error is not None:
            raise self._error
        if len(self.finished) < len(self.cells):
            raise SweepStoppedError
        label = self._job.plan.label
        failed = {label(cell.key): cell.errors[-1] for cell in self.cells if cell.failed}
        self._write_errors(failed)
        return Outcome(self.records, failed)

    def _start_worker(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # The server only imports: workers forked from it start fast and inherit no threads.
        # All torch optimizers import torch._dynamo.
        context.set_forkserver_preload([work.__module__, "torch._dynamo"])
        _start_server()
        connection, theirs = context.Pipe()
        process = context.Process(target=work, args=(self._job, theirs))
        try:
            process.start()
        except (EOFError, ConnectionError):
            raise SweepError(
                "the process that starts workers was killed: is there enough memory for "
                f"{self._number} of them? {_KEPT}"
            ) from None
        theirs.close()  # otherwise the connection would not end with the worker
        self.workers[process.pid or 0] = process, connection

    def _replace_dead_workers(self) -> None:
        for pid, (process, connection) in list(self.workers.items()):
            if (code := process.exitcode) is None:
                continue
            reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self.exits[pid] = reason
            del self.workers[pid]
            started = False
            with connection, contextlib.suppress(EOFError, OSError):
                while connection.poll():
                    if (message := connection.recv()) != STARTED:
                        raise SweepError(f"a worker cannot run: {_last_line(message)}. {_KEPT}")
                    started = True
            self._false_starts = 0 if started else self._false_starts + 1
            if self._false_starts >= _FALSE_STARTS:
                raise SweepError(
                    f"{_FALSE_STARTS} workers in a row died at their start ({reason}): is there "
                    f"enough memory for {self._number} of them? {_KEPT}"
                )
            self._start_worker()

    def _watch(self) -> None:
        answers, stop = True, False
        while not stop and len(self.finished) < len(self.cells):
            stop = self._stopping.wait(_INTERVAL)
            try:
                self.look()
                answers = True
            except StorageInternalError as error:
                if answers:
                    self._say(f"the study does not answer, runs continue: {root_cause(error)}")
                answers = False
            except Exception as error:
                self._error = error
                return

    def look(self) -> None:
        """Fail the trials of dead workers, queue cells, write the records, report new results."""
        if self._job.storage is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                optuna.storages.fail_stale_trials(self._study.optuna)
        for cell in self._study.cells().values():
            for trial in cell.trials:
                if trial.state == TrialState.RUNNING and self._is_abandoned(trial):
                    self._end_abandoned(cell, trial)
        self._study.top_up()
        cells = list(self._study.cells().values())
        done = {cell.key for cell in cells if cell.done}
        if self._reported is None or done != {cell.key for cell in self.cells if cell.done}:
            self.records = self._study.records()
            records.write(self._job.out / RECORDS, self.records)
        self._report(cells)
        self.cells = cells

    def _is_abandoned(self, trial: FrozenTrial) -> bool:
        """Return whether no worker runs a running trial.

        The launcher holds the folder's lock: all workers of this folder are its own. Optuna's
        heartbeat covers the workers of other folders, but not one that died before it began.
        """
        worker = trial.user_attrs.get("worker")
        if worker is None:
            since = self._unmarked.setdefault(trial.number, time.monotonic())
            return time.monotonic() - since > _UNMARKED
        ours = self._job.storage is None or worker["home"] == self._job.home
        return ours and worker["pid"] not in self.workers

    def _end_abandoned(self, cell: Cell, trial: FrozenTrial) -> None:
        record: Any = trial.user_attrs.get("record")
        if self._job.plan.is_result_of(cell.key, record):  # it died after its work
            self._study.end(trial, TrialState.COMPLETE, self._job.plan.values(record))
            return
        worker = trial.user_attrs.get("worker", {})
        reason = self.exits.get(worker.get("pid"))
        attrs: dict[str, Any] = {}
        if reason is not None:
            checkpoint = self._job.run_folder(worker["run"]) / CHECKPOINT
            saved = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
            self._deaths[cell.key, saved] += 1
            if self._deaths[cell.key, saved] >= _DEATHS:
                attrs["give_up"] = attrs["error"] = (
                    f"{_DEATHS} workers died at it without progress ({reason}): is there enough "
                    "memory?"
                )
            else:
                self._say(f"a worker died ({reason}) at {self._job.plan.label(cell.key)}: retry")
        self._study.end(trial, TrialState.FAIL, **attrs)

    def _report(self, cells: list[Cell]) -> None:
        """Print the results since the last look, on all machines."""
        ended = {
            t.number: (cell, t) for cell in cells for t in cell.trials if t.state.is_finished()
        }
        reported = set(ended) if self._reported is None else self._reported  # all before the start
        count, total = len(self.finished), len(cells)
        for cell, trial in (ended[number] for number in ended if number not in reported):
            attrs = trial.user_attrs
            if trial.state == TrialState.COMPLETE:
                count += 1
                self._say(f"{count:{len(str(total))}}/{total}  {_result(attrs['record'])}")
            elif "error" in attrs and "give_up" not in attrs:
                label = self._job.plan.label(cell.key)
                self._say(f"{label} raised {_last_line(attrs['error'])}")
        self._reported = set(ended)
        self._progress.update(self._bar, completed=sum(cell.finished for cell in cells))

    def _say(self, text: str) -> None:
        self._progress.console.print(Text(text), soft_wrap=True)

    def _write_errors(self, failed: dict[str, str]) -> None:
        path = self._job.out / ERRORS
        if failed:
            texts = (f"{name}\n{error.rstrip()}\n" for name, error in failed.items())
            path.write_text("\n".join(texts), encoding="utf-8")
        else:
            path.unlink(missing_ok=True)


def _start_server() -> None:
    """Start the process that forks the workers, if it does not run, with both signals blocked.

    Ctrl-C in a terminal, ``timeout`` and job schedulers send a signal to all processes. It would
    end the workers, which inherit the block, before they write a checkpoint. The launcher receives
    a signal that arrives meanwhile, and asks the workers to stop.
    """
    with safe_path():  # multiprocessing uses `python -c`
        resource_tracker.ensure_running()  # here, because it unblocks both
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _result(record: Record) -> str:
    result, text = record["result"], "diverged"
    if record["status"] == "ok":
        text = f"accuracy {result['accuracy']:.2f} %, zeros {100 * result['sparsity']:.2f} %"
    return f"{label(record['settings'])}: {text} ({record['timing']['seconds']:.0f} s)"


def _last_line(error: str) -> str:
    return error.strip().rpartition("\n")[2]
