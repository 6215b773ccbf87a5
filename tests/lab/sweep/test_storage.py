"""Storages: kills neither lock nor corrupt a journal; invalid URLs give clear errors."""

from __future__ import annotations

import json
import threading

import optuna
import pytest
import sweep_processes
from optuna.storages._rdb.models import BaseModel
from optuna.study import StudyDirection
from optuna.trial import TrialState

from pdecay.lab.sweep import SweepError
from pdecay.lab.sweep.storage import JOURNAL, open_journal, open_storage


@pytest.fixture
def journal(tmp_path):
    """The storage and id of a study with one trial in a journal."""
    storage = open_journal(tmp_path)
    study = storage.create_new_study([StudyDirection.MAXIMIZE], "s")
    storage.create_new_trial(study)
    return storage, study


@pytest.mark.parametrize("cut", [1, 2, 30, 70_000])
def test_next_writer_removes_half_written_line(tmp_path, journal, cut):
    storage, study = journal
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    # The state after a kill in the middle of a long line.
    long = json.dumps({"op_code": 8, "trial_id": 0, "user_attr": {"record": "x" * 80_000}})
    path.write_bytes(whole + long.encode()[:cut])
    assert len(open_journal(tmp_path).get_all_trials(study)) == 1
    storage.set_trial_user_attr(0, "after", 1)
    assert path.read_bytes().startswith(whole + b'{"op_code":8')
    for reader in (storage, open_journal(tmp_path)):
        assert reader.get_all_trials(study)[0].user_attrs == {"after": 1}


def test_half_written_first_line_is_removed(tmp_path):
    (tmp_path / JOURNAL).write_bytes(b'{"op_co')
    storage = open_journal(tmp_path)
    assert storage.get_all_studies() == []
    storage.create_new_study([StudyDirection.MAXIMIZE], "s")
    assert len(open_journal(tmp_path).get_all_studies()) == 1


def test_file_that_is_not_a_journal_is_reported(tmp_path):
    (tmp_path / JOURNAL).write_text("hello\nworld\n")
    with pytest.raises(SweepError, match="is not an Optuna journal, or was altered"):
        open_journal(tmp_path)


@pytest.mark.parametrize("line", ["[]", "3", "null", "{}", '{"op_code": 99}', "{"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_altered_line_is_reported(tmp_path, journal, line, place):
    path = tmp_path / JOURNAL
    lines = path.read_text().splitlines()
    lines[place : place + 1] = [line]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(SweepError, match="is not an Optuna journal, or was altered"):
        open_journal(tmp_path)


def test_kill_releases_the_journal_lock(tmp_path, journal, processes):
    storage, _ = journal
    holder = processes.start(sweep_processes.hold_lock, tmp_path, f"{JOURNAL}.lock")
    assert holder.receive() == "held"
    writer = threading.Thread(target=storage.set_trial_user_attr, args=(0, "a", 1), daemon=True)
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()  # the lock is held
    holder.process.kill()
    writer.join(10)  # Optuna's own lock would wait for 30 seconds
    assert not writer.is_alive()
    assert storage.get_trial(0).user_attrs == {"a": 1}
    holder.join()


def test_each_waiting_trial_is_claimed_once(tmp_path, processes):
    waiting = optuna.trial.create_trial(state=TrialState.WAITING)
    with open_storage(None, tmp_path) as storage:
        study = storage.create_new_study([StudyDirection.MAXIMIZE], "s")
        trials = [storage.create_new_trial(study, waiting) for _ in range(25)]
    workers = [processes.start(sweep_processes.claim_all, None, tmp_path) for _ in range(3)]
    assert [worker.receive() for worker in workers] == ["ready"] * 3
    for worker in workers:
        worker.send("go")
    claimed = [trial for worker in workers for trial in worker.receive()]
    assert sorted(claimed) == trials
    assert [worker.join() for worker in workers] == [0] * 3


def test_tables_that_another_launcher_creates_at_the_same_time(tmp_path, monkeypatch):
    tables = BaseModel.metadata
    create = tables.create_all
    calls = []

    def create_late(engine):
        """Create the tables; at the first call, after another launcher, but without a check."""
        calls.append(engine)
        if len(calls) == 1:
            create(engine)
            create(engine, checkfirst=False)  # raises "table ... already exists"
        create(engine)

    monkeypatch.setattr(tables, "create_all", create_late)
    with open_storage(f"sqlite:///{tmp_path}/study.db", tmp_path) as storage:
        assert storage.get_all_studies() == []
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "study.db",
            "must be a database URL, such as postgresql://user@host/name, got 'study.db'",
        ),
        ("postgresql://me:secret@127.0.0.1:1/x", "connection failed.*check that the server is up"),
        ("mysql://me:secret@host/x", "install its driver"),
        ("nosuch://me:secret@host/x", "a URL looks like postgresql://"),
        ("postgresql://me:secret@host:port/x", "a URL looks like postgresql://"),
        ("sqlite:////no/such/folder/x.db", "unable to open database file"),
    ],
)
def test_invalid_url_is_reported_without_its_password(tmp_path, url, message):
    with pytest.raises(SweepError, match=message) as caught, open_storage(url, tmp_path):
        pass
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
