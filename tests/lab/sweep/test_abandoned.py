"""Abandoned trials: which running trials count as abandoned, and what happens to their cells."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState
from rich.console import Console

from pdecay.lab.sweep import Grid
from pdecay.lab.sweep import launcher as module
from pdecay.lab.sweep.launcher import Launcher
from pdecay.lab.sweep.study import SweepStudy
from pdecay.lab.sweep.worker import Job
from pdecay.lab.train import records


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
def launcher(tmp_path, monkeypatch):
    """A launcher of a study with two cells, without workers, whose records need no schema."""
    monkeypatch.setattr(records, "write", lambda path, found: Path(path).write_text(str(found)))
    axes = {"method": ["padam"], "lam": [0.01, 0.02]}
    plan = Grid(task="digits", scale="quick", grids=[axes])
    job = Job(plan, None, "s", tmp_path, 1, None, 30.0, 90.0)
    study = SweepStudy.open(InMemoryStorage(), "s", plan, resume=False)
    return Launcher(job, study, 1, Console(file=io.StringIO()))


@pytest.fixture
def shown(launcher):
    """Return the printed lines."""
    return lambda: launcher._progress.console.file.getvalue()


def take(launcher, *, pid=7, home=None):
    trial = launcher._study.optuna.ask()
    if pid is not None:
        trial.set_user_attr(
            "worker",
            {"home": home or launcher._job.home, "pid": pid, "run": trial.user_attrs["cell"]},
        )
    return trial


def states(launcher, trial):
    cell = launcher._study.cells()[trial.user_attrs["cell"]]
    return [one.state for one in cell.trials]


def test_trial_of_a_live_worker_is_kept(launcher):
    trial = take(launcher)
    launcher.workers[7] = None
    launcher.look()
    assert states(launcher, trial) == [TrialState.RUNNING]


def test_trial_of_a_dead_worker_is_queued_again(launcher, shown):
    trial = take(launcher)
    launcher.exits[7] = "killed by SIGKILL"
    launcher.look()
    assert states(launcher, trial) == [TrialState.FAIL, TrialState.WAITING]
    assert shown() == (
        "a worker died (killed by SIGKILL) at padam p=0.8 lam=0.01 lr=0.003 seed=0: retry\n"
    )


def test_trial_of_an_earlier_launcher_is_queued_again_silently(launcher, shown):
    trial = take(launcher, home="the folder's earlier name")
    launcher.look()
    assert states(launcher, trial) == [TrialState.FAIL, TrialState.WAITING]
    assert not shown()


def test_trial_of_another_machine_is_left_to_the_heartbeat(launcher):
    object.__setattr__(launcher._job, "storage", "postgresql://host/name")
    trial = take(launcher, home="there")
    launcher.look()
    assert states(launcher, trial) == [TrialState.RUNNING]


def test_trial_without_a_mark_is_abandoned_after_a_while(launcher, clock):
    trial = take(launcher, pid=None)
    launcher.look()
    clock.now += 29
    launcher.look()
    assert states(launcher, trial) == [TrialState.RUNNING]
    clock.now += 2
    launcher.look()
    assert states(launcher, trial) == [TrialState.FAIL, TrialState.WAITING]


def test_result_of_a_worker_that_died_after_its_work_is_kept(launcher):
    trial = take(launcher)
    result = {"accuracy": 90.0, "sparsity": 0.5, "tradeoff": 90.5}
    record = {"id": trial.user_attrs["cell"], "status": "ok", "result": result}
    trial.set_user_attr("record", record)
    launcher.look()
    assert states(launcher, trial) == [TrialState.COMPLETE]
    assert launcher.records == [record]
    assert launcher.finished == {record["id"]}


def test_new_checkpoint_resets_the_count_of_deaths(launcher):
    key = launcher._study.plan.keys[0]
    checkpoint = launcher._job.run_folder(key) / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True)
    for attempt in range(30):
        trial = take(launcher, pid=attempt)
        while trial.user_attrs["cell"] != key:
            trial = take(launcher, pid=attempt)
        if attempt < 20 and attempt % 9 == 0:
            checkpoint.touch()
            os.utime(checkpoint, ns=(attempt, attempt))
        launcher.exits[attempt] = "killed by SIGKILL"
        launcher.look()
        if key in launcher.finished:
            break
    assert attempt == 18 + 9
    (cell,) = [cell for cell in launcher.cells if cell.key == key]
    assert cell.failed
    assert cell.errors == [
        "10 workers died at it without progress (killed by SIGKILL): is there enough memory?"
    ]
