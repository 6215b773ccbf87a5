"""Claims: each cell has one complete trial, whoever dies, wakes up again or comes at once."""

from __future__ import annotations

import contextlib

import optuna
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from pdecay.lab.sweep import Grid, StudyError
from pdecay.lab.sweep.study import ATTEMPTS, LostError, SweepStudy
from pdecay.lab.sweep.watch import worker_of

optuna.logging.set_verbosity(optuna.logging.WARNING)


def grid(lams=(0.01, 0.02, 0.03), **common):
    axes = {"method": ["padam"], "lam": list(lams)}
    return Grid(task="digits", scale="quick", grids=[axes], **common)


def record(key):
    result = {"accuracy": 90.0, "sparsity": 0.5, "tradeoff": 90.5}
    return {"id": key, "status": "ok", "result": result}


class Deaths:
    """A watch that is told who is dead."""

    def __init__(self):
        self.dead = set()

    def is_dead(self, trial):
        return worker_of(trial) is None or worker_of(trial) in self.dead


@pytest.fixture
def storage():
    return InMemoryStorage()


@pytest.fixture
def study(storage):
    return SweepStudy.open(storage, "s", grid(), "here", resume=False)


def complete_trials(study):
    return {
        key: sum(trial.state == TrialState.COMPLETE for trial in cell.trials)
        for key, cell in study.cells().items()
    }


def test_cells_are_claimed_in_order_and_once(study):
    claims = [study.claim("a"), study.claim("b"), study.claim("a")]
    assert [claim.key for claim in claims] == study.plan.keys
    assert study.claim("c") is None
    for claim in claims:
        study.complete(claim, record(claim.key))
    assert all(cell.finished for cell in study.cells().values())
    assert study.standing() == "finished"
    assert [one["id"] for one in study.records()] == sorted(study.plan.keys)


def test_two_launchers_that_add_a_trial_each(study):
    key = study.plan.keys[0]
    study._add(study.cells()[key])  # as a second launcher does that has not seen the first one's
    claim = study.claim("a")
    assert (claim.key, claim.trial_id) == (key, study.cells()[key].trials[0]._trial_id)
    assert key not in [study.claim("b").key, study.claim("b").key]
    assert study.claim("b") is None
    study.complete(claim, record(key))
    assert study.claim("b") is None
    study.top_up()
    assert study.cells()[key].trials[1].state == TrialState.FAIL
    assert len(study.cells()[key].trials) == 2


def test_the_second_trial_stands_in_for_the_first(study):
    key = study.plan.keys[0]
    study._add(study.cells()[key])
    study.release(study.claim("a"))
    claim = study.claim("b")
    assert (claim.key, claim.trial_id) == (key, study.cells()[key].trials[1]._trial_id)
    assert len(study.cells()[key].trials) == 2


def test_a_dead_worker_gives_its_cell_back(study):
    watch = Deaths()
    claim = study.claim("a")
    study.bury(watch)
    assert study.claimed_by("a").key == claim.key
    watch.dead.add("a")
    study.bury(watch)
    study.top_up()
    assert study.claimed_by("a") is None
    again = study.claim("b")
    assert again.key == claim.key
    assert again.errors == 0


def test_one_that_was_held_for_dead_is_refused(study):
    watch = Deaths()
    late = study.claim("a")
    watch.dead.add("a")
    study.bury(watch)
    study.top_up()
    claim = study.claim("b")
    with pytest.raises(LostError):
        study.pulse(late, 1)
    with pytest.raises(LostError):
        study.complete(late, record(late.key))
    study.fail(late, "too late as well")
    study.release(late)
    study.complete(claim, record(claim.key))
    assert complete_trials(study)[claim.key] == 1
    assert study.cells()[claim.key].errors == []


def test_one_that_died_with_its_work_done_keeps_it(storage, study):
    claim = study.claim("a")
    storage.set_trial_user_attr(claim.trial_id, "record", record(claim.key))
    watch = Deaths()
    watch.dead.add("a")
    study.give_up(study.claimed_by("a"), "not this one")
    study.bury(watch)
    study.bury(watch)
    assert complete_trials(study)[claim.key] == 1
    assert study.records() == [record(claim.key)]


