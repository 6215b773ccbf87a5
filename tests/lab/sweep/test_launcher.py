"""Sweeps from the command line to the records: errors, ends, and going on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from pdecay.lab.sweep.storage import open_journal
from pdecay.lab.train import records

TWO = ("--method", "padam", "--lam", "0.01", "0.1", "--steps", 10)


@pytest.fixture
def sweep(processes, tmp_path):
    """Runs a sweep in ``tmp_path/sweep``; its exit code and what it said."""

    def run(*args):
        log = tmp_path / "log"
        log.write_text("")
        code = processes.launch("--out", tmp_path / "sweep", *args, log=log).join()
        return code, log.read_text()

    return run


def trials(out):
    study = optuna.load_study(study_name="sweep", storage=open_journal(out))
    return study.get_trials(deepcopy=False)


def test_a_sweep_its_files_and_its_end(sweep, tmp_path, records_of):
    out = tmp_path / "sweep"
    code, told = sweep(*TWO, "--workers", 2, "--threads", 1)
    assert code == 0, told
    assert "2/2  padam p=0.8 lam=" in told
    assert "2 done" in told
    assert f"records    {out}/records.jsonl" in told
    found = records_of(out)
    assert [record["id"] for record in found] == sorted(record["id"] for record in found)
    assert sorted(record["settings"]["options"]["lam"] for record in found) == [0.01, 0.1]
    for record in records.read(out / "records.jsonl"):
        assert record["environment"]["threads"] == 1
        (own,) = records.read(out / "runs" / record["id"])
        assert own == record
    assert not list((out / "workers").iterdir())
    done = trials(out)
    assert [trial.state for trial in done] == [TrialState.COMPLETE] * 2
    assert [trial.params["lam"] for trial in done] == [0.01, 0.1]
    by_id = {record["id"]: record["result"] for record in found}
    for trial in done:
        result = by_id[trial.user_attrs["record"]["id"]]
        assert trial.values == [result["accuracy"], result["sparsity"]]

    code, told = sweep(*TWO)
    assert code == 2
    assert "the study 'sweep' is there already (finished): give --resume" in told
    code, told = sweep(*TWO[:-2], "--steps", 11, "--resume")
    assert code == 2
    assert "other settings: steps was 10 and is now 11" in told
    before = (out / "records.jsonl").read_bytes()
    (out / "records.jsonl").unlink()
    code, told = sweep(*TWO, "--resume")
    assert code == 0
    assert (out / "records.jsonl").read_bytes() == before
    assert len(trials(out)) == 2


def test_a_search(sweep, tmp_path, records_of):
    command = ("--lam", "1e-3:1e-1", "--steps", 5, "--sampler", "tpe", "--objective", "tradeoff")
    code, told = sweep(*command, "--trials", 3, "--workers", 2)
    assert code == 0, told
    code, told = sweep(*command, "--trials", 4, "--resume")
    assert code == 0, told
    found = records_of(tmp_path / "sweep")
    lams = {record["settings"]["options"]["lam"] for record in found}
    assert len(lams) == 4
    assert all(1e-3 <= lam <= 1e-1 for lam in lams)
    done = trials(tmp_path / "sweep")
    assert {trial.params["lam"] for trial in done} == lams
    tradeoffs = sorted(record["result"]["tradeoff"] for record in found)
    assert sorted(trial.value for trial in done) == tradeoffs


FAULTY = ("--method", "sweep_methods:Faulty", "adamw", "--steps", 5)


def test_what_raises_is_tried_three_times_and_told(sweep, tmp_path, records_of):
    out, cure = tmp_path / "sweep", tmp_path / "cure"
    code, told = sweep(*FAULTY, "--option", f"cure={cure}")
    assert code == 1
    assert told.count("raised ZeroDivisionError: no luck today") == 3
    assert "1 done, 1 given up" in told
    name = f"sweep_methods:Faulty how=raise cure={cure} lr=0.003 seed=0"
    assert f"given up   {name}: ZeroDivisionError: no luck today" in told
    assert 'raise ZeroDivisionError("no luck today")' in (out / "errors.txt").read_text()
    assert [record["settings"]["method"] for record in records_of(out)] == ["adamw"]

    code, told = sweep(*FAULTY, "--option", f"cure={cure}", "--resume")
    assert code == 1  # it is not tried again unasked
    assert "raised" not in told
    cure.write_text("")
    code, told = sweep(*FAULTY, "--option", f"cure={cure}", "--resume", "--retry-failed")
    assert code == 0, told
    assert len(records_of(out)) == 2
    assert not (out / "errors.txt").exists()


def test_what_diverges_is_a_result(sweep, tmp_path, records_of):
    code, told = sweep(*FAULTY, "--option", "how=diverge")
    assert code == 0, told
    assert "seed=0: diverged" in told
    assert "1 done, 1 diverged" in told
    found = {
        record["settings"]["method"]: record["status"] for record in records_of(tmp_path / "sweep")
    }
    assert found == {"sweep_methods:Faulty": "diverged", "adamw": "ok"}
    assert {trial.values[0] for trial in trials(tmp_path / "sweep")} > {0.0}


def test_what_kills_its_workers_is_given_up(sweep, tmp_path, records_of):
    code, told = sweep(*FAULTY, "--option", "how=die")
    assert code == 1
    assert told.count("a worker was killed by SIGKILL at sweep_methods:Faulty how=die") == 9
    assert (
        "10 workers died at it (killed by SIGKILL) and it got no further: is there memory" in told
    )
    assert [record["settings"]["method"] for record in records_of(tmp_path / "sweep")] == ["adamw"]


def test_ctrl_c_stops_with_checkpoints(sweep, tmp_path, cells, undisturbed, pause, records_of):
    """In a process with a group of its own, as in a terminal, where workers get the signal too."""
    pause(0.05)
    out = tmp_path / "sweep"
    command = ["sweep", "digits", "--scale", "quick", "--cells", str(cells), "--workers", "2"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "pdecay", *command, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    wait_for_runs(out)
    os.killpg(launcher.pid, signal.SIGINT)
    told, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 130, told
    check_stopped(out, told)
    pause(0)
    code, told = sweep("--cells", cells, "--workers", 2, "--resume")
    assert code == 0, told
    assert records_of(out) == undisturbed
    resumed = [record["timing"]["resumed"] for record in records.read(out / "records.jsonl")]
    assert sum(resumed) >= 1


def test_a_polite_kill_is_ctrl_c(processes, tmp_path, cells, pause):
    pause(0.05)
    out, log = tmp_path / "sweep", tmp_path / "log"
    launcher = processes.launch("--cells", cells, "--workers", 2, "--out", out, log=log)
    wait_for_runs(out)
    launcher.process.terminate()
    assert launcher.join() == 130, log.read_text()
    check_stopped(out, log.read_text())


def wait_for_runs(out):
    deadline = time.monotonic() + 300
    while len(list(out.glob("runs/*/.lock"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)


def check_stopped(out, told):
    assert "stopping: the workers write checkpoints" in told
    assert told.endswith("stopped; to go on, run the same command with --resume\n")
    assert "Traceback" not in told
    assert list(out.glob("runs/*/checkpoint.pt"))
    assert not list((out / "workers").iterdir())
    assert TrialState.RUNNING not in {trial.state for trial in trials(out)}


def test_a_worker_that_cannot_work_stops_the_sweep(sweep, tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "workers").write_text("a file, where the workers' folder should be")
    code, told = sweep(*TWO)
    assert code == 2
    assert "a worker cannot work: FileExistsError" in told
    assert "Nothing is lost: --resume goes on" in told
    assert "Traceback" not in told
