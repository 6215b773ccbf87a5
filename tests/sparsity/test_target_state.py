"""Tests of the state of SparsityTarget in the optimizer: counting, parameters, detaching."""

import math
import warnings

import pytest
import torch
from torch import nn

import pdecay
from pdecay import Lp, PAdam, SparsityTarget, attach, doctor, freeze_zeros
from pdecay._core.group_settings import HOLD
from tests.sparsity.training import (
    STEPS,
    attached,
    build,
    loss_of,
    padam,
    size,
    train,
    weights,
    zeros,
)

END = 42  # of the ramp


class TestCounting:
    def test_gradient_accumulation_counts_optimizer_steps(self):
        model = build()
        optimizer = padam(model)
        target = SparsityTarget(optimizer, 0.9, STEPS)
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(4):
                (loss_of(model, 4 * step + micro) / 4).backward()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    target.step()  # old code calls it for each batch
            optimizer.step()
            assert target.last_step == step + 1
            if step + 1 == END // 2:
                assert target.sparsity < 0.8
        assert target.sparsity == pytest.approx(0.9, abs=0.002)

    @pytest.mark.parametrize("fused", [False, True])
    def test_steps_that_a_scaler_skips_do_not_count(self, fused):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0, fused=fused)
        attach(optimizer, Lp(0.8, 1))
        target = SparsityTarget(optimizer, 0.9, STEPS)
        pruned = pdecay.GradualMagnitudePruning(optimizer, 0.5, STEPS)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(10):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step % 2:
                model[0].weight.grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
        assert target.last_step == pruned.last_step == 5

    def test_step_warns_once_and_does_nothing(self):
        optimizer = padam(build())
        target = SparsityTarget(optimizer, 0.9, STEPS)
        with pytest.warns(DeprecationWarning, match="can be removed"):
            target.step()
        target.step()
        target.load_state_dict(target.state_dict())
        assert target.last_step == 0

    def test_nested_step_counts_once(self):
        class Nested(torch.optim.SGD):
            def step(self, closure=None):
                return super().step(closure)

        model = build()
        torch.optim.SGD(model.parameters(), lr=0.1)  # so that SGD's own step has hooks too
        optimizer = Nested(model.parameters(), lr=0.1)
        attach(optimizer, Lp(0.8, 1))
        target = SparsityTarget(optimizer, 0.9, STEPS)
        train(model, optimizer, 3)
        assert target.last_step == 3

    def test_non_finite_float16_weights_are_explained(self):
        weight = nn.Parameter(torch.randn(8, 8).half())
        optimizer = PAdam([weight], lr=1e-2, decay=Lp(0.8, 1))
        SparsityTarget(optimizer, 0.5, 10, start=0.0)
        weight.grad = torch.full_like(weight, math.nan)
        with pytest.warns(UserWarning, match=r"NaN after step 1\. In float16.*16-mixed"):
            optimizer.step()
        optimizer.step()  # warns once

    def test_non_finite_step_does_not_change_the_measured_update(self):
        model = build()
        optimizer = padam(model)
        SparsityTarget(optimizer, 0.9, STEPS)
        train(model, optimizer, 10)
        group = optimizer.param_groups[0]
        measured = group["target_update"]
        weight = weights(model)[0]
        kept = weight.detach().clone()
        optimizer.zero_grad()
        loss_of(model, 10).backward()
        weight.grad.fill_(math.nan)
        with pytest.warns(
            UserWarning, match=r"infinite or NaN after step 11.*clip the gradients"
        ) as caught:
            optimizer.step()
        assert caught[0].filename == __file__
        assert group["target_update"] == measured > 0
        with torch.no_grad():  # the user restores the weights and continues
            weight.copy_(kept)
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[weight][key].zero_()
        train(model, optimizer, start=11)
        assert math.isfinite(group["target_update"])
        assert zeros(weights(model)) == round(0.9 * size(weights(model)))

    def test_steps_that_move_nothing_keep_the_zeros(self):
        model = build()
        optimizer = PAdam(weights(model), lr=1e-2, decay=Lp(0.8, 1))
        SparsityTarget(optimizer, 0.9, STEPS, pull=1.0)
        for _ in range(20):
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            optimizer.step()
        assert optimizer.param_groups[0]["decay_scale"] == HOLD


