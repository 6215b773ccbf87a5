"""Sweeps from the command line to the records: results, errors and resuming."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from pdecay.lab.sweep import Grid, SweepError, launcher
from pdecay.lab.sweep import sweep as run_sweep
from pdecay.lab.sweep.storage import open_journal
from pdecay.lab.train import records

TWO = ("--method", "padam", "--lam", "0.01", "0.1", "--steps", 10)


@pytest.fixture
def sweep(processes, tmp_path):
    """Run a sweep in ``tmp_path/sweep``; return its exit code and output."""

    def run(*args):
        log = tmp_path / "log"
        log.write_text("")
        code = processes.launch("--out", tmp_path / "sweep", *args, log=log).join()
        return code, log.read_text()

    return run


def trials(out):
    study = optuna.load_study(study_name="sweep", storage=open_journal(out))
    # Optuna adds an empty trial if another worker took the last one between a check and a call.
    return [trial for trial in study.get_trials(deepcopy=False) if "cell" in trial.user_attrs]


def test_sweep_writes_its_files_and_resumes(sweep, tmp_path, records_of):
    out = tmp_path / "sweep"
    code, shown = sweep(*TWO, "--workers", 2, "--threads", 1)
    assert code == 0, shown
    assert "2/2  padam p=0.8 lam=" in shown
    assert "2 done" in shown
    assert f"records    {out}/records.jsonl" in shown
    found = records_of(out)
    assert [record["id"] for record in found] == sorted(record["id"] for record in found)
    assert sorted(record["settings"]["options"]["lam"] for record in found) == [0.01, 0.1]
    for record in records.read(out / "records.jsonl"):
        assert record["environment"]["threads"] == 1
        (own,) = records.read(out / "runs" / record["id"])
        assert own == record
    done = trials(out)
    assert [trial.state for trial in done] == [TrialState.COMPLETE] * 2
    assert [trial.params["lam"] for trial in done] == [0.01, 0.1]
    by_id = {record["id"]: record["result"] for record in found}
    for trial in done:
        result = by_id[trial.user_attrs["record"]["id"]]
        assert trial.values == [result["accuracy"], result["sparsity"]]

    code, shown = sweep(*TWO)
    assert code == 2
    assert "the study 'sweep' exists (finished): give --resume" in shown
    code, shown = sweep(*TWO[:-2], "--steps", 11, "--resume")
    assert code == 2
    assert "other settings: steps was 10 and is now 11" in shown
    before = (out / "records.jsonl").read_bytes()
    (out / "records.jsonl").unlink()
    code, shown = sweep(*TWO, "--resume")
    assert code == 0
    assert (out / "records.jsonl").read_bytes() == before
    assert len(trials(out)) == 2


def test_search_resumes_with_more_trials(sweep, tmp_path, records_of):
    command = ("--lam", "1e-3:1e-1", "--steps", 5, "--sampler", "tpe", "--objective", "tradeoff")
    code, shown = sweep(*command, "--trials", 3, "--workers", 2)
    assert code == 0, shown
    code, shown = sweep(*command, "--trials", 4, "--resume")
    assert code == 0, shown
    found = records_of(tmp_path / "sweep")
    lams = {record["settings"]["options"]["lam"] for record in found}
    assert len(lams) == 4
    assert all(1e-3 <= lam <= 1e-1 for lam in lams)
    done = trials(tmp_path / "sweep")
    assert {trial.params["lam"] for trial in done} == lams
    tradeoffs = sorted(record["result"]["tradeoff"] for record in found)
    assert sorted(trial.value for trial in done) == tradeoffs


FAULTY = ("--method", "sweep_methods:Faulty", "adamw", "--steps", 5)


def leave_running_trial(out):
    """Add an attempt to a cell that raised, as a killed launcher leaves it."""
    study = optuna.load_study(study_name="sweep", storage=open_journal(out))
    trial = next(trial for trial in trials(out) if "error" in trial.user_attrs)
    trial = copy.deepcopy(trial)
    trial.state, trial.datetime_complete = TrialState.RUNNING, None
    trial.user_attrs["worker"] = {"home": "", "pid": 0, "run": ""}
    study.add_trial(trial)


def test_run_that_raises_is_tried_three_times_and_reported(sweep, tmp_path, records_of):
    out, cure = tmp_path / "sweep", tmp_path / "cure"
    code, shown = sweep(*FAULTY, "--option", f"cure={cure}")
    assert code == 1
    assert shown.count("raised ZeroDivisionError: no luck today") == 3
    assert "1 done, 1 given up" in shown
    name = f"sweep_methods:Faulty how=raise cure={cure} lr=0.003 seed=0"
    assert f"given up   {name}: ZeroDivisionError: no luck today" in shown
    assert 'raise ZeroDivisionError("no luck today")' in (out / "errors.txt").read_text()
    assert [record["settings"]["method"] for record in records_of(out)] == ["adamw"]

    code, shown = sweep(*FAULTY, "--option", f"cure={cure}", "--resume")
    assert code == 1  # not retried without --retry-failed
    assert "raised" not in shown
    cure.write_text("")
    leave_running_trial(out)
    code, shown = sweep(*FAULTY, "--option", f"cure={cure}", "--resume", "--retry-failed")
    assert code == 0, shown
    assert len(records_of(out)) == 2
    assert not (out / "errors.txt").exists()


def test_diverged_run_is_a_result(sweep, tmp_path, records_of):
    code, shown = sweep(*FAULTY, "--option", "how=diverge")
    assert code == 0, shown
    assert "seed=0: diverged" in shown
    assert "1 done, 1 diverged" in shown
    found = {
        record["settings"]["method"]: record["status"] for record in records_of(tmp_path / "sweep")
    }
    assert found == {"sweep_methods:Faulty": "diverged", "adamw": "ok"}
    assert {trial.values[0] for trial in trials(tmp_path / "sweep")} > {0.0}


def test_run_that_kills_its_workers_is_given_up(sweep, tmp_path, records_of):
    code, shown = sweep(*FAULTY, "--option", "how=die")
    assert code == 1
    assert shown.count("a worker died (killed by SIGKILL) at sweep_methods:Faulty how=die") == 9
    assert "10 workers died at it without progress (killed by SIGKILL): is there enough" in shown
    assert [record["settings"]["method"] for record in records_of(tmp_path / "sweep")] == ["adamw"]


def test_ctrl_c_stops_with_checkpoints(sweep, tmp_path, cells, undisturbed, pause, records_of):
    """Use a process group, as in a terminal, where the workers get the signal too."""
    pause(0.05)
    out = tmp_path / "sweep"
    process = start_in_group("--cells", cells, "--workers", 2, "--out", out)
    wait_for_runs(out)
    os.killpg(process.pid, signal.SIGINT)
    shown, _ = process.communicate(timeout=300)
    assert process.returncode == 130, shown
    check_stopped(out, shown)
    pause(0)
    code, shown = sweep("--cells", cells, "--workers", 2, "--resume")
    assert code == 0, shown
    assert records_of(out) == undisturbed
    resumed = [record["timing"]["resumed"] for record in records.read(out / "records.jsonl")]
    assert sum(resumed) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "delay"),
    [("libtorch_cpu", 0), ("study.log", 0), ("forkserver", 0), ("forkserver", 1), ("runs", 0)],
)
def test_ctrl_c_at_the_start_ends_in_one_line(tmp_path, cells, sweep, sign, delay):
    """Interrupt while the launcher imports, the server imports, and the first worker starts."""
    out = tmp_path / "sweep"
    process = start_in_group("--cells", cells, "--workers", 2, "--out", out)
    signs = {
        "libtorch_cpu": lambda: sign in Path(f"/proc/{process.pid}/maps").read_text(),
        "study.log": lambda: (out / sign).exists(),
        "forkserver": lambda: any(sign in command for command in commands(process.pid)),
        "runs": lambda: (out / sign).exists(),
    }
    wait_until(signs[sign])
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    shown, _ = process.communicate(timeout=300)  # waits for the workers' output too
    assert process.returncode == 130, shown
    lines = [line for line in shown.splitlines() if not line.startswith("stopping: ")]
    assert lines in (
        ["stopped; to continue, run the same command with --resume"],
        ["pdecay sweep: error: interrupted"],
    )
    if delay:
        assert sweep("--cells", cells, "--workers", 2, "--resume")[0] == 0


def start_in_group(*args):
    """Start a sweep in a process group, as in a terminal, where Ctrl-C reaches the workers too."""
    command = ["sweep", "digits", "--scale", "quick", *map(str, args)]
    return subprocess.Popen(
        [sys.executable, "-m", "pdecay", *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def commands(group):
    """Return the command lines of the processes of a group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(folder.name)) == group:
                found.append((folder / "cmdline").read_text())
    return found


