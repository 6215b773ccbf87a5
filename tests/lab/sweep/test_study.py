"""The queue: each cell gets exactly one complete trial, in any order of deaths and restarts."""

from __future__ import annotations

import contextlib

import optuna
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from pdecay.lab.sweep import Grid, SweepError
from pdecay.lab.sweep.study import ATTEMPTS, SweepStudy

optuna.logging.set_verbosity(optuna.logging.WARNING)


def grid(lams=(0.01, 0.02, 0.03), **common):
    axes = {"method": ["padam"], "lam": list(lams)}
    return Grid(task="digits", scale="quick", grids=[axes], **common)


def record(key):
    result = {"accuracy": 90.0, "sparsity": 0.5, "tradeoff": 90.5}
    return {"id": key, "status": "ok", "result": result}


@pytest.fixture
def storage():
    return InMemoryStorage()


@pytest.fixture
def study(storage):
    return SweepStudy.open(storage, "s", grid(), resume=False)


def take(study):
    """Take a trial from the queue as a worker does: return it if it is to be run."""
    trial = study.optuna.ask()
    if study.is_current(trial):
        return trial
    study.optuna.tell(trial, state=TrialState.FAIL)
    return None


def key_of(trial):
    return trial.user_attrs["cell"]


def complete(study, trial):
    result = record(key_of(trial))
    trial.set_user_attr("record", result)
    study.optuna.tell(trial, study.plan.values(result))


def fail(study, trial, **attrs):
    study.end(trial, TrialState.FAIL, **attrs)
    study.top_up()


def complete_trials(study):
    return {
        key: sum(trial.state == TrialState.COMPLETE for trial in cell.trials)
        for key, cell in study.cells().items()
    }


def duplicate(study, key):
    """Queue a cell again, as a second launcher does that has not seen the first trial."""
    study._add(study.cells()[key])


def test_cells_are_run_in_order_and_once(study):
    trials = [take(study) for _ in range(3)]
    assert [key_of(trial) for trial in trials] == study.plan.keys
    assert take(study) is None
    for trial in trials:
        complete(study, trial)
    assert all(cell.finished for cell in study.cells().values())
    assert study.standing() == "finished"
    assert [one["id"] for one in study.records()] == sorted(study.plan.keys)


def test_only_the_first_of_two_trials_of_a_cell_runs(study):
    key = study.plan.keys[0]
    duplicate(study, key)
    first = take(study)
    assert key_of(first) == key
    assert [key_of(take(study)) for _ in range(2)] == study.plan.keys[1:]
    assert take(study) is None
    complete(study, first)
    study.top_up()
    assert study.cells()[key].trials[1].state == TrialState.FAIL
    assert len(study.cells()[key].trials) == 2


def test_top_up_removes_waiting_trials_of_complete_cells(study):
    key = study.plan.keys[0]
    duplicate(study, key)
    complete(study, take(study))
    study.top_up()
    assert [trial.state for trial in study.cells()[key].trials] == [
        TrialState.COMPLETE,
        TrialState.FAIL,
    ]


def test_second_trial_of_a_cell_replaces_a_failed_first(study):
    key = study.plan.keys[0]
    duplicate(study, key)
    fail(study, take(study))
    assert len(study.cells()[key].trials) == 2
    assert key in [key_of(take(study)) for _ in range(3)]


def test_result_of_a_failed_trial_is_refused(study):
    late = take(study)
    fail(study, late)
    for _ in range(2):
        take(study)
    again = take(study)
    assert key_of(again) == key_of(late)
    with pytest.raises(UpdateFinishedTrialError):
        late.set_user_attr("record", record(key_of(late)))
    with pytest.raises(ValueError, match="Cannot tell a FAIL trial"):
        study.optuna.tell(late, [1.0, 1.0])
    study.end(late, TrialState.FAIL, error="too late as well")
    complete(study, again)
    assert complete_trials(study)[key_of(again)] == 1
    assert study.cells()[key_of(again)].errors == []


def test_trials_of_other_programs_are_not_run(study):
    for _ in range(3):
        take(study)
    study.optuna.enqueue_trial({"x": 1.0})
    assert take(study) is None


def test_cell_that_raises_is_given_up_after_three_attempts(study):
    key = study.plan.keys[0]
    others = []
    for attempt in range(ATTEMPTS):
        while key_of(trial := take(study)) != key:
            others.append(trial)
        assert len(study.cells()[key].errors) == attempt
        assert not study.cells()[key].failed
        fail(study, trial, error=f"error {attempt}")
    cell = study.cells()[key]
    assert cell.failed
    assert cell.finished
    assert cell.errors == ["error 0", "error 1", "error 2"]
    assert take(study) is None
    study.top_up(retry_failed=True)
    assert not study.cells()[key].failed
    fail(study, take(study), error="again")
    assert study.cells()[key].failed
    study.top_up(retry_failed=True)
    complete(study, take(study))
    assert complete_trials(study)[key] == 1
    assert not study.cells()[key].failed


def test_existing_study_needs_resume(storage, study):
    with pytest.raises(SweepError, match=r"exists \(0 of 3 runs finished\): give --resume"):
        SweepStudy.open(storage, "s", grid(), resume=False)
    again = SweepStudy.open(storage, "s", grid(), resume=True)
    assert [len(cell.trials) for cell in again.cells().values()] == [1, 1, 1]
    for _ in range(3):
        complete(again, take(again))
    with pytest.raises(SweepError, match=r"exists \(finished\)"):
        SweepStudy.open(storage, "s", grid(), resume=False)


