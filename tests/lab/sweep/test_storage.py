"""Storages: a journal that kills cannot lock or break, and clear words about bad URLs."""

from __future__ import annotations

import json
import os
import threading

import optuna
import pytest
import sweep_processes
from optuna.study import StudyDirection
from optuna.trial import TrialState

from pdecay.lab.sweep.locks import Presence, is_dead
from pdecay.lab.sweep.storage import JOURNAL, StorageError, open_journal, open_storage


@pytest.fixture
def journal(tmp_path):
    """A study with one trial, in a journal; its storage and the study's id."""
    storage = open_journal(tmp_path)
    study = storage.create_new_study([StudyDirection.MAXIMIZE], "s")
    storage.create_new_trial(study)
    return storage, study


@pytest.mark.parametrize("cut", [1, 2, 30, 70_000])
def test_a_line_that_was_cut_off_is_mended_by_the_next_writer(tmp_path, journal, cut):
    storage, study = journal
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    # As if a writer were killed within a long line: its start is there, its end is not.
    long = json.dumps({"op_code": 8, "trial_id": 0, "user_attr": {"record": "x" * 80_000}})
    path.write_bytes(whole + long.encode()[:cut])
    assert len(open_journal(tmp_path).get_all_trials(study)) == 1
    storage.set_trial_user_attr(0, "after", 1)
    assert path.read_bytes().startswith(whole + b'{"op_code":8')
    for reader in (storage, open_journal(tmp_path)):
        assert reader.get_all_trials(study)[0].user_attrs == {"after": 1}


def test_a_journal_that_was_cut_off_in_its_first_line(tmp_path):
    (tmp_path / JOURNAL).write_bytes(b'{"op_co')
    storage = open_journal(tmp_path)
    assert storage.get_all_studies() == []
    storage.create_new_study([StudyDirection.MAXIMIZE], "s")
    assert len(open_journal(tmp_path).get_all_studies()) == 1


def test_what_is_no_journal_is_told(tmp_path):
    (tmp_path / JOURNAL).write_text("hello\nworld\n")
    with pytest.raises(StorageError, match="is no Optuna journal, or was altered"):
        open_journal(tmp_path)


def test_a_kill_leaves_no_lock_behind(tmp_path, journal, processes):
    storage, _ = journal
    holder = processes.start(sweep_processes.hold, tmp_path / f"{JOURNAL}.lock")
    assert holder.hear() == "held"
    writer = threading.Thread(target=storage.set_trial_user_attr, args=(0, "a", 1), daemon=True)
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()  # the lock is held
    holder.process.kill()
    writer.join(10)  # Optuna's own would wait for half a minute
    assert not writer.is_alive()
    assert storage.get_trial(0).user_attrs == {"a": 1}
    holder.join()


def test_a_name_without_a_lock_is_a_death(tmp_path):
    assert is_dead(tmp_path, "w") is None
    presence = Presence(tmp_path, "w")
    assert is_dead(tmp_path, "w") is False
    assert (tmp_path / "w").read_text() == f"{os.getpid()}\n"
    presence._lock.release()
    assert is_dead(tmp_path, "w") is True


@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_a_waiting_trial_is_claimed_once(tmp_path, processes, kind):
    url = None if kind == "journal" else f"sqlite:///{tmp_path}/study.db"
    waiting = optuna.trial.create_trial(state=TrialState.WAITING)
    with open_storage(url, tmp_path) as storage:
        study = storage.create_new_study([StudyDirection.MAXIMIZE], "s")
        trials = [storage.create_new_trial(study, waiting) for _ in range(25)]
    workers = [processes.start(sweep_processes.claim_all, url, tmp_path) for _ in range(3)]
    assert [worker.hear() for worker in workers] == ["ready"] * 3
    for worker in workers:
        worker.say("go")
    claimed = [trial for worker in workers for trial in worker.hear()]
    assert sorted(claimed) == trials
    assert [worker.join() for worker in workers] == [0] * 3


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (
            "study.db",
            "must be a database's URL, such as postgresql://user@host/name, got 'study.db'",
        ),
        ("postgresql://me:secret@127.0.0.1:1/x", "connection failed.*is the server up"),
        ("mysql://me:secret@host/x", "install its driver"),
        ("nosuch://me:secret@host/x", "a URL looks like postgresql://"),
        ("postgresql://me:secret@host:port/x", "a URL looks like postgresql://"),
        ("sqlite:////no/such/folder/x.db", "unable to open database file"),
    ],
)
def test_a_bad_url_is_told_without_its_password(tmp_path, url, told):
    with pytest.raises(StorageError, match=told) as caught, open_storage(url, tmp_path):
        pass
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