def test_a_claim_that_was_never_signed_is_found(storage, study):
    trial = study.cells()[study.plan.keys[0]].active
    storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)  # and then it died
    study.bury(Deaths())
    study.top_up()
    assert study.claim("b").key == study.plan.keys[0]


def test_a_cell_that_raises_is_given_up_after_three_attempts(study):
    key = study.plan.keys[0]
    for attempt in range(ATTEMPTS):
        claim = study.claim("a")
        assert (claim.key, claim.errors) == (key, attempt)
        assert not study.cells()[key].failed
        study.fail(claim, f"error {attempt}")
        study.top_up()
    cell = study.cells()[key]
    assert cell.failed
    assert cell.finished
    assert cell.errors == ["error 0", "error 1", "error 2"]
    assert study.claim("a").key != key
    study.retry_failed()
    assert not study.cells()[key].failed
    claim = next(claim for claim in iter(lambda: study.claim("a"), None) if claim.key == key)
    study.fail(claim, "again")
    assert study.cells()[key].failed
    study.retry_failed()
    study.complete(study.claim("a"), record(key))
    assert complete_trials(study)[key] == 1
    assert not study.cells()[key].failed


def test_what_has_a_checkpoint_here_comes_first_and_elsewhere_last(storage, study):
    there = SweepStudy(storage, "s", grid(), "there")
    first, second = study.claim("a"), there.claim("b")
    study.release(first)
    there.release(second)
    fresh = study.plan.keys[2]
    assert [study.claim("a").key for _ in range(3)] == [first.key, fresh, second.key]


def test_a_study_is_started_once(storage, study):
    with pytest.raises(StudyError, match=r"there already \(0 of 3 runs finished\): give --resume"):
        SweepStudy.open(storage, "s", grid(), "here", resume=False)
    again = SweepStudy.open(storage, "s", grid(), "here", resume=True)
    assert [len(cell.trials) for cell in again.cells().values()] == [1, 1, 1]
    while (claim := again.claim("a")) is not None:
        again.complete(claim, record(claim.key))
    with pytest.raises(StudyError, match=r"there already \(finished\)"):
        SweepStudy.open(storage, "s", grid(), "here", resume=False)


@pytest.mark.parametrize("resume", [False, True])
def test_a_study_of_other_settings(storage, study, resume):
    told = r"other settings: lam was 0.01 0.02 0.03 and is now 0.01 0.05. .*--resume.*--out"
    with pytest.raises(StudyError, match=told):
        SweepStudy.open(storage, "s", grid((0.01, 0.05)), "here", resume=resume)
    assert [len(cell.trials) for cell in study.cells().values()] == [1, 1, 1]
    assert len(study._trials()) == 3
    SweepStudy.open(storage, "s", grid((0.03, 0.02, 0.01)), "here", resume=True)  # the same


def test_a_study_of_someone_else(storage):
    theirs = optuna.create_study(storage=storage, study_name="s", directions=["maximize"] * 2)
    theirs.add_trial(optuna.trial.create_trial(values=[1.0, 2.0]))
    with pytest.raises(StudyError, match="none of pdecay sweep's: give another --study"):
        SweepStudy.open(storage, "s", grid(), "here", resume=True)


def test_a_launcher_that_died_before_it_had_added_anything(storage):
    storage.create_new_study(grid().directions, "s")
    with pytest.raises(StudyError, match="0 of 3 runs finished"):
        SweepStudy.open(storage, "s", grid(), "here", resume=False)
    study = SweepStudy.open(storage, "s", grid(), "here", resume=True)
    assert [len(cell.trials) for cell in study.cells().values()] == [1, 1, 1]


def test_a_launcher_that_died_while_it_added(storage, study):
    other = grid(tuple(0.001 * k for k in range(1, 30)))
    storage.create_new_study(other.directions, "half")
    SweepStudy(storage, "half", other, "here")._settle_plan()  # the plan and the first cell
    again = SweepStudy.open(storage, "half", other, "here", resume=True)
    assert [len(cell.trials) for cell in again.cells().values()] == [1] * 29


