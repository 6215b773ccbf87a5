"""What the tests of sweeps share: other processes, slow methods, and the records that must come."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

# Processes find their functions by the names of modules: they must be able to import ours.
sys.path.append(str(Path(__file__).parent))

import sweep_processes
from sweep_methods import PAUSE

from pdecay.lab.sweep.storage import open_storage
from pdecay.lab.train import records

# Real methods, and one that takes its time where a test wants it.
CELLS = """
steps = 40
[[grid]]
method = ["adamw", "gmp"]
[[grid]]
method = "sweep_methods:Slow"
lam = [0.01, 0.03, 0.1]
seed = [0, 1]
"""


@pytest.fixture(scope="session")
def pause_file(tmp_path_factory):
    """The file that the slow method looks into; all processes are told of it when they start."""
    path = tmp_path_factory.mktemp("pause") / "seconds"
    path.write_text("0")
    os.environ[PAUSE] = str(path)
    yield path
    del os.environ[PAUSE]


@pytest.fixture
def pause(pause_file):
    """Makes each step of the slow method take so many seconds more."""
    yield lambda seconds: pause_file.write_text(str(seconds))
    pause_file.write_text("0")


@pytest.fixture(scope="session")
def processes(pause_file):
    """Starts functions of ``sweep_processes`` and whole sweeps in other processes."""
    return sweep_processes.Processes()


@pytest.fixture(scope="session")
def cells(tmp_path_factory):
    """A file of eight cells."""
    path = tmp_path_factory.mktemp("cells") / "cells.toml"
    path.write_text(CELLS)
    return path


@pytest.fixture(scope="session")
def undisturbed_sweep(processes, cells, tmp_path_factory):
    """The records of the eight cells when nothing happens to them, and the seconds they took."""
    out = tmp_path_factory.mktemp("undisturbed")
    log = out / "log"
    began = time.monotonic()
    launcher = processes.launch("--cells", cells, "--workers", 2, "--out", out / "sweep", log=log)
    assert launcher.join() == 0, log.read_text()
    return essences(out / "sweep"), time.monotonic() - began


@pytest.fixture(scope="session")
def undisturbed(undisturbed_sweep):
    """Those records."""
    return undisturbed_sweep[0]


@pytest.fixture(scope="session")
def slowness(undisturbed_sweep):
    """How many times slower this machine is than one where a cell takes half a second."""
    return max(1.0, undisturbed_sweep[1] / 4)


@pytest.fixture
def records_of():
    """Reads the records of a sweep's folder, without where and when they ran."""
    return essences


@pytest.fixture
def each_cell_once():
    """Checks that each cell of a study is complete once, and that nothing is left over."""
    return check_each_cell_once


def essences(out):
    """The records in a sweep's own file, as they are in there."""
    return [records.essence(record) for record in records._read_file(out / "records.jsonl")]


def check_each_cell_once(url, out, name, cells):
    with open_storage(url, out) as storage:
        trials = optuna.load_study(study_name=name, storage=storage).get_trials(deepcopy=False)
    complete = [t.user_attrs["cell"] for t in trials if t.state == TrialState.COMPLETE]
    assert len(complete) == len(set(complete)) == cells
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.FAIL}
    assert not any("error" in trial.user_attrs for trial in trials)
    return trials
