"""Fixtures of the sweep tests: other processes, slow methods, and the expected records."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

# Other processes import the functions that they run by module name.
sys.path.append(str(Path(__file__).parent))

import sweep_processes
from sweep_methods import PAUSE

from pdecay.lab.sweep.storage import open_storage
from pdecay.lab.train import records

# Real methods, and one that is slow when a test needs it.
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
    """The file from which the slow method reads its pause; processes inherit its path."""
    path = tmp_path_factory.mktemp("pause") / "seconds"
    path.write_text("0")
    os.environ[PAUSE] = str(path)
    yield path
    del os.environ[PAUSE]


@pytest.fixture
def pause(pause_file):
    """Set the seconds that each step of the slow method waits."""
    yield lambda seconds: pause_file.write_text(str(seconds))
    pause_file.write_text("0")


@pytest.fixture(scope="session")
def processes(pause_file):
    """Start functions of ``sweep_processes`` and whole sweeps in other processes."""
    return sweep_processes.Processes()


@pytest.fixture(scope="session")
def cells(tmp_path_factory):
    """A file of eight cells."""
    path = tmp_path_factory.mktemp("cells") / "cells.toml"
    path.write_text(CELLS)
    return path


@pytest.fixture(scope="session")
def undisturbed_sweep(processes, cells, tmp_path_factory):
    """The records of an uninterrupted sweep over the eight cells, and its seconds."""
    out = tmp_path_factory.mktemp("undisturbed")
    log = out / "log"
    began = time.monotonic()
    launcher = processes.launch("--cells", cells, "--workers", 2, "--out", out / "sweep", log=log)
    assert launcher.join() == 0, log.read_text()
    return essences(out / "sweep"), time.monotonic() - began


@pytest.fixture(scope="session")
def undisturbed(undisturbed_sweep):
    """The records of an uninterrupted sweep."""
    return undisturbed_sweep[0]


@pytest.fixture(scope="session")
def slowness(undisturbed_sweep):
    """The factor by which this machine is slower than one that runs a cell in half a second."""
    return max(1.0, undisturbed_sweep[1] / 4)


@pytest.fixture
def records_of():
    """Read the records of a sweep's folder, without their environment and timing."""
    return essences


@pytest.fixture
def each_cell_once():
    """Check that each cell of a study is complete once and that no trial is unfinished."""
    return check_each_cell_once


def essences(out):
    """Return the records in a sweep's file, including duplicates."""
    lines = (out / "records.jsonl").read_text().splitlines()
    return [records.essence(json.loads(line)) for line in lines]


def check_each_cell_once(url, out, name, cells):
    with open_storage(url, out) as storage:
        trials = optuna.load_study(study_name=name, storage=storage).get_trials(deepcopy=False)
    complete = [t.user_attrs["cell"] for t in trials if t.state == TrialState.COMPLETE]
    assert len(complete) == len(set(complete)) == cells
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.FAIL}
    assert not any("error" in trial.user_attrs for trial in trials)
    return trials
