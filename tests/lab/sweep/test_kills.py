"""A sweep that is killed twenty times at random moments writes the same records."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

from sweep_processes import workers_of

KILLS = 20


def test_twenty_kills_change_no_record(
    processes, cells, undisturbed, slowness, pause, tmp_path, records_of, each_cell_once
):
    out, log = tmp_path / "sweep", tmp_path / "log"
    command = ("--cells", cells, "--workers", 2, "--checkpoint-every", "0.1", "--out", out)
    pause(0.06 * slowness)
    dice = random.Random(0)
    launcher = processes.launch(*command, log=log)
    killed = {"launcher": 0, "worker": 0}
    while sum(killed.values()) < KILLS:
        time.sleep(dice.uniform(0, 0.5 * slowness))
        assert launcher.process.is_alive(), f"over after {killed}: {log.read_text()}"
        if sum(killed.values()) >= 5 * (killed["launcher"] + 1):  # a quarter of all kills
            launcher.process.kill()
            launcher.join()
            launcher = processes.launch(*command, "--resume", log=log)
            killed["launcher"] += 1
        else:
            workers = workers_of(out)
            for worker in dice.sample(workers, min(len(workers), dice.choice([1, 1, 2]))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                    killed["worker"] += 1
    pause(0)
    assert launcher.join() == 0, log.read_text()
    assert min(killed.values()) > 0
    assert records_of(out) == undisturbed
    each_cell_once(None, out, "sweep", cells=8)


def test_sigterm_to_all_processes_writes_checkpoints(tmp_path):
    command = "sweep digits --method padam --lam 0.01 0.02 --steps 200000 --workers 2"
    launcher = subprocess.Popen(
        [sys.executable, "-m", "pdecay", *command.split(), "--out", tmp_path],
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len([*tmp_path.glob("runs/*/.lock")]) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(launcher.pid, signal.SIGTERM)  # as timeout and job schedulers do
        assert launcher.wait(timeout=60) == 130
    finally:
        launcher.kill()
        launcher.wait()
    assert len([*tmp_path.glob("runs/*/checkpoint.pt")]) == 2