def test_of_two_unlike_plans_at_once_the_second_knows(storage):
    one, other = grid(), grid((0.05, 0.06))
    storage.create_new_study(one.directions, "s")
    first, second = (SweepStudy(storage, "s", plan, "here") for plan in (one, other))
    first._trials = second._trials = list  # both look before either has added anything
    for study in (first, second):
        about = study.plan.description
        storage.set_study_user_attr(study._study_id, f"plan {study._digest}", about)
    first._add(first.cells()[one.keys[0]])
    del first._trials
    add = second._add

    def add_and_see(cell):
        trial = add(cell)
        del second._trials
        return trial

    second._add = add_and_see
    with pytest.raises(StudyError, match=r"lam was .* and is now "):
        second._settle_plan()
    first.top_up()
    assert [len(cell.trials) for cell in first.cells().values()] == [1, 1, 1]
    assert first.claim("a").key == one.keys[0]


class Sweeps(RuleBasedStateMachine):
    """Workers and launchers in any order of events that can befall them."""

    def __init__(self):
        super().__init__()
        self.storage = InMemoryStorage()
        self.study = SweepStudy.open(self.storage, "s", grid(), "here", resume=False)
        self.watch = Deaths()
        self.claims = []  # of workers that live, and of those that only seem dead
        self.born = 0

    @rule()
    def claim(self):
        self.born += 1
        claim = self.study.claim(f"worker {self.born}")
        if claim is not None:
            self.claims.append((f"worker {self.born}", claim))

    @rule(which=st.integers(0, 9))
    def die_between_claiming_and_signing(self, which):
        waiting = [
            cell.active
            for cell in self.study.cells().values()
            if not cell.done and cell.active and cell.active.state == TrialState.WAITING
        ]
        if waiting:
            trial = waiting[which % len(waiting)]
            self.storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)

    @rule(which=st.integers(0, 9))
    def seem_dead(self, which):
        if self.claims:
            self.watch.dead.add(self.claims[which % len(self.claims)][0])

    @rule(which=st.integers(0, 9))
    def die(self, which):
        if self.claims:
            self.watch.dead.add(self.claims.pop(which % len(self.claims))[0])

    @rule(which=st.integers(0, 9))
    def die_before_the_last_word(self, which):
        if self.claims:
            name, claim = self.claims.pop(which % len(self.claims))
            self.watch.dead.add(name)
            with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
                self.storage.set_trial_user_attr(claim.trial_id, "record", record(claim.key))

    @rule(which=st.integers(0, 9))
    def complete(self, which):
        if self.claims:
            _, claim = self.claims.pop(which % len(self.claims))
            with contextlib.suppress(LostError):
                self.study.complete(claim, record(claim.key))

    @rule(which=st.integers(0, 9))
    def release(self, which):
        if self.claims:
            self.study.release(self.claims.pop(which % len(self.claims))[1])

    @rule(which=st.integers(0, 2))
    def add_what_another_has_just_added(self, which):
        key = self.study.plan.keys[which]
        if not self.study.cells()[key].done:
            self.study._add(self.study.cells()[key])

    @rule()
    def bury(self):
        self.study.bury(self.watch)

    @rule()
    def top_up(self):
        self.study.top_up()

    @invariant()
    def nothing_is_complete_twice(self):
        assert max(complete_trials(self.study).values()) <= 1

    def teardown(self):
        self.watch.dead.update(name for name, _ in self.claims)  # whoever is left dies, too
        self.study.bury(self.watch)
        self.study.top_up()
        while (claim := self.study.claim("last")) is not None:
            self.study.complete(claim, record(claim.key))
            self.study.top_up()
        assert set(complete_trials(self.study).values()) == {1}
        assert [one["id"] for one in self.study.records()] == sorted(self.study.plan.keys)
        active = (TrialState.WAITING, TrialState.RUNNING)
        assert not [trial for trial in self.study._trials() if trial.state in active]


TestSweeps = Sweeps.TestCase
TestSweeps.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
