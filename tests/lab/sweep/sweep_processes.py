"""What the tests of sweeps run in other processes."""

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
from pdecay.lab.sweep.locks import FileLock, is_dead
from pdecay.lab.sweep.storage import open_storage

_PATIENCE = 300  # seconds; far more than anything takes on a machine that is not busy


class Line:
    """A process and a line to it, which breaks instead of waiting for ever."""

    def __init__(self, context, function, args):
        self._line, theirs = context.Pipe()
        self.process = context.Process(target=function, args=(theirs, *args))
        self.process.start()
        theirs.close()

    def hear(self):
        assert self._line.poll(_PATIENCE), "no word from the other process"
        return self._line.recv()

    def say(self, word):
        self._line.send(word)

    def join(self):
        self.process.join(_PATIENCE)
        assert self.process.exitcode is not None, "the other process does not end"
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
        assert self.start(nothing).join() == 0  # the server's imports are no part of what follows

    def start(self, function, *args):
        return Line(self._context, function, args)

    def launch(self, *args, log=os.devnull):
        """A process that runs ``pdecay sweep digits --scale quick`` with these arguments."""
        command = ["sweep", "digits", "--scale", "quick", *map(str, args)]
        return Line(self._context, launch, (command, str(log), list(sys.path)))


def launch(line, command, log, path):
    sys.path[:] = path
    # We come from a server that has imported everything; let the workers come from it, too.
    server = multiprocessing.forkserver._forkserver
    server.ensure_running = multiprocessing.resource_tracker.ensure_running
    with open(log, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with contextlib.redirect_stdout(os.fdopen(1, "w", buffering=1, closefd=False)):
        code = cli.main(command)
    raise SystemExit(code)


def nothing(line):
    pass


def hold(line, path):
    """Take a lock and keep it."""
    lock = FileLock(Path(path))
    lock.acquire()
    line.send("held")
    time.sleep(600)


def claim_all(line, url, folder):
    """Claim as many trials of the study ``s`` as can be had; say which."""
    with open_storage(url, folder) as storage:
        trials = storage.get_all_trials(storage.get_study_id_from_name("s"))
        line.send("ready")
        line.recv()
        ids = [trial._trial_id for trial in trials]
        line.send([one for one in ids if storage.set_trial_state_values(one, TrialState.RUNNING)])


def workers_of(out):
    """The processes of the workers that have started, also of launchers that are dead."""
    found = []
    for path in out.glob("workers/[!.]*"):
        if is_dead(path.parent, path.name) is False:
            with contextlib.suppress(FileNotFoundError):
                found.append(int(path.read_text()))
    return found
