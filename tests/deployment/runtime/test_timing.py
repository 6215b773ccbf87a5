"""Ratios that interruptions do not change, and the number of threads on a busy machine."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import nn

from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.runtime import timing
from pdecay.deployment.runtime.model_choice import time_models
from pdecay.deployment.runtime.timing import interleaved, usable_threads
from pdecay.lab.machine import use_threads


class Machine:
    """A clock that only advances when functions run; another process interrupts some calls."""

    def __init__(self, interrupts=lambda count: False):
        self.now = 0.0
        self.cpu = 0.0  # this thread's CPU time
        self.interruptions = 0
        self.calls = itertools.count()
        self.interrupts = interrupts

    def work(self, seconds):
        def run():
            self.now += seconds
            self.cpu += seconds
            if self.interrupts(next(self.calls)):
                self.now += 50e-3
                self.interruptions += 1

        return run


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(timing.time, "thread_time", lambda: machine.cpu)
    monkeypatch.setattr(timing, "_interruptions", lambda: machine.interruptions)
    with use_threads(1):
        yield machine


def test_idle_machine(machine):
    result = interleaved([machine.work(3e-3), machine.work(1e-3)])
    assert result.seconds == pytest.approx((3e-3, 1e-3))
    assert result.spread == pytest.approx(0, abs=1e-9)
    assert not result.is_uncertain


def test_interruptions_are_not_counted(machine):
    machine.interrupts = lambda count: True
    result = interleaved([machine.work(30e-3), machine.work(1e-3)], limit=5.0)
    assert result.seconds == pytest.approx((30e-3, 1e-3))
    assert not result.is_uncertain


def test_few_interruptions_are_ignored_if_they_are_unknown(machine, monkeypatch):
    monkeypatch.setattr(timing, "_interruptions", lambda: 0)  # Windows
    machine.interrupts = lambda count: count % 3 != 0
    result = interleaved([machine.work(3e-3), machine.work(1e-3)], limit=5.0)
    assert result.seconds == pytest.approx((3e-3, 1e-3))


def test_waiting_is_counted(machine):
    def wait():
        machine.now += 2e-3
        machine.cpu += 1e-6

    assert interleaved([wait]).seconds == pytest.approx((2e-3,))


def test_cpu_time_of_one_of_several_threads_is_not_used(machine, monkeypatch):
    machine.interrupts = lambda count: True
    monkeypatch.setattr(timing.torch, "get_num_threads", lambda: 2)
    assert interleaved([machine.work(1e-3)]).seconds == pytest.approx((51e-3,))


def test_result_is_that_of_undisturbed_calls(machine):
    """Another process uses the cache most of the time, and slows down one of the functions."""
    slowdowns = itertools.cycle([1, *[2] * 10])

    def slowed():
        machine.now += 3e-3 * next(slowdowns)

    result = interleaved([slowed, machine.work(1e-3)], seconds=2.0, turn=50e-3)
    assert result.seconds == pytest.approx((3e-3, 1e-3))
    assert result.medians == pytest.approx((6e-3, 1e-3))


def test_drift_is_uncertain(machine):
    def drifting():
        machine.now += 1e-3 * (1 if machine.now < 0.5 else 1.5)

    result = interleaved([drifting, machine.work(1e-3)], seconds=1.0)
    assert result.spread == pytest.approx(0.5)
    assert result.is_uncertain


def test_measurement_ends_at_the_limit(machine):
    seconds = iter(itertools.cycle([1e-3, 9e-3, 2e-3, 5e-3, 30e-3]))

    def varies():
        machine.now += next(seconds)

    interleaved([machine.work(1e-3), varies], rounds=1000, limit=0.5)
    assert machine.now < 0.7
    machine.now = 0.0
    result = interleaved([machine.work(1.0)], rounds=7, limit=0.5)
    assert machine.now == pytest.approx(2.0)  # one untimed call and one round
    assert result.is_uncertain


def test_models_are_timed_with_warm_caches(machine):
    running = None

    class Model(nn.Module):
        """Its weights are evicted from the cache while another model runs."""

        def __init__(self, seconds, cold_calls):
            super().__init__()
            self.seconds = seconds
            self.cold_calls = cold_calls

        def forward(self, x):
            nonlocal running
            if running is not self:
                running, self.calls = self, 0
            machine.now += self.seconds * (2 if self.calls < self.cold_calls else 1)
            self.calls += 1
            return x

    models = {"dense": Model(6e-4, cold_calls=8), "sparse": Model(5e-5, cold_calls=0)}
    times, medians, measured = time_models(models, Inputs.of(torch.zeros(1)), 1.5, lambda *_: None)
    assert times == pytest.approx({"dense": 6e-4, "sparse": 5e-5})
    assert medians == pytest.approx(times)
    assert not measured.is_uncertain


def test_real_clock():
    slow, fast = interleaved([lambda: time.sleep(3e-3), lambda: time.sleep(1e-3)]).seconds
    assert slow > fast > 0


@pytest.mark.parametrize(("waiting", "expected"), [(0.0, 2), (20e-6, 2), (5e-3, 1)])
def test_one_thread_is_used_while_threads_wait(machine, monkeypatch, waiting, expected):
    threads = 2
    waits = itertools.cycle([True, False, False, False])

    def set_num_threads(count):
        nonlocal threads
        threads = count

    def durations_of_sin(_, seconds):
        times = []
        while sum(times) < seconds:
            times.append(100e-6 / threads + (waiting if threads > 1 and next(waits) else 0.0))
        machine.now += sum(times)
        return times

    monkeypatch.setattr(timing.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(timing.torch, "set_num_threads", set_num_threads)
    monkeypatch.setattr(timing, "_durations", durations_of_sin)
    with usable_threads(0.4) as used:
        assert used == threads == expected
    assert threads == 2
    assert machine.now < 0.5
    with usable_threads(0.0) as used:  # not checked
        assert used == 2
