"""Who runs which cell of a sweep: claims on an Optuna study that outlive every death.

A cell is one thing to run; each attempt at it is a trial that bears the cell's key. The storages
have no locks for us to share, but they keep three promises: trials are numbered in the order of
their creation; a waiting trial is claimed by one worker only; a trial that has ended stays as it
is. Two rules on top of these give each cell exactly one complete trial:

1. A worker claims a trial only if no other trial of its cell is complete, and none of a lower
   number is waiting or running. This never turns false later: numbers grow, and ends are final.
   So two launchers may add a trial for the same cell: the later one is not run.
2. The trial of a dead worker is failed; a cell that has no waiting, running or complete trial gets
   a new one. Anyone may do either at any time, also twice. Where the worker was not dead but slow,
   its result is refused, for its trial has ended.

A wrong guess about who is alive costs time, never a record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from pdecay.lab.sweep.plan import Plan, difference
from pdecay.lab.sweep.watch import Watch, worker_of
from pdecay.lab.train.records import Record, run_id
from pdecay.lab.train.training import Settings

ATTEMPTS = 3  # at a cell that raises

_ACTIVE = (TrialState.WAITING, TrialState.RUNNING)


class StudyError(Exception):
    """A study cannot be started or joined; the message says why and what to do."""


class LostError(Exception):
    """A claim is no longer ours: we were held for dead, and someone else has it."""


@dataclass
class Cell:
    """All attempts at one cell, by their numbers."""

    key: str
    trials: list[FrozenTrial] = field(default_factory=list)

    @property
    def done(self) -> FrozenTrial | None:
        """The complete trial."""
        return next((t for t in self.trials if t.state == TrialState.COMPLETE), None)

    @property
    def active(self) -> FrozenTrial | None:
        """The trial that waits or runs; where there are several, the only one that matters."""
        return next((t for t in self.trials if t.state in _ACTIVE), None)

    @property
    def errors(self) -> list[str]:
        """What the attempts that raised have said."""
        return [t.user_attrs["error"] for t in self.trials if "error" in t.user_attrs]

    @property
    def failed(self) -> bool:
        """Whether it was given up."""
        given_up = any("given_up" in trial.user_attrs for trial in self.trials)
        return given_up and self.done is None and self.active is None

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.done is not None or self.failed


@dataclass(frozen=True)
class Claim:
    """A trial that one worker runs.

    Args:
        key: of its cell.
        trial_id: what the storage calls it.
        errors: how many attempts at the cell have raised before.
    """

    key: str
    trial_id: int
    errors: int


class SweepStudy:
    """The cells of a plan, in an Optuna study that exists.

    Args:
        storage: where the study is.
        name: the study's name there.
        plan: what is to be run.
        home: names the folder of the runs, among all that take part in the study.
    """

    def __init__(self, storage: BaseStorage, name: str, plan: Plan, home: str) -> None:
        self.name = name
        self.plan = plan
        self._storage = storage
        self._home = home
        self._study_id = storage.get_study_id_from_name(name)
        self._digest = run_id(plan.identity)

    @classmethod
    def open(
        cls, storage: BaseStorage, name: str, plan: Plan, home: str, *, resume: bool
    ) -> SweepStudy:
        """Start a study; with `resume`, go on with the one that is there or join it.

        Raises:
            StudyError: it is there and `resume` was not given, or it is of another plan.
        """
        try:
            storage.create_new_study(plan.directions, name)
        except DuplicatedStudyError:
            if not resume:
                there = cls(storage, name, plan, home)
                there._check_plan()
                raise StudyError(
                    f"the study {name!r} is there already ({there.standing()}): give --resume to "
                    "go on with it or to join it, or another --out to start another"
                ) from None
        study = cls(storage, name, plan, home)
        study._settle_plan()
        study.top_up()
        return study

    def _settle_plan(self) -> None:
        """Make the study ours, or find that it is another's: its plan is that of its first trial.

        So one of two launchers that start at once with unlike plans comes second, and knows it.
        """
        first = None
        if not self._trials():
            about = self.plan.description
            self._storage.set_study_user_attr(self._study_id, f"plan {self._digest}", about)
            first = self._add(Cell(self.plan.keys[0]))
        try:
            self._check_plan()
        except StudyError:
            if first is not None:
                self._end(first, TrialState.FAIL)
            raise

    def _check_plan(self) -> None:
        trials = self._trials()
        settled = trials[0].user_attrs.get("plan") if trials else self._digest
        if settled == self._digest:
            return
        theirs = self._storage.get_study_user_attrs(self._study_id).get(f"plan {settled}")
        if theirs is None:
            raise StudyError(
                f"the study {self.name!r} is none of pdecay sweep's: give another --study"
            )
        raise StudyError(
            f"the study {self.name!r} was started with other settings: "
            f"{difference(theirs, self.plan.description)}. To go on with it, give it those and "
            "--resume; to start another, give another --out (pdecay report takes several folders)"
        )

    # What there is

    def cells(self) -> dict[str, Cell]:
        """The plan's cells, in its order."""
        cells = {key: Cell(key) for key in self.plan.keys}
        for trial in self._trials():
            key = trial.user_attrs.get("cell")
            if trial.user_attrs.get("plan") == self._digest and key in cells:
                cells[key].trials.append(trial)
        return cells

    def records(self) -> list[Record]:
        """The record of each run that has finished anywhere, by id."""
        done = (cell.done for cell in self.cells().values())
        found = (trial.user_attrs["record"] for trial in done if trial is not None)
        return [record for _, record in sorted({r["id"]: r for r in found}.items())]

    def standing(self) -> str:
        """How far it is, in words."""
        cells = list(self.cells().values())
        finished = sum(cell.finished for cell in cells)
        return "finished" if finished == len(cells) else f"{finished} of {len(cells)} runs finished"

    # What launchers do

    def top_up(self) -> None:
        """Give each cell that needs one a trial to claim; take away those that none needs."""
        for cell in self.cells().values():
            if not cell.finished and cell.active is None:
                self._add(cell)
            for trial in cell.trials if cell.done else ():
                if trial.state == TrialState.WAITING:
                    self._end(trial._trial_id, TrialState.FAIL)

    def retry_failed(self) -> None:
        """Give the cells that were given up one more attempt."""
        for cell in self.cells().values():
            if cell.failed:
                self._add(cell)

    def bury(self, watch: Watch) -> None:
        """End the trials whose workers are dead; their cells will be taken up again."""
        for trial in self._running():
            if not watch.is_dead(trial):
                continue
            record = trial.user_attrs.get("record")
            if record is None:
                self._end(trial._trial_id, TrialState.FAIL)
            else:  # it died with its work done
                self._end(trial._trial_id, TrialState.COMPLETE, self.plan.values(record))

    def claimed_by(self, worker: str) -> Cell | None:
        """The cell that a worker is at."""
        for cell in self.cells().values():
            if cell.active is not None and worker_of(cell.active) == worker:
                return cell
        return None

    def give_up(self, cell: Cell, error: str) -> None:
        """Fail the trial of a dead worker for good."""
        if cell.active is not None and "record" not in cell.active.user_attrs:
            self._fail(cell.active._trial_id, error, for_good=True)

    # What workers do

    def claim(self, worker: str) -> Claim | None:
        """A cell to run, if there is one to be had."""
        waiting = [
            (cell, cell.active)
            for cell in self.cells().values()
            if not cell.done and cell.active and cell.active.state == TrialState.WAITING
        ]
        # First what has a checkpoint here, last what has one elsewhere.
        waiting.sort(key=lambda pair: self._distance(pair[1]))
        for cell, trial in waiting:
            trial_id = trial._trial_id
            try:
                if self._storage.set_trial_state_values(trial_id, TrialState.RUNNING):
                    signed = {"name": worker, "home": self._home}
                    self._storage.set_trial_user_attr(trial_id, "worker", signed)
                    return Claim(cell.key, trial_id, len(cell.errors))
            except UpdateFinishedTrialError:
                continue
        return None

    def settings(self, claim: Claim) -> Settings:
        """What to run for a claim."""

        def ask(sampler: BaseSampler) -> Trial:
            study = optuna.load_study(study_name=self.name, storage=self._storage, sampler=sampler)
            return Trial(study, claim.trial_id)

        return self.plan.settings(claim.key, ask)

    def pulse(self, claim: Claim, count: int) -> None:
        """Give a sign of life.

        Raises:
            LostError: too late.
        """
        try:
            self._storage.set_trial_user_attr(claim.trial_id, "pulse", count)
        except UpdateFinishedTrialError:
            raise LostError from None

    def complete(self, claim: Claim, record: Record) -> None:
        """Hand in the record of a claim.

        Raises:
            LostError: it is not wanted any more.
        """
        try:
            self._storage.set_trial_user_attr(claim.trial_id, "record", record)
        except UpdateFinishedTrialError:
            raise LostError from None
        if not self._end(claim.trial_id, TrialState.COMPLETE, self.plan.values(record)):
            raise LostError

    def fail(self, claim: Claim, error: str) -> None:
        """Say that a claim's run has raised; after enough attempts the cell is given up."""
        self._fail(claim.trial_id, error, for_good=claim.errors + 1 >= ATTEMPTS)

    def release(self, claim: Claim) -> None:
        """Hand a claim back; another attempt goes on from its checkpoint."""
        self._end(claim.trial_id, TrialState.FAIL)
        self.top_up()

    # How

    def _trials(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._study_id, deepcopy=False)

    def _running(self) -> Iterable[FrozenTrial]:
        return (
            trial
            for cell in self.cells().values()
            for trial in cell.trials
            if trial.state == TrialState.RUNNING
        )

    def _add(self, cell: Cell) -> int:
        """Add a trial for a cell; what earlier attempts have sampled stays as it is."""
        attributes: dict[str, Any] = {"plan": self._digest, "cell": cell.key}
        params, distributions = self.plan.parameters(cell.key)
        if cell.trials:
            last = cell.trials[-1]
            params, distributions = last.params, last.distributions
            worker = last.user_attrs.get("worker", last.user_attrs)
            if "home" in worker:
                attributes["home"] = worker["home"]
        trial = optuna.trial.create_trial(
            state=TrialState.WAITING,
            params=params,
            distributions=distributions,
            user_attrs=attributes,
        )
        return self._storage.create_new_trial(self._study_id, template_trial=trial)

    def _distance(self, trial: FrozenTrial) -> int:
        home = trial.user_attrs.get("home")
        return 1 if home is None else 2 * (home != self._home)

    def _fail(self, trial_id: int, error: str, *, for_good: bool) -> None:
        try:
            self._storage.set_trial_user_attr(trial_id, "error", error)
            if for_good:
                self._storage.set_trial_user_attr(trial_id, "given_up", True)
        except UpdateFinishedTrialError:
            return
        self._end(trial_id, TrialState.FAIL)

    def _end(self, trial_id: int, state: TrialState, values: list[float] | None = None) -> bool:
        """End a trial; False if it has ended before."""
        try:
            return self._storage.set_trial_state_values(trial_id, state, values)
        except UpdateFinishedTrialError:
            return False
