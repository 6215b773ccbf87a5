"""Tests of pdecay.functional: the steps as functions of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pdecay
from pdecay import PSGD, Lp, PAdam

DECAY = Lp(0.8, 0.3)


def padam(params, decay=DECAY, **options):
    return PAdam(params, decay=decay, **options)


def psgd(params, decay=DECAY, **options):
    return PSGD(params, **{"momentum": 0.9, "decay": decay, **options})


class TestFunctional:
    FUSED = pytest.mark.parametrize("path", [{}, {"fused": False}, {"foreach": True}], ids=str)

    @FUSED
    @pytest.mark.parametrize("amsgrad", [False, True])
    def test_padam_equals_the_optimizer(self, path, amsgrad, same):
        weight = nn.Parameter(torch.linspace(-1, 2, 6).reshape(2, 3))
        optimizer = padam([weight], lr=0.1, amsgrad=amsgrad, weight_decay=0.01, **path)
        ours = weight.detach().clone()
        moments = [torch.zeros_like(ours) for _ in range(3)]
        steps = [torch.tensor(0.0)]
        for t in range(3):
            weight.grad = torch.full_like(weight, t - 0.5)
            optimizer.step()
            pdecay.functional.padam(
                *([ours], [weight.grad], [moments[0]], [moments[1]]),
                *([moments[2]] if amsgrad else [], steps),
                decay=DECAY,
                lr=0.1,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=0.01,
                amsgrad=amsgrad,
                **path,
            )
        assert same(ours, weight.detach())
        assert steps[0].item() == 3

    @FUSED
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_psgd_equals_the_optimizer(self, path, momentum, same):
        weight = nn.Parameter(torch.linspace(-1, 2, 6).reshape(2, 3))
        optimizer = psgd([weight], lr=0.1, momentum=momentum, **path)
        ours = weight.detach().clone()
        buffers = [None] if momentum else []
        for t in range(3):
            weight.grad = torch.full_like(weight, t - 0.5)
            optimizer.step()
            pdecay.functional.psgd(
                *([ours], [weight.grad], buffers), decay=DECAY, lr=0.1, momentum=momentum, **path
            )
        assert same(ours, weight.detach())
        assert not momentum or same(buffers[0], optimizer.state[weight]["momentum_buffer"])

    @FUSED
    @pytest.mark.parametrize("name", ["grads", "exp_avgs", "exp_avg_sqs", "state_steps"])
    @pytest.mark.parametrize("length", [0, 1, 3])
    def test_padam_refuses_lists_of_other_lengths(self, path, name, length):
        keys = ("params", "grads", "exp_avgs", "exp_avg_sqs", "state_steps")
        lists = {key: [torch.ones(2, 2) for _ in range(2)] for key in keys}
        lists["state_steps"] = [torch.tensor(0.0) for _ in range(2)]
        lists[name] = (lists[name] * 2)[:length]
        settings = {"decay": DECAY, "lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
        with pytest.raises(ValueError, match=f"{name} must have one entry .* 2 param.* {length}"):
            pdecay.functional.padam(**lists, max_exp_avg_sqs=[], **settings, **path)

    def test_differentiating_through_the_step_is_refused(self):
        """The step is not recorded: the gradient would be that of ``w.clone()`` alone."""

        def loss(w):
            w = w.clone()
            pdecay.functional.psgd([w], [torch.ones(3)], [], decay=DECAY, lr=0.1)
            return w.square().sum()

        with pytest.raises(ValueError, match="cannot differentiate through this step"):
            torch.func.grad(loss)(torch.ones(3))
        with pytest.raises(ValueError, match="cannot differentiate through this step"):
            loss(torch.ones(3, requires_grad=True))

    @pytest.mark.parametrize(
        ("key", "value", "rule"),
        [
            ("beta1", 1.0, "beta1 must be below 1, got 1.0"),
            ("beta2", float("nan"), "beta2 must be finite and >= 0, got nan"),
            ("eps", -1.0, "eps must be finite and >= 0, got -1.0"),
            ("weight_decay", float("inf"), "weight_decay must be finite and >= 0, got inf"),
            ("weight_decay", DECAY, "weight_decay is the L2 decay"),
        ],
    )
    def test_padam_refuses_bad_numbers(self, key, value, rule):
        w, g, m, v = ([torch.ones(2, 2)] for _ in range(4))
        settings = {"decay": DECAY, "lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
        with pytest.raises((TypeError, ValueError), match=rule):
            pdecay.functional.padam(w, g, m, v, [], [torch.ones(1)], **settings | {key: value})
        assert torch.equal(w[0], torch.ones(2, 2))

    @pytest.mark.parametrize("bad", [-1.0, float("nan"), "0.9"])
    @pytest.mark.parametrize("key", ["momentum", "dampening"])
    def test_psgd_refuses_bad_numbers(self, key, bad):
        settings = {"decay": DECAY, "lr": 0.1} | {key: bad}
        with pytest.raises((TypeError, ValueError), match=f"{key} must be .*got {bad!r}"):
            pdecay.functional.psgd([torch.ones(2)], [torch.ones(2)], [None], **settings)
        with pytest.raises((TypeError, ValueError), match=f"{key} must be .*got {bad!r}"):
            pdecay.PSGD([torch.ones(2)], **{key: bad})

    def test_missing_maxima_and_buffers_are_refused(self):
        w, g, m, v = ([torch.ones(2, 2)] for _ in range(4))
        settings = {"decay": DECAY, "lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
        with pytest.raises(ValueError, match="max_exp_avg_sqs must have one entry"):
            pdecay.functional.padam(w, g, m, v, [], [torch.tensor(0.0)], amsgrad=True, **settings)
        with pytest.raises(ValueError, match="momentum_buffers must have one entry"):
            pdecay.functional.psgd(w, g, [], decay=DECAY, lr=0.1, momentum=0.9)

    def test_vmap(self):
        def step(w, g):
            w = w.clone()
            pdecay.functional.psgd([w], [g], [], decay=DECAY, lr=0.1)
            return w

        w, g = torch.randn(5, 4, 3), torch.randn(5, 4, 3)
        expected = torch.stack([step(a, b) for a, b in zip(w, g, strict=True)])
        torch.testing.assert_close(torch.vmap(step)(w, g), expected, rtol=1e-5, atol=1e-6)