@pytest.mark.parametrize("resume", [False, True])
def test_study_with_another_plan_is_refused(storage, study, resume):
    message = r"other settings: lam was 0.01 0.02 0.03 and is now 0.01 0.05. .*--resume.*--out"
    with pytest.raises(SweepError, match=message):
        SweepStudy.open(storage, "s", grid((0.01, 0.05)), resume=resume)
    assert [len(cell.trials) for cell in study.cells().values()] == [1, 1, 1]
    assert len(study.trials()) == 3
    SweepStudy.open(storage, "s", grid((0.03, 0.02, 0.01)), resume=True)  # the same cells


def test_study_of_another_program_is_refused(storage):
    theirs = optuna.create_study(storage=storage, study_name="s", directions=["maximize"] * 2)
    theirs.add_trial(optuna.trial.create_trial(values=[1.0, 2.0]))
    with pytest.raises(SweepError, match="was not created by pdecay sweep: give another --study"):
        SweepStudy.open(storage, "s", grid(), resume=True)


def test_resume_after_launcher_died_before_it_queued_cells(storage):
    optuna.create_study(storage=storage, study_name="s", directions=["maximize"] * 2)
    with pytest.raises(SweepError, match="0 of 3 runs finished"):
        SweepStudy.open(storage, "s", grid(), resume=False)
    study = SweepStudy.open(storage, "s", grid(), resume=True)
    assert [len(cell.trials) for cell in study.cells().values()] == [1, 1, 1]


def test_resume_after_launcher_died_while_it_queued_cells(storage, study, monkeypatch):
    other = grid(tuple(0.001 * k for k in range(1, 30)))
    with monkeypatch.context() as patch:
        patch.setattr(SweepStudy, "top_up", lambda study: None)
        SweepStudy.open(storage, "half", other, resume=False)  # adds the first cell only
    again = SweepStudy.open(storage, "half", other, resume=True)
    assert [len(cell.trials) for cell in again.cells().values()] == [1] * 29


def test_second_of_two_plans_started_at_once_raises(storage, monkeypatch):
    one, other = grid(), grid((0.05, 0.06))
    first = SweepStudy.open(storage, "s", one, resume=False)
    trials = SweepStudy.trials
    empty = iter([[]])  # the second launcher looks before the first has queued anything
    with monkeypatch.context() as patch:
        patch.setattr(SweepStudy, "trials", lambda study: next(empty, None) or trials(study))
        with pytest.raises(SweepError, match=r"lam was .* and is now "):
            SweepStudy.open(storage, "s", other, resume=True)
    first.top_up()
    assert [len(cell.trials) for cell in first.cells().values()] == [1, 1, 1]
    assert key_of(take(first)) == one.keys[0]
    waiting = [t for t in first.trials() if t.state == TrialState.WAITING]
    assert {key_of(trial) for trial in waiting} == set(one.keys[1:])


class Sweeps(RuleBasedStateMachine):
    """Workers and launchers in any order of events."""

    def __init__(self):
        super().__init__()
        self.study = SweepStudy.open(InMemoryStorage(), "s", grid(), resume=False)
        self.taken = []  # trials that live workers run, also those that were failed meanwhile

    @rule()
    def take(self):
        trial = take(self.study)
        if trial is not None:
            self.taken.append(trial)

    @rule(which=st.integers(0, 9))
    def fail_trial_of_slow_worker(self, which):
        if self.taken:
            self.study.end(self.taken[which % len(self.taken)], TrialState.FAIL)

    @rule(which=st.integers(0, 9))
    def fail_trial_of_dead_worker(self, which):
        if self.taken:
            self.study.end(self.taken.pop(which % len(self.taken)), TrialState.FAIL)

    @rule(which=st.integers(0, 9))
    def complete(self, which):
        if self.taken:
            with contextlib.suppress(UpdateFinishedTrialError):
                complete(self.study, self.taken.pop(which % len(self.taken)))

    @rule(which=st.integers(0, 2))
    def queue_cell_twice(self, which):
        key = self.study.plan.keys[which]
        if not self.study.cells()[key].done:
            duplicate(self.study, key)

    @rule()
    def top_up(self):
        self.study.top_up()

    @invariant()
    def no_cell_is_complete_twice(self):
        assert max(complete_trials(self.study).values()) <= 1

    def teardown(self):
        for trial in self.taken:
            self.study.end(trial, TrialState.FAIL)
        self.study.top_up()
        while self.study.has_waiting():
            if (trial := take(self.study)) is not None:
                complete(self.study, trial)
            self.study.top_up()
        assert set(complete_trials(self.study).values()) == {1}
        assert [one["id"] for one in self.study.records()] == sorted(self.study.plan.keys)
        assert all(trial.state.is_finished() for trial in self.study.trials())


TestSweeps = Sweeps.TestCase
TestSweeps.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_cell_without_its_record_is_run_again(study):
    trial = take(study)
    study.optuna.tell(trial, study.plan.values(record(key_of(trial))))  # the record was lost
    assert study.records() == []
    study.top_up()
    while not all(cell.done for cell in study.cells().values()):
        complete(study, take(study))
    assert [one["id"] for one in study.records()] == sorted(study.plan.keys)


@pytest.mark.parametrize("change", [{"id": "0" * 16}, None], ids=["of another cell", "without id"])
def test_cell_with_a_wrong_record_is_run_again(study, change):
    """Reordered lines of a journal give a record to the wrong trial."""
    trial = take(study)
    wrong = record(key_of(trial))
    wrong = {**wrong, **change} if change else {k: v for k, v in wrong.items() if k != "id"}
    trial.set_user_attr("record", wrong)
    study.optuna.tell(trial, study.plan.values(wrong))
    assert study.records() == []
    study.top_up()
    while not all(cell.done for cell in study.cells().values()):
        complete(study, take(study))
    assert [one["id"] for one in study.records()] == sorted(study.plan.keys)
