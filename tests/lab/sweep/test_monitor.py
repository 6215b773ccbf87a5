"""The monitor: which running trials are abandoned, and what happens to their cells."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from pdecay.lab.sweep import Grid
from pdecay.lab.sweep import monitor as module
from pdecay.lab.sweep.monitor import Monitor
from pdecay.lab.sweep.study import SweepStudy
from pdecay.lab.sweep.worker import Job
from pdecay.lab.train import records

HOME = "here"


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def said():
    return []


@pytest.fixture
def monitor(tmp_path, monkeypatch, said):
    """A monitor of a study with two cells, in a journal's place, whose records need no schema."""
    monkeypatch.setattr(records, "write", lambda path, found: Path(path).write_text(str(found)))
    axes = {"method": ["padam"], "lam": [0.01, 0.02]}
    plan = Grid(task="digits", scale="quick", grids=[axes])
    job = Job(plan, None, "s", tmp_path, HOME, 1, None, 30.0, 90.0)
    study = SweepStudy.open(InMemoryStorage(), "s", plan, resume=False)
    return Monitor(job, study, said.append)


def take(monitor, *, pid=7, home=HOME):
    trial = monitor._study.optuna.ask()
    if pid is not None:
        trial.set_user_attr("worker", {"home": home, "pid": pid, "run": trial.user_attrs["cell"]})
    return trial


def states(monitor, trial):
    cell = monitor._study.cells()[trial.user_attrs["cell"]]
    return [one.state for one in cell.trials]


def test_trial_of_a_live_worker_is_kept(monitor):
    trial = take(monitor)
    monitor.workers.add(7)
    monitor.look()
    assert states(monitor, trial) == [TrialState.RUNNING]


def test_trial_of_a_dead_worker_is_queued_again(monitor, said):
    trial = take(monitor)
    monitor.exits[7] = "killed by SIGKILL"
    monitor.look()
    assert states(monitor, trial) == [TrialState.FAIL, TrialState.WAITING]
    assert said == [
        "a worker died (killed by SIGKILL) at padam p=0.8 lam=0.01 lr=0.003 seed=0: retry"
    ]


def test_trial_of_an_earlier_launcher_is_queued_again_silently(monitor, said):
    trial = take(monitor, home="the folder's earlier name")
    monitor.look()
    assert states(monitor, trial) == [TrialState.FAIL, TrialState.WAITING]
    assert not said


def test_trial_of_another_machine_is_left_to_the_heartbeat(monitor):
    object.__setattr__(monitor._job, "storage", "postgresql://host/name")
    trial = take(monitor, home="there")
    monitor.look()
    assert states(monitor, trial) == [TrialState.RUNNING]


def test_trial_without_a_mark_is_abandoned_after_a_while(monitor, clock):
    trial = take(monitor, pid=None)
    monitor.look()
    clock.now += 29
    monitor.look()
    assert states(monitor, trial) == [TrialState.RUNNING]
    clock.now += 2
    monitor.look()
    assert states(monitor, trial) == [TrialState.FAIL, TrialState.WAITING]


def test_result_of_a_worker_that_died_after_its_work_is_kept(monitor):
    trial = take(monitor)
    result = {"accuracy": 90.0, "sparsity": 0.5, "tradeoff": 90.5}
    record = {"id": trial.user_attrs["cell"], "status": "ok", "result": result}
    trial.set_user_attr("record", record)
    monitor.look()
    assert states(monitor, trial) == [TrialState.COMPLETE]
    assert monitor.records == [record]
    assert monitor.finished == {record["id"]}


def test_new_checkpoint_resets_the_count_of_deaths(monitor):
    key = monitor._study.plan.keys[0]
    checkpoint = monitor._job.run_folder(key) / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True)
    for attempt in range(30):
        trial = take(monitor, pid=attempt)
        while trial.user_attrs["cell"] != key:
            trial = take(monitor, pid=attempt)
        if attempt < 20 and attempt % 9 == 0:
            checkpoint.touch()
            os.utime(checkpoint, ns=(attempt, attempt))
        monitor.exits[attempt] = "killed by SIGKILL"
        monitor.look()
        if key in monitor.finished:
            break
    assert attempt == 18 + 9
    (cell,) = [cell for cell in monitor.cells if cell.key == key]
    assert cell.failed
    assert cell.errors == [
        "10 workers died at it without progress (killed by SIGKILL): is there enough memory?"
    ]
