"""Functions that the tests of sweeps run in other processes."""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import time
from pathlib import Path

from optuna.trial import TrialState

from pdecay import cli
from pdecay._utils import files
from pdecay.lab.sweep.storage import open_storage

_PATIENCE = 300  # seconds, far more than anything takes on an idle machine


class Child:
    """A process and a connection to it; waiting has a time limit."""

    def __init__(self, context, function, args):
        self._line, theirs = context.Pipe()
        self.process = context.Process(target=function, args=(theirs, *args))
        self.process.start()
        theirs.close()

    def receive(self):
        assert self._line.poll(_PATIENCE), "no message from the other process"
        return self._line.recv()

    def send(self, message):
        self._line.send(message)

    def join(self):
        self.process.join(_PATIENCE)
        assert self.process.exitcode is not None, "the other process did not end"
        return self.process.exitcode


class Processes:
    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            [
                "sweep_processes",
                "pdecay.lab.sweep",
                "pdecay.lab.data.digits",
                "torch._dynamo",
                "rich",
            ]
        )
        assert self.start(nothing).join() == 0  # wait for the server's imports

    def start(self, function, *args):
        return Child(self._context, function, args)

    def launch(self, *args, log=os.devnull):
        """Start a process that runs ``pdecay sweep digits --scale quick`` with these arguments."""
        command = ["sweep", "digits", "--scale", "quick", *map(str, args)]
        return Child(self._context, launch, (command, str(log), list(sys.path)))


def launch(line, command, log, path):
    sys.path[:] = path
    # This process was forked from a server that has imported everything: fork the workers from it.
    server = multiprocessing.forkserver
    start = multiprocessing.resource_tracker.ensure_running
    server.ensure_running = server._forkserver.ensure_running = start
    with open(log, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with contextlib.redirect_stdout(os.fdopen(1, "w", buffering=1, closefd=False)):
        code = cli.main(command)
    raise SystemExit(code)


def nothing(line):
    pass


def hold_lock(line, folder, name):
    """Take a lock and keep it."""
    with files.lock(Path(folder), name):
        line.send("held")
        time.sleep(600)


def claim_all(line, url, folder):
    """Claim as many trials of the study ``s`` as possible and send their ids."""
    with open_storage(url, folder) as storage:
        trials = storage.get_all_trials(storage.get_study_id_from_name("s"))
        line.send("ready")
        line.recv()
        ids = [trial._trial_id for trial in trials]
        line.send([one for one in ids if storage.set_trial_state_values(one, TrialState.RUNNING)])


def workers_of(out):
    """Return the ids of the processes that train in a sweep's folder, also of dead launchers."""
    inodes = {path.stat().st_ino for path in out.glob("runs/*/.lock")}
    found = set()
    for line in Path("/proc/locks").read_text().splitlines():
        fields = [field for field in line.split() if field != "->"]
        pid, inode = int(fields[4]), int(fields[5].rpartition(":")[2])
        if inode in inodes and pid > 0:
            found.add(pid)
    return sorted(found)
