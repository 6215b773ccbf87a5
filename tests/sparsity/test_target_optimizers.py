"""Tests of SparsityTarget on several optimizers, and on wrapped ones."""

import copy

import pytest
import pytorch_optimizer
import torch
from torch import nn

import pdecay
from pdecay import Lp, PAdam, SparsityTarget, attach, doctor, freeze_zeros
from tests.sparsity.training import (
    STEPS,
    assert_equal,
    build,
    loss_of,
    padam,
    size,
    train,
    weights,
    zeros,
)


class Wrapper(torch.optim.Optimizer):
    """A wrapper as accelerate's: an Optimizer by type that never ran ``Optimizer.__init__``."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.optimizer.step(closure)


class TestWrappers:
    def test_target_and_freeze(self):
        model = build()
        wrapper = Wrapper(padam(model))
        target = SparsityTarget(wrapper, 0.9, STEPS)
        train(model, wrapper)
        assert target.sparsity == pytest.approx(0.9, abs=0.002)
        freeze_zeros(Wrapper(wrapper))

    def test_attach_pruning_schedule_doctor_and_sparsity(self):
        model = build()
        wrapper = Wrapper(torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0))
        assert attach(wrapper, Lp(0.8, 1e-3)).optimizer is wrapper.optimizer
        assert pdecay.GradualMagnitudePruning(wrapper, 0.5, STEPS).optimizer is wrapper.optimizer
        assert pdecay.LamSchedule(wrapper, [(0, 1.0)]).optimizer is wrapper.optimizer
        assert doctor(model, wrapper) == []
        assert pdecay.sparsity(model, optimizer=wrapper).layers[0].decayed

    def test_wrapper_that_undoes_zeros_warns(self):
        model = build()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
        attach(inner, Lp(0.8, 1e-3))
        SparsityTarget(inner, 0.9, STEPS)
        with pytest.warns(UserWarning, match="that were zero are not zero any more") as caught:
            train(model, pytorch_optimizer.Lookahead(inner, k=5))
        assert len(caught) == 1

    @pytest.mark.parametrize("call", [freeze_zeros, lambda one: SparsityTarget(one, 0.9, STEPS)])
    def test_schedule_free_optimizer_is_refused(self, call):
        optimizer = pytorch_optimizer.ScheduleFreeAdamW(build().parameters())
        attach(optimizer, Lp(0.8, 1e-3))
        with pytest.raises(ValueError, match="ScheduleFreeAdamW evaluates the model with averages"):
            call(optimizer)

    @pytest.mark.parametrize("call", [freeze_zeros, lambda one: SparsityTarget(one, 0.9, STEPS)])
    def test_schedule_free_wrapper_is_refused(self, call):
        optimizer = pytorch_optimizer.ScheduleFreeWrapper(padam(build()))
        with pytest.raises(ValueError, match="ScheduleFreeWrapper evaluates the model with aver"):
            call(optimizer)

    def test_zeros_that_are_lost_after_the_ramp_warn(self):
        model = build()
        optimizer = padam(model)
        SparsityTarget(optimizer, 0.9, STEPS)
        train(model, optimizer, STEPS - 5)
        with torch.no_grad():
            model[0].weight[:, 0] = 0.1
        with pytest.warns(UserWarning, match=rf"before step {STEPS - 4}.*writes to the weights"):
            train(model, optimizer, STEPS, start=STEPS - 5)

    def test_optimizer_that_moves_weights_at_a_learning_rate_of_0_warns(self):
        model = build()
        optimizer = torch.optim.ASGD(model.parameters(), lr=0.1)  # its step size lags behind lr
        attach(optimizer, Lp(0.8, 1))
        SparsityTarget(optimizer, 0.9, STEPS)
        train(model, optimizer, STEPS - 5)
        optimizer.param_groups[0]["lr"] = 0.0
        with pytest.warns(UserWarning, match="an optimizer that moves weights at lr = 0"):
            train(model, optimizer, STEPS, start=STEPS - 5)


class TestSeveralOptimizers:
    def make(self, model):
        """One optimizer for each parameter, stepped in the backward pass."""
        optimizers = {param: PAdam([param], lr=1e-2, decay=Lp(0.8, 1)) for param in weights(model)}

        def step(param):
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in optimizers:
            param.register_post_accumulate_grad_hook(step)
        return list(optimizers.values())

    def run(self, model, start=0, stop=STEPS):
        for step in range(start, stop):
            loss_of(model, step).backward()

    def test_one_optimizer_for_each_parameter(self):
        model = build()
        target = SparsityTarget(self.make(model), 0.75, STEPS)
        self.run(model)
        assert target.last_step == STEPS
        assert zeros(weights(model)) == 0.75 * size(weights(model))

    def test_resume_is_exact(self):
        whole = build()
        optimizers = self.make(whole)
        SparsityTarget(optimizers, 0.75, STEPS)
        self.run(whole, stop=20)
        model = build()
        model.load_state_dict(whole.state_dict())
        resumed = self.make(model)
        target = SparsityTarget(resumed, 0.75, STEPS)
        for one, other in zip(resumed, optimizers, strict=True):
            one.load_state_dict(copy.deepcopy(other.state_dict()))
        assert target.last_step == 20
        self.run(whole, start=20)
        self.run(model, start=20)
        assert_equal(model, whole)

    def test_optimizer_that_never_steps_does_not_block_the_others(self):
        model = build()
        unused = nn.Parameter(torch.randn(4, 4))
        optimizers = [*self.make(model), PAdam([unused], decay=Lp(0.8, 1))]
        target = SparsityTarget(optimizers, 0.75, STEPS)
        self.run(model)
        assert target.last_step == STEPS - 1  # the last step may still be incomplete
        assert target.sparsity == 0.75

    @pytest.mark.parametrize("rank", ["adaptive", "magnitude"])
    @pytest.mark.parametrize("stop", [None, 12, 20])
    def test_parameters_that_are_frozen_while_others_step(self, rank, stop):
        """As in the usual training of a GAN, and with Lightning's ``toggle_optimizer``."""

        def start():
            model = build()
            optimizers = [PAdam([w], lr=1e-2, decay=Lp(0.8, 1)) for w in weights(model)]
            return model, optimizers, SparsityTarget(optimizers, 0.75, STEPS, rank=rank, pull=0)

        def run(model, optimizers, steps, *, freeze):
            for step in steps:
                for own, optimizer in zip(weights(model), optimizers, strict=True):
                    for weight in weights(model):
                        weight.requires_grad_(weight is own or not freeze)
                    if step % 3 and own is weights(model)[0]:
                        continue  # it steps less often than the other one
                    model.zero_grad()
                    loss_of(model, step).backward()
                    optimizer.step()

        expected, optimizers, _ = start()
        run(expected, optimizers, range(STEPS), freeze=False)
        model, optimizers, target = start()
        run(model, optimizers, range(stop or STEPS), freeze=True)
        if stop:
            saved = copy.deepcopy([model.state_dict(), *(one.state_dict() for one in optimizers)])
            model, optimizers, target = start()
            for one, state in zip([model, *optimizers], saved, strict=True):
                one.load_state_dict(state)
            run(model, optimizers, range(stop, STEPS), freeze=True)
        assert_equal(model, expected)
        assert target.sparsity == 0.75
        assert zeros(weights(model)) == 0.75 * size(weights(model))

    def test_freeze_zeros_and_errors(self):
        optimizers = self.make(build())
        freeze_zeros(optimizers)
        assert all(one.param_groups[0]["decay_scale"] > 0 for one in optimizers)
        with pytest.raises(ValueError, match="the list of optimizers is empty"):
            SparsityTarget([], 0.5, STEPS)