def test_sigterm_stops_with_checkpoints(processes, tmp_path, cells, pause):
    pause(0.05)
    out, log = tmp_path / "sweep", tmp_path / "log"
    process = processes.launch("--cells", cells, "--workers", 2, "--out", out, log=log)
    wait_for_runs(out)
    process.process.terminate()
    assert process.join() == 130, log.read_text()
    check_stopped(out, log.read_text())


def wait_for_runs(out):
    wait_until(lambda: len(list(out.glob("runs/*/.lock"))) >= 4)
    time.sleep(0.2)


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def check_stopped(out, shown):
    assert "stopping: the workers write checkpoints" in shown
    assert shown.endswith("stopped; to continue, run the same command with --resume\n")
    assert "Traceback" not in shown
    assert list(out.glob("runs/*/checkpoint.pt"))
    assert TrialState.RUNNING not in {trial.state for trial in trials(out)}


def test_error_outside_of_a_run_stops_the_sweep(sweep, tmp_path):
    out = tmp_path / "sweep"
    sweep(*TWO[:-1], 10)
    (out / "study.log.lock").unlink()
    (out / "study.log.lock").mkdir()
    code, shown = sweep(*TWO, "--resume")
    assert code == 2
    assert "Is a directory" in shown
    assert "Traceback" not in shown


