"""Ctrl-C during a step acts after it, so that zeros stay zero."""

import contextlib
import itertools
import signal
import threading
import types

import pytest
import torch

import pdecay
from pdecay import Lp
from pdecay._optim import steps
from pdecay._utils import interrupts


class Interrupted(torch.optim.SGD):
    """SGD that receives signals between its update and the hooks after it."""

    numbers = ()

    def step(self, closure=None):
        super().step(closure)
        for number in self.numbers:
            signal.raise_signal(number)


def sparse_optimizer(attach=True):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(20, 20))
    weight.data[:, ::2] = 0
    optimizer = Interrupted([weight], lr=0.1)
    if attach:
        pdecay.attach(optimizer, Lp(1, 1e-3))
    weight.grad = torch.ones_like(weight)
    return weight, optimizer


@pytest.fixture(autouse=True)
def same_handlers():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture
def seconds_pass(monkeypatch):
    """Let two seconds pass between signals."""
    clock = types.SimpleNamespace(monotonic=itertools.count(step=2).__next__)
    monkeypatch.setattr(interrupts, "time", clock)


@contextlib.contextmanager
def handler_of(number, function):
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU"])
def test_checkpoint_that_a_handler_writes_has_the_zeros(name):
    if not hasattr(signal, name):
        pytest.skip(f"no {name} here")
    number, seen = getattr(signal, name), []
    weight, optimizer = sparse_optimizer()
    zeros = weight == 0
    optimizer.numbers = (number,)
    with handler_of(number, lambda *_: seen.append(torch.equal(weight == 0, zeros))):
        optimizer.step()
    assert seen == [True]


def test_different_signals_during_a_step_all_act_after_it():
    weight, optimizer = sparse_optimizer()
    zeros, seen = weight == 0, []
    optimizer.numbers = (signal.SIGINT, signal.SIGTERM)
    with (
        handler_of(signal.SIGTERM, lambda *_: seen.append(torch.equal(weight == 0, zeros))),
        pytest.raises(KeyboardInterrupt),
    ):
        optimizer.step()
    assert seen == [True]


def test_signal_that_a_script_forwards_too_acts_once_after_the_step():
    weight, optimizer = sparse_optimizer()
    zeros, seen = weight == 0, []
    optimizer.numbers = (signal.SIGTERM, signal.SIGTERM)
    with handler_of(signal.SIGTERM, lambda *_: seen.append(torch.equal(weight == 0, zeros))):
        optimizer.step()
    assert seen == [True]


def test_repeated_signal_acts_at_once_and_does_not_cancel_others(seconds_pass):
    _, optimizer = sparse_optimizer()
    seen = []
    optimizer.numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGINT)
    with (
        handler_of(signal.SIGTERM, lambda *_: seen.append("SIGTERM")),
        pytest.raises(KeyboardInterrupt),
    ):
        optimizer.step()
    assert seen == ["SIGTERM"]


@pytest.mark.parametrize("settings", [{"fused": False}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("kind", [pdecay.PAdam, pdecay.PSGD])
def test_ctrl_c_keeps_the_zeros_of_steps_without_hooks(kind, settings, monkeypatch):
    weight, _ = sparse_optimizer(attach=False)
    optimizer = kind([weight], lr=0.1, **settings)
    name = "torch_adamw" if kind is pdecay.PAdam else "torch_sgd"
    update = getattr(steps, name)

    def interrupted(*args, **kwargs):
        update(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(steps, name, interrupted)
    before = weight.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert torch.equal(weight == 0, before == 0)
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("fused", [None, False])
def test_ctrl_c_keeps_the_zeros_of_attach(fused):
    weight, optimizer = sparse_optimizer(attach=False)
    pdecay.attach(optimizer, Lp(1, 1e-3), fused=fused)
    optimizer.numbers = (signal.SIGINT,)
    before = weight.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert torch.equal(weight == 0, before == 0)
    assert not torch.equal(weight, before)


def test_ctrl_c_acts_after_all_hooks():
    _, optimizer = sparse_optimizer()
    target = pdecay.SparsityTarget(optimizer, 0.9, total_steps=20)
    for _ in range(18):  # the ramp ends at step 17
        optimizer.step()
    optimizer.numbers = (signal.SIGINT,)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert target.last_step == 19
    assert target.sparsity == 0.9


def test_ctrl_c_keeps_the_mask_of_gradual_pruning():
    _, optimizer = sparse_optimizer(attach=False)
    pruning = pdecay.GradualMagnitudePruning(optimizer, 0.9, total_steps=10)
    for _ in range(8):
        optimizer.step()
    optimizer.numbers = (signal.SIGINT,)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert pruning.sparsity_now == 0.9


def test_second_ctrl_c_acts_at_once(seconds_pass):
    weight, optimizer = sparse_optimizer()
    optimizer.numbers = (signal.SIGINT, signal.SIGINT)
    before = weight.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert not torch.equal(weight == 0, before == 0)
    optimizer.numbers = ()
    optimizer.step()


def test_handler_of_the_program_is_called_after_the_step():
    weight, optimizer = sparse_optimizer()
    optimizer.numbers = (signal.SIGTERM,)
    zeros, seen = weight == 0, []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(torch.equal(weight == 0, zeros)))
    try:
        optimizer.step()
        assert seen == [True]
        signal.raise_signal(signal.SIGTERM)
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_works_after_a_step_that_raised():
    _, optimizer = sparse_optimizer()

    def fail():
        raise OSError("no data")

    with pytest.raises(OSError, match="no data"):
        optimizer.step(fail)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_before_a_step_raised_is_not_lost():
    weight, optimizer = sparse_optimizer()

    def fail():
        signal.raise_signal(signal.SIGINT)
        raise OSError("no data")

    with pytest.raises(OSError, match="no data"):
        optimizer.step(fail)
    before = weight.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert torch.equal(weight, before)
    optimizer.step()


def test_step_inside_the_closure_of_another_ends_with_the_outer_one():
    weight, optimizer = sparse_optimizer()
    _, inner = sparse_optimizer()
    inner.numbers = (signal.SIGINT,)
    zeros = weight == 0
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(inner.step)
    assert torch.equal(weight == 0, zeros)


def test_steps_in_other_threads_change_no_handlers():
    _, optimizer = sparse_optimizer()
    found = []
    optimizer.register_step_post_hook(lambda *_: found.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    assert {*found} == {signal.getsignal(signal.SIGINT)}  # torch may run hooks of subclasses twice


def test_signal_while_the_handlers_are_restored_is_not_lost(monkeypatch):
    _, optimizer = sparse_optimizer()
    set_handler = interrupts._signal.signal

    def set_late(number, handler):
        if handler is signal.default_int_handler:
            signal.raise_signal(number)
        set_handler(number, handler)

    monkeypatch.setattr(interrupts._signal, "signal", set_late)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()


def test_ctrl_c_works_after_the_handler_of_a_failed_step_was_saved_and_restored():
    _, optimizer = sparse_optimizer()

    def fail():
        raise OSError("no data")

    original = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(OSError, match="no data"):
            optimizer.step(fail)
        saved = signal.signal(signal.SIGINT, lambda *_: None)  # as a training framework does
        optimizer.step()
        signal.signal(signal.SIGINT, saved)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            optimizer.step()
        optimizer.numbers = (signal.SIGINT,)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    finally:
        signal.signal(signal.SIGINT, original)