@pytest.mark.parametrize("kind", [pytorch_optimizer.LOMO, pytorch_optimizer.AdaLOMO])
def test_optimizers_that_update_in_the_backward_pass_are_refused(kind):
    optimizer = kind(build(), lr=1e-2)
    with pytest.raises(TypeError, match=r"updates the weights in fused_backward\(\)"):
        attach(optimizer, Lp(0.8, 1e-2))
    with pytest.raises(TypeError, match=r"where GradualMagnitudePruning acts"):
        pdecay.GradualMagnitudePruning(optimizer, 0.9, STEPS)


@pytest.mark.parametrize("rank", ["adaptive", "magnitude"])
def test_parameters_of_two_optimizers_count_once(rank):
    torch.manual_seed(0)
    encoder, heads = nn.Linear(16, 32), [nn.Linear(32, 4), nn.Linear(32, 4)]
    optimizers = [PAdam([*encoder.parameters(), *head.parameters()], lr=1e-2) for head in heads]
    target = SparsityTarget(optimizers, 0.5, STEPS, rank=rank)
    for _ in range(STEPS):
        x = torch.randn(32, 16)
        for head, optimizer in zip(heads, optimizers, strict=True):
            optimizer.zero_grad()
            output = head(encoder(x).relu())
            nn.functional.cross_entropy(output, x[:, :4].argmax(1)).backward()
            optimizer.step()
    whole = nn.ModuleList([encoder, *heads])
    assert target.sparsity == pdecay.sparsity(whole, 0).total == 0.5


@pytest.mark.parametrize("make", ["PAdam", "attach"])
@pytest.mark.parametrize("pull", [0, 1])
@pytest.mark.parametrize("frequencies", [(2, 1), (1, 3)])
def test_optimizers_that_step_at_different_frequencies_reach_the_target(make, pull, frequencies):
    model = build()
    optimizers = []
    for weight in weights(model):
        cls = PAdam if make == "PAdam" else torch.optim.Adam
        optimizers.append(cls([weight], lr=1e-2))
        if make == "attach":
            attach(optimizers[-1], Lp(0.8, 1e-2))
    target = SparsityTarget(optimizers, 0.75, 20 * max(frequencies), pull=pull)
    for step in range(20):
        for optimizer, frequency in zip(optimizers, frequencies, strict=True):
            for _ in range(frequency):
                before = zeros(weights(model))
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
                assert zeros(weights(model)) >= before or target.last_step < 3
    assert zeros(weights(model)) >= round(0.75 * size(weights(model)))


def test_last_step_that_one_of_the_optimizers_skips_reaches_the_target():
    model = build()
    optimizers = [PAdam([weight], lr=1e-2) for weight in weights(model)]
    target = SparsityTarget(optimizers, 0.75, 20, end=1.0, pull=1.0)
    for step in range(20):
        for optimizer, frequency in zip(optimizers, (1, 3), strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step % frequency == 0:
                optimizer.step()
    assert target.sparsity == 0.75