class TestParameters:
    def test_weights_without_gradient_are_neither_pruned_nor_counted(self):
        model = build()
        model[0].weight.requires_grad_(False)
        before = model[0].weight.clone()
        optimizer = PAdam(model.parameters(), lr=1e-2, decay=Lp(0.8, 1))
        target = SparsityTarget(optimizer, 0.75, STEPS)
        train(model, optimizer)
        assert torch.equal(model[0].weight, before)
        assert zeros([model[3].weight]) == 0.75 * model[3].weight.numel()
        assert target.sparsity == 0.75

    def test_all_weights_without_gradient_raises(self):
        model = build()
        optimizer = padam(model)
        model.requires_grad_(False)
        with pytest.raises(ValueError, match="no decayed weights that require a gradient"):
            SparsityTarget(optimizer, 0.9, STEPS)

    def test_unfrozen_weights_join_the_ramp(self):
        model = build()
        model[0].weight.requires_grad_(False)
        optimizer = PAdam(model.parameters(), lr=1e-2, decay=Lp(0.8, 1))
        target = SparsityTarget(optimizer, 0.75, STEPS)
        train(model, optimizer, 20)
        model[0].weight.requires_grad_(True)
        train(model, optimizer, start=20)
        assert zeros(weights(model)) == 0.75 * size(weights(model))
        assert target.sparsity == 0.75

    @pytest.mark.parametrize("make", [padam, attached])
    @pytest.mark.parametrize("when", [2, 20])
    def test_added_groups_join_the_ramp(self, make, when):
        model = build()
        optimizer = make(model[0])
        target = SparsityTarget(optimizer, 0.75, STEPS)
        train(model, optimizer, when)
        optimizer.add_param_group({"params": [model[3].weight]})
        assert 0 <= target.sparsity < 0.75
        train(model, optimizer, start=when)
        assert zeros(weights(model)) == 0.75 * size(weights(model))

    @pytest.mark.parametrize("make", [padam, attached])
    def test_groups_added_after_the_ramp_train_densely(self, make):
        model = build()
        optimizer = make(model[0])
        SparsityTarget(optimizer, 0.75, STEPS, end=0.7)
        train(model, optimizer, 50)
        optimizer.add_param_group({"params": [model[3].weight]})
        before = model[3].weight.detach().clone()
        with pytest.warns(UserWarning, match="added after the end"):
            train(model, optimizer, 51, start=50)
        train(model, optimizer, start=51)
        assert zeros([model[0].weight]) == 0.75 * model[0].weight.numel()
        assert zeros([model[3].weight]) == 0
        assert not torch.equal(model[3].weight, before)


class TestLifecycle:
    def test_detach_removes_hooks_and_state(self):
        model = build()
        optimizer = padam(model)
        keys = set(optimizer.param_groups[0])
        target = SparsityTarget(optimizer, 0.9, STEPS)
        with pytest.raises(ValueError, match=r"SparsityTarget already; detach\(\) it first"):
            SparsityTarget(optimizer, 0.95, STEPS)
        target.detach()
        target.detach()
        assert set(optimizer.param_groups[0]) == keys
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        train(model, optimizer)
        assert zeros(weights(model)) == 0
        with pytest.warns(UserWarning, match="the ramp starts at step 0"):
            SparsityTarget(optimizer, 0.95, STEPS)

    def test_proximal_step_raises(self):
        optimizer = torch.optim.AdamW(build().parameters(), lr=1e-2)
        attach(optimizer, Lp(0.8, 1), step="prox")
        for call in (freeze_zeros, lambda one: SparsityTarget(one, 0.9, STEPS)):
            with pytest.raises(ValueError, match='step="prox"'):
                call(optimizer)

    def test_repr(self):
        model = build()
        optimizer = padam(model)
        target = SparsityTarget(optimizer, 0.9, STEPS, floor=0.05)
        train(model, optimizer, 2)
        assert repr(target) == (
            "SparsityTarget(0.9, total_steps=60, start=0.1, end=0.85, rank='adaptive', pull=0, "
            "floor=0.05, last_step=2)"
        )
        pruning = pdecay.GradualMagnitudePruning(optimizer, 0.5, 100)
        assert repr(pruning) == (
            "GradualMagnitudePruning(last_step=0, total_steps=100, every=1, sparsity=0.5, "
            "start=0.1, end=0.7)"
        )

    def test_doctor_accepts_a_target_before_its_ramp(self):
        model = build()
        optimizer = padam(model)
        SparsityTarget(optimizer, 0.9, STEPS)
        assert doctor(model, optimizer) == []

    def test_doctor_reports_a_lost_target(self):
        model = build()
        optimizer = padam(model)
        SparsityTarget(optimizer, 0.9, STEPS)
        restored = padam(model)
        restored.load_state_dict(optimizer.state_dict())
        (finding, *_) = [f for f in doctor(model, restored) if "SparsityTarget" in f.message]
        assert finding.level == "warning"

    def test_freezing_all_weights_during_the_ramp(self):
        model = build()
        optimizer = padam(model)
        target = SparsityTarget(optimizer, 0.9, STEPS)
        train(model, optimizer, 20)
        for weight in weights(model):
            weight.requires_grad_(False)
        train(model, optimizer, start=20)
        assert target.last_step == STEPS
        assert target.sparsity == 0
