"""The queue of a sweep: for each unfinished cell, one waiting or running trial in an Optuna study.

Optuna guarantees that trials are numbered in the order of their creation and that a finished trial
never changes. Two rules on top of it give each cell exactly one complete trial:

1. `SweepStudy.is_current`: a worker runs a trial only if its cell has no complete trial and no
   waiting or running trial with a lower number. So two launchers may queue the same cell at once.
2. `SweepStudy.top_up`: a cell without a waiting, running or complete trial gets a new one.

A trial of a dead worker is failed (by its launcher, or by Optuna's heartbeat). If that worker was
only slow, Optuna refuses its result. A wrong guess costs time, but never a record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from pdecay.lab.sweep.plan import OBJECTIVES, Plan, SweepError, difference
from pdecay.lab.train.records import Record

ATTEMPTS = 3  # at a cell that raises


@dataclass
class Cell:
    """All trials of one cell, by number."""

    key: str
    trials: list[FrozenTrial] = field(default_factory=list)

    @property
    def done(self) -> FrozenTrial | None:
        """The complete trial."""
        return next((t for t in self.trials if t.state == TrialState.COMPLETE), None)

    @property
    def active(self) -> FrozenTrial | None:
        """The first trial that waits or runs."""
        return next((t for t in self.trials if not t.state.is_finished()), None)

    @property
    def errors(self) -> list[str]:
        """The tracebacks of the attempts that raised."""
        return [t.user_attrs["error"] for t in self.trials if "error" in t.user_attrs]

    @property
    def failed(self) -> bool:
        """Whether the cell was given up."""
        give_up = any("give_up" in t.user_attrs for t in self.trials)
        return not (self.done or self.active) and (give_up or len(self.errors) >= ATTEMPTS)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.done is not None or self.failed


class SweepStudy:
    """The cells of a plan in an existing Optuna study.

    Args:
        storage: the study's storage.
        name: the study's name there.
        plan: the plan.
    """

    def __init__(self, storage: BaseStorage, name: str, plan: Plan) -> None:
        self.plan = plan
        self.storage = storage
        # Searches bind their own sampler to each trial; this one draws nothing.
        self.optuna = optuna.load_study(study_name=name, storage=storage, sampler=RandomSampler())

    @classmethod
    def open(cls, storage: BaseStorage, name: str, plan: Plan, *, resume: bool) -> SweepStudy:
        """Create a study and queue its cells; with `resume`, continue or join an existing one.

        Raises:
            SweepError: the study exists and `resume` is False, or it has another plan.
        """
        try:
            storage.create_new_study(
                [StudyDirection.MAXIMIZE] * len(OBJECTIVES[plan.objective]), name
            )
        except DuplicatedStudyError:
            if not resume:
                existing = cls(storage, name, plan)
                existing.check_plan()
                raise SweepError(
                    f"the study {name!r} exists ({existing.standing()}): give --resume to continue "
                    "or join it, or another --out to start a new one"
                ) from None
        study = cls(storage, name, plan)
        if not study.trials():
            study._add(Cell(plan.keys[0]), description=plan.description)
        study.check_plan()
        study.top_up()
        return study

    def check_plan(self) -> None:
        """Check that the study has this plan: the plan of its first trial.

        The first trial decides between two launchers that start at once with different plans.

        Raises:
            SweepError: the study has another plan.
        """
        trials = self.trials()
        if not trials or trials[0].user_attrs.get("plan") == self.plan.identity:
            return
        for trial in trials:  # a launcher that lost the race removes its own trial
            if trial.user_attrs.get("plan") == self.plan.identity:
                self.end(trial, TrialState.FAIL)
        theirs = trials[0].user_attrs.get("description")
        name = self.optuna.study_name
        if theirs is None:
            raise SweepError(
                f"the study {name!r} was not created by pdecay sweep: give another --study"
            )
        raise SweepError(
            f"the study {name!r} was started with other settings: "
            f"{difference(theirs, self.plan.description)}. To continue it, give its settings and "
            "--resume; to start a new one, give another --out (pdecay report takes several folders)"
        )

    def trials(self) -> list[FrozenTrial]:
        """Return all trials, also those of other programs."""
        return self.optuna.get_trials(deepcopy=False)

    def cells(self) -> dict[str, Cell]:
        """Return the plan's cells by key."""
        cells = {key: Cell(key) for key in self.plan.keys}
        for trial in self.trials():
            key = trial.user_attrs.get("cell")
            if key in cells and self._counts(trial):
                cells[key].trials.append(trial)
        return cells

    def records(self) -> list[Record]:
        """Return the records of all complete cells, by id."""
        done = (cell.done for cell in self.cells().values())
        found = {t.user_attrs["record"]["id"]: t.user_attrs["record"] for t in done if t}
        return [found[key] for key in sorted(found)]

    def standing(self) -> str:
        """Return the progress as text."""
        cells = self.cells().values()
        finished = sum(cell.finished for cell in cells)
        return "finished" if finished == len(cells) else f"{finished} of {len(cells)} runs finished"

    def has_waiting(self) -> bool:
        """Return whether the queue has trials."""
        return bool(self.optuna.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def is_current(self, trial: Trial) -> bool:
        """Return whether a worker may run a trial that it took from the queue (rule 1)."""
        if trial.user_attrs.get("plan") != self.plan.identity:
            return False  # Optuna adds an empty trial if the queue is empty
        key = trial.user_attrs["cell"]
        same = (t for t in self.trials() if t.user_attrs.get("cell") == key)
        cell = Cell(key, [t for t in same if self._counts(t)])
        return not cell.done and cell.active is not None and cell.active.number == trial.number

    def bind(self, trial: Trial, sampler: BaseSampler) -> Trial:
        """Return the same trial with another sampler."""
        name = self.optuna.study_name
        study = optuna.load_study(study_name=name, storage=self.storage, sampler=sampler)
        return Trial(study, trial._trial_id)

    def top_up(self, *, retry_failed: bool = False) -> None:
        """Queue each cell that needs a trial (rule 2); remove waiting trials of complete cells."""
        for cell in self.cells().values():
            if cell.failed if retry_failed else not (cell.finished or cell.active):
                self._add(cell)
            for trial in cell.trials if cell.done else ():
                if trial.state == TrialState.WAITING:
                    self.end(trial, TrialState.FAIL)

    def end(
        self,
        trial: FrozenTrial | Trial,
        state: TrialState,
        values: list[float] | None = None,
        **attrs: Any,
    ) -> None:
        """Set a trial's attributes and end it, unless it has ended."""
        try:
            for name, value in attrs.items():
                self.storage.set_trial_user_attr(trial._trial_id, name, value)
            self.storage.set_trial_state_values(trial._trial_id, state, values)
        except UpdateFinishedTrialError:
            pass

    def _counts(self, trial: FrozenTrial) -> bool:
        """Return whether a trial is of this plan and, if it is complete, has its cell's record."""
        attrs = trial.user_attrs
        if attrs.get("plan") != self.plan.identity:
            return False
        record = attrs.get("record")
        return trial.state != TrialState.COMPLETE or self.plan.is_result_of(attrs["cell"], record)

    def _add(self, cell: Cell, **attrs: Any) -> None:
        """Queue a cell; a search keeps the values that an earlier attempt drew.

        Only a trial with a worker's mark has drawn all of them. The rest of a part would be drawn
        with random numbers that the part has used in an undisturbed run.
        """
        params, distributions = self.plan.params(cell.key)
        for trial in cell.trials:
            if "worker" in trial.user_attrs:
                params, distributions = trial.params, trial.distributions
        self.optuna.add_trial(
            optuna.trial.create_trial(
                state=TrialState.WAITING,
                params=params,
                distributions=distributions,
                user_attrs={"plan": self.plan.identity, "cell": cell.key, **attrs},
            )
        )
