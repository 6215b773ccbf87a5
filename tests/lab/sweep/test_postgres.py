"""Two hosts' worth of workers on one study in a real PostgreSQL server on loopback."""

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
    """A program of PostgreSQL's, which Debian does not put on the path."""
    found = shutil.which(name)
    if found is None:
        elsewhere = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
        found = str(elsewhere[-1]) if elsewhere else None
    return found


class Server:
    """A server in a folder of its own."""

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
        self._process.send_signal(signal.SIGINT)  # its fast way to go
        self._process.wait(300)

    def remove(self):
        shutil.rmtree(self._folder)


@pytest.fixture(scope="module")
def postgres():
    """A server that lives as long as this module's tests."""
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
    """Starts a launcher in a folder of its own, as on a machine of its own."""

    def start(name, study, *args):
        common = ("--cells", cells, "--storage", server, "--study", study, "--workers", 2)
        log = tmp_path / f"{name}.log"
        return processes.launch(*common, "--out", tmp_path / name, *args, log=log)

    return start


def test_two_hosts_at_once(hosts, server, undisturbed, pause, tmp_path, records_of, each_cell_once):
    """They make the tables of an empty database at once, too."""
    pause(0.02)
    one, other = hosts("one", "both", "--resume"), hosts("other", "both", "--resume")
    logs = [tmp_path / "one.log", tmp_path / "other.log"]
    assert [one.join(), other.join()] == [0, 0], [log.read_text() for log in logs]
    assert records_of(tmp_path / "one") == records_of(tmp_path / "other") == undisturbed
    trials = each_cell_once(server, tmp_path, "both", cells=8)
    claimed = [trial for trial in trials if "worker" in trial.user_attrs]
    assert len(claimed) == 8  # nothing was begun twice
    homes = {trial.user_attrs["worker"]["home"].rpartition("/")[2] for trial in claimed}
    assert homes == {"one", "other"}
    here = [{path.name for path in (tmp_path / name / "runs").iterdir()} for name in homes]
    assert not here[0] & here[1]
    assert hosts("third", "both").join() == 2
    told = (tmp_path / "third.log").read_text()
    assert "the study 'both' is there already (finished): give --resume" in told


def test_a_host_that_dies(hosts, server, undisturbed, pause, tmp_path, records_of, each_cell_once):
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
    # The dead one comes back, and has nothing left to do but to write the records.
    assert hosts("one", "dying", "--grace", 2, "--resume").join() == 0
    assert records_of(tmp_path / "one") == undisturbed


def test_a_host_that_sleeps(
    hosts, server, undisturbed, pause, tmp_path, records_of, each_cell_once
):
    """It is held for dead, its cells are run elsewhere, and its own results come too late."""
    pause(0.05)
    one = hosts("one", "sleeping", "--grace", 2)
    wait_for_claims(tmp_path / "one")
    sleepers = [one.process.pid, *workers_of(tmp_path / "one")]
    for process in sleepers:
        os.kill(process, signal.SIGSTOP)
    pause(0)
    assert hosts("other", "sleeping", "--grace", 2, "--resume").join() == 0
    for process in sleepers:
        os.kill(process, signal.SIGCONT)
    assert one.join() == 0, (tmp_path / "one.log").read_text()
    assert records_of(tmp_path / "one") == records_of(tmp_path / "other") == undisturbed
    each_cell_once(server, tmp_path, "sleeping", cells=8)


def test_a_database_that_goes_away(
    postgres, hosts, server, undisturbed, pause, tmp_path, records_of, each_cell_once
):
    pause(0.05)
    launcher = hosts("one", "away")
    wait_for_claims(tmp_path / "one")
    postgres.stop()
    time.sleep(2.5)
    postgres.start()
    pause(0)
    log = tmp_path / "one.log"
    assert launcher.join() == 0, log.read_text()
    assert log.read_text().count("no answer from the study, the runs go on: ") == 1
    assert "Traceback" not in log.read_text()
    assert records_of(tmp_path / "one") == undisturbed
    each_cell_once(server, tmp_path, "away", cells=8)


def test_a_long_record_and_the_drivers_own_name(server, tmp_path):
    """Optuna's columns have no limit that a record of many layers would meet."""
    record = {"layers": ["x" * 100] * 20_000}
    with open_storage(server.replace("postgresql:", "postgresql+psycopg:"), tmp_path) as storage:
        trial = storage.create_new_trial(storage.create_new_study([], "long"))
        storage.set_trial_user_attr(trial, "record", record)
    with open_storage(server, tmp_path) as storage:
        assert storage.get_trial(trial).user_attrs["record"] == record


def wait_for_claims(out):
    deadline = time.monotonic() + 300
    while len(list(out.glob("runs/*/.lock"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
