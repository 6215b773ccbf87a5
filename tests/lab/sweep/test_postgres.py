"""Two launchers, as on two hosts, that share a study in a real PostgreSQL server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg
import pytest
from sweep_processes import workers_of

from pdecay.lab.sweep.storage import open_storage


def binary(name):
    """Return the path of a PostgreSQL program; Debian does not put them on the PATH."""
    found = shutil.which(name)
    if found is None:
        elsewhere = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
        found = str(elsewhere[-1]) if elsewhere else None
    return found


class Server:
    """A PostgreSQL server in a temporary folder."""

    def __init__(self, initdb, postgres):
        self._folder = Path(tempfile.mkdtemp(prefix="pdecay-postgres-"))
        # PostgreSQL refuses to run as root.
        nobody = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        self._options = {"cwd": self._folder, **(nobody if os.getuid() == 0 else {})}
        if os.getuid() == 0:
            shutil.chown(self._folder, nobody["user"], nobody["group"])
        data = self._folder / "data"
        command = [initdb, "-D", data, "-U", "pdecay", "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(command, check=True, capture_output=True, **self._options)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        where = ["-h", "127.0.0.1", "-p", str(port), "-k", self._folder]
        self._command = [postgres, "-D", data, *where, "-F"]
        self.url = f"postgresql://pdecay@127.0.0.1:{port}/postgres"
        self.start()

    def start(self):
        log = self._folder / "log"
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                self._command, stdout=file, stderr=file, **self._options
            )
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url).close()
                return
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def stop(self):
        self._process.send_signal(signal.SIGINT)  # a fast shutdown
        self._process.wait(300)

    @contextlib.contextmanager
    def frozen(self):
        """Suspend the server and its connections."""
        processes = [self._process.pid, *_children(self._process.pid)]
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        yield
        for process in reversed(processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    def remove(self):
        shutil.rmtree(self._folder)


def _children(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.fixture(scope="module")
def postgres():
    """A server for the tests of this module."""
    initdb, program = binary("initdb"), binary("postgres")
    if initdb is None or program is None:
        pytest.skip("PostgreSQL IS NOT INSTALLED: sweeps over many machines are NOT TESTED here")
    server = Server(initdb, program)
    yield server
    server.stop()
    server.remove()


@pytest.fixture
def server(postgres):
    return postgres.url


@pytest.fixture
def hosts(processes, server, cells, tmp_path):
    """Start a launcher in its own folder, as on its own machine."""

    def start(name, study, *args):
        common = ("--cells", cells, "--storage", server, "--study", study, "--workers", 2)
        log = tmp_path / f"{name}.log"
        return processes.launch(*common, "--out", tmp_path / name, *args, log=log)

    return start


def test_two_hosts_share_a_study(
    hosts, server, undisturbed, pause, tmp_path, records_of, each_cell_once
):
    """Both also create the tables of an empty database at the same time."""
    pause(0.02)
    one, other = hosts("one", "both", "--resume"), hosts("other", "both", "--resume")
    logs = [tmp_path / "one.log", tmp_path / "other.log"]
    assert [one.join(), other.join()] == [0, 0], [log.read_text() for log in logs]
    assert records_of(tmp_path / "one") == records_of(tmp_path / "other") == undisturbed
    trials = each_cell_once(server, tmp_path, "both", cells=8)
    claimed = [trial for trial in trials if "worker" in trial.user_attrs]
    assert len(claimed) == 8  # no run was started twice
    homes = {trial.user_attrs["worker"]["home"].rpartition("/")[2] for trial in claimed}
    assert homes == {"one", "other"}
    here = [{path.name for path in (tmp_path / name / "runs").iterdir()} for name in homes]
    assert not here[0] & here[1]
    assert hosts("third", "both").join() == 2
    shown = (tmp_path / "third.log").read_text()
    assert "the study 'both' exists (finished): give --resume" in shown


def test_other_host_takes_over_the_runs_of_a_dead_host(
    hosts, server, undisturbed, pause, tmp_path, records_of, each_cell_once
):
    pause(0.05)
    one = hosts("one", "dying", "--grace", 2)
    wait_for_claims(tmp_path / "one")
    other = hosts("other", "dying", "--grace", 2, "--resume")
    one.process.kill()
    for worker in workers_of(tmp_path / "one"):
        os.kill(worker, signal.SIGKILL)
    one.join()
    pause(0)
    assert other.join() == 0, (tmp_path / "other.log").read_text()
    assert records_of(tmp_path / "other") == undisturbed
    each_cell_once(server, tmp_path, "dying", cells=8)
    # The dead host comes back and only writes the records.
    assert hosts("one", "dying", "--grace", 2, "--resume").join() == 0
    assert records_of(tmp_path / "one") == undisturbed


@pytest.mark.parametrize("suspended", [1, 2])
def test_late_results_of_suspended_workers_are_refused(
    hosts, server, undisturbed, pause, tmp_path, records_of, each_cell_once, suspended
):
    """A worker that still runs must not wait for the folder of a suspended one for ever."""
    study = f"suspended-{suspended}"
    pause(0.05)
    one = hosts("one", study, "--grace", 2)
    wait_for_claims(tmp_path / "one")
    # One worker alone may have made both claims: wait until the other one can be suspended, too.
    deadline = time.monotonic() + 60
    while len(workers := workers_of(tmp_path / "one")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    sleepers = [one.process.pid, *workers[:suspended]]
    for process in sleepers:
        os.kill(process, signal.SIGSTOP)
    pause(0)
    assert hosts("other", study, "--grace", 2, "--resume").join() == 0
    for process in sleepers:
        os.kill(process, signal.SIGCONT)
    assert one.join() == 0, (tmp_path / "one.log").read_text()
    assert records_of(tmp_path / "one") == records_of(tmp_path / "other") == undisturbed
    each_cell_once(server, tmp_path, study, cells=8)


def test_runs_continue_while_the_database_is_down(
    postgres, hosts, server, undisturbed, pause, tmp_path, records_of, each_cell_once
):
    pause(0.05)
    launcher = hosts("one", "away")
    wait_for_claims(tmp_path / "one")
    postgres.stop()
    os.kill(workers_of(tmp_path / "one")[0], signal.SIGKILL)  # another one starts meanwhile
    time.sleep(5)
    postgres.start()
    pause(0)
    log = tmp_path / "one.log"
    assert launcher.join() == 0, log.read_text()
    assert log.read_text().count("the study does not answer, runs continue: ") == 1
    assert "Traceback" not in log.read_text()
    assert records_of(tmp_path / "one") == undisturbed
    each_cell_once(server, tmp_path, "away", cells=8)


def test_frozen_database_does_not_block_a_stop(postgres, hosts, server, pause, tmp_path):
    pause(0.05)
    launcher = hosts("one", "frozen")
    wait_for_claims(tmp_path / "one", 4)  # the first two cells have no pause
    with postgres.frozen():
        time.sleep(1.5)  # the next look at the study hangs
        launcher.process.terminate()
        began = time.monotonic()
        assert launcher.join() == 130, (tmp_path / "one.log").read_text()
        assert time.monotonic() - began < 60
    assert list((tmp_path / "one").glob("runs/*/checkpoint.pt"))
    pause(0)
    assert hosts("one", "frozen", "--resume").join() == 0, (tmp_path / "one.log").read_text()


def test_long_record_and_url_with_driver(server, tmp_path):
    """Optuna's columns hold a record of many layers."""
    record = {"layers": ["x" * 100] * 20_000}
    with open_storage(server.replace("postgresql:", "postgresql+psycopg:"), tmp_path) as storage:
        trial = storage.create_new_trial(storage.create_new_study([], "long"))
        storage.set_trial_user_attr(trial, "record", record)
    with open_storage(server, tmp_path) as storage:
        assert storage.get_trial(trial).user_attrs["record"] == record


def wait_for_claims(out, count=2):
    deadline = time.monotonic() + 300
    while len(list(out.glob("runs/*/.lock"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
