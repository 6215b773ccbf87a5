"""Who is held for dead, and when."""

from __future__ import annotations

import pytest
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection

from pdecay.lab.sweep import watch as module
from pdecay.lab.sweep.locks import Presence
from pdecay.lab.sweep.watch import Watch


@pytest.fixture
def clock(monkeypatch):
    """Our own clock, which the test moves."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def trial():
    """A running trial whose attributes can be set."""
    storage = InMemoryStorage()
    number = storage.create_new_trial(storage.create_new_study([StudyDirection.MAXIMIZE]))

    def now(**attributes):
        for name, value in attributes.items():
            storage.set_trial_user_attr(number, name, value)
        return storage.get_trial(number)

    return now


def test_a_worker_of_the_folder_is_known_by_its_lock(tmp_path, trial, clock):
    watch = Watch(tmp_path, grace=90)
    presence = Presence(tmp_path, "w")
    running = trial(worker={"name": "w", "home": "here"})
    assert not watch.is_dead(running)
    clock.now += 10_000  # it may be silent for as long as it likes
    assert not watch.is_dead(running)
    presence._lock.release()
    assert watch.is_dead(running)


def test_a_worker_elsewhere_is_dead_when_it_is_silent(tmp_path, trial, clock):
    watch = Watch(tmp_path, grace=90)
    running = trial(worker={"name": "w", "home": "there"})
    assert not watch.is_dead(running)
    for pulse in range(5):
        clock.now += 80
        running = trial(pulse=pulse)
        assert not watch.is_dead(running)
    clock.now += 89
    assert not watch.is_dead(running)
    clock.now += 2
    assert watch.is_dead(running)


def test_a_claim_must_be_signed_soon(tmp_path, trial, clock):
    watch = Watch(tmp_path, grace=90)
    assert not watch.is_dead(trial())
    clock.now += 9
    assert not watch.is_dead(trial())
    clock.now += 2
    assert watch.is_dead(trial())
    assert not watch.is_dead(trial(worker={"name": "w", "home": "there"}))  # after all