def test_worker_that_cannot_run_stops_the_sweep(tmp_path, monkeypatch):
    def cannot_run(job, connection):
        connection.send("Traceback\nOSError: no space left")

    plan = Grid(task="digits", scale="quick", grids=[{"method": ["adamw"]}])
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(launcher, "work", cannot_run)
    monkeypatch.setattr(launcher.multiprocessing, "get_context", lambda method: context)
    monkeypatch.setattr(context, "set_forkserver_preload", lambda names: None)
    with pytest.raises(SweepError, match="a worker cannot run: OSError: no space left"):
        run_sweep(plan, tmp_path / "sweep")


def test_death_of_the_process_that_starts_workers_is_reported(tmp_path, monkeypatch):
    def fail(file):
        raise EOFError("unexpected EOF")  # as Python does

    monkeypatch.setattr(launcher.forkserver, "read_signed", fail)
    plan = Grid(task="digits", scale="quick", grids=[{"method": ["adamw"]}])
    with pytest.raises(SweepError, match="the process that starts workers was killed: is there"):
        run_sweep(plan, tmp_path / "sweep")


@pytest.mark.parametrize("own", [False, True])
def test_current_folder_is_searched_for_modules_only_if_the_launcher_does(tmp_path, own):
    """multiprocessing starts its processes by ``python -c``, which searches the current folder."""
    program, shared = tmp_path / "program.py", tmp_path / "shared"
    program.write_text(
        "import multiprocessing, os, sys, time\n"
        "from multiprocessing import resource_tracker\n"
        "from pdecay.lab.sweep import launcher\n"
        f"sys.path += [os.getcwd()] * {own}\n"
        "launcher._start_server()\n"
        "worker = multiprocessing.get_context('forkserver').Process(target=time.sleep, args=(0,))\n"
        "worker.start()\n"
        "worker.join()\n"
        "resource_tracker._resource_tracker._stop()\n"
    )
    shared.mkdir()
    (shared / "multiprocessing.py").write_text("open('trap', 'w')\n")
    subprocess.run(
        [sys.executable, program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=shared,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert (shared / "trap").exists() == own


def test_folder_of_a_running_sweep_is_locked(sweep, processes, tmp_path, cells, pause):
    pause(0.05)
    out = tmp_path / "sweep"
    running = processes.launch("--cells", cells, "--workers", 2, "--out", out)
    wait_for_runs(out)
    code, shown = sweep("--cells", cells, "--resume")
    assert code == 2
    assert f"another process is using {out}" in shown
    pause(0)
    assert running.join() == 0
