"""The launcher's view of the study: fails abandoned trials, queues cells, writes the records.

It runs in a thread, so that a database that does not answer never blocks the launcher.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.trial import FrozenTrial, TrialState

from pdecay._utils.errors import root_cause
from pdecay.lab.sweep.study import Cell, SweepStudy
from pdecay.lab.sweep.worker import Job
from pdecay.lab.train import records
from pdecay.lab.train.records import Record
from pdecay.lab.train.training import CHECKPOINT

RECORDS = "records.jsonl"

_INTERVAL = 1.0  # seconds between two looks at the study
_UNMARKED = 30.0  # seconds in which a worker must have put its mark on a trial that it took
_DEATHS = 10  # of workers at one cell without a new checkpoint, before it is given up


class Monitor(threading.Thread):
    """A thread that looks at the study once a second until all cells are finished.

    Args:
        job: the launcher's job.
        study: the study.
        say: prints a line.
    """

    def __init__(self, job: Job, study: SweepStudy, say: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self.cells: list[Cell] = []
        self.records: list[Record] = []
        self.workers: set[int] = set()  # the process ids of the launcher's live workers
        self.exits: dict[int, str] = {}  # the exit reasons of its dead workers
        self.error: Exception | None = None
        self._job, self._study, self._say = job, study, say
        self._stopping = threading.Event()
        self._unmarked: dict[int, float] = {}
        self._deaths: Counter[tuple[str, int]] = Counter()
        self._written: list[str] | None = None

    @property
    def finished(self) -> set[str]:
        """The keys of the finished cells."""
        return {cell.key for cell in self.cells if cell.finished}

    def run(self) -> None:
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
                self.error = error
                return

    def stop(self, timeout: float = 10.0) -> None:
        """Take a last look, which queues the cells of stopped workers, unless it takes too long."""
        self._stopping.set()
        self.join(timeout)

    def look(self) -> None:
        """Bring the study and the records up to date."""
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
        done = [cell.key for cell in cells if cell.done]
        if done != self._written:
            self.records = self._study.records()
            records.write(self._job.out / RECORDS, self.records)
            self._written = done
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
        if (record := trial.user_attrs.get("record")) is not None:  # it died after its work
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
