"""The effect of each method on the weights, compared with hand-computed results."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pdecay
from pdecay.lab.methods import METHODS, options_of
from pdecay.lab.models import GPT, MLP
from pdecay.lab.train.loop import Trainer


def started(name, points, model=None, lr=0.1, steps=100, **options):
    job = points()
    return METHODS[name](**options).start(model or job.model(0), job, lr, steps)


def stepped(run, model, gradient=1.0):
    for param in model.parameters():
        param.grad = torch.full_like(param, gradient)
    run.optimizer.step()
    run.after_step()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_leaves_biases_and_norms_undecayed(points, name):
    """With zero gradients only the decay changes weights."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    before = copy.deepcopy(model.state_dict())
    run = started(name, points, model, lr=0.1)
    for _ in range(3):
        stepped(run, model, gradient=0.0)
    for key in ("0.bias", "1.weight", "1.bias", "2.bias"):
        assert torch.equal(model.state_dict()[key], before[key])


def test_adamw_matches_torch(points):
    model, other = (points().model(0) for _ in range(2))
    run = started("adamw", points, model, weight_decay=0.5)
    base = torch.optim.AdamW(
        [
            {"params": [other.weight], "weight_decay": 0.5},
            {"params": [other.bias], "weight_decay": 0.0},
        ],
        lr=0.1,
        fused=True,
    )
    for gradient in (1.0, -0.3, 0.2):
        stepped(run, model, gradient)
        for param in other.parameters():
            param.grad = torch.full_like(param, gradient)
        base.step()
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


@pytest.mark.parametrize(
    ("name", "options", "l2"),
    [("padam", {"p": 0.8, "lam": 0.3}, 0.0), ("elastic", {"p": 0.5, "lam": 0.3, "l2": 0.4}, 0.4)],
)
def test_p_norm_decay_matches_formula(points, name, options, l2):
    model, other = (points().model(0).double() for _ in range(2))
    run = started(name, points, model, **options)
    old = other.weight.detach().clone()
    base = torch.optim.AdamW([other.weight], lr=0.1, weight_decay=l2)
    for param in (model.weight, other.weight, model.bias):
        param.grad = torch.ones_like(param)
    base.step()
    run.optimizer.step()
    factor = 1 / (1 + 0.1 * options["lam"] * old.abs() ** (options["p"] - 2))
    torch.testing.assert_close(
        model.weight.detach(), other.weight.detach() * factor, rtol=1e-4, atol=0
    )


def test_l1_is_soft_threshold_after_adam(points):
    model, other = (points().model(0) for _ in range(2))
    run = started("l1", points, model, lr=0.1, lam=2.0)
    base = torch.optim.AdamW(other.parameters(), lr=0.1, weight_decay=0.0, fused=True)
    for param in other.parameters():
        param.grad = torch.ones_like(param)
    base.step()
    stepped(run, model)
    tilde = other.weight.detach()
    expected = tilde.sign() * (tilde.abs() - 0.2).clamp_min(0)
    torch.testing.assert_close(model.weight.detach(), expected)
    assert (model.weight == 0).any()
    assert torch.equal(model.bias, other.bias)


def test_magnitude_pruning_follows_its_threshold(points):
    job = points(lambda: nn.Linear(4, 200, bias=False), steps=100)
    trainer = Trainer(
        job, METHODS["mp"](threshold=0.2, weight_decay=0.0), seed=0, lr=1e-6, steps=100
    )
    smallest = []
    for _ in trainer.train():
        weight = trainer.model.weight.detach().abs()
        smallest.append(weight[weight > 0].min().item())
    assert smallest[9] < 0.01  # nothing is pruned for 10 % of the steps
    assert smallest[14] == pytest.approx(0.1, abs=0.01)  # half of the threshold
    assert all(0.2 <= one < 0.21 for one in smallest[19:])
    expected = (job.model(0).weight.abs() < 0.2).double().mean().item()
    assert pdecay.sparsity(trainer.model).total == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("name", ["gmp", "target"])
def test_target_is_met_exactly(points, name):
    job = points(lambda: MLP(4, (40, 20), 2), steps=60)
    trainer = Trainer(job, METHODS[name](target=0.77), seed=0, lr=0.01, steps=60)
    list(trainer.train())
    size = 4 * 40 + 40 * 20 + 20 * 2
    result = trainer.finish()
    assert result["weights"] == size
    assert sum(layer["zeros"] for layer in result["layers"]) == round(0.77 * size)


def test_methods_have_docstrings_and_options():
    for method in METHODS.values():
        assert method.__doc__
        assert options_of(method)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_digits(digits, name):
    """After 150 steps all methods are accurate, and all but AdamW are sparse."""
    options = {
        "padam": {"lam": 0.1},
        "elastic": {"lam": 0.1},
        "mp": {"threshold": 0.05},
        "dwf": {"depth": 3, "lam": 2e-4},
        "l1": {"lam": 0.1},
        "slow": {"lam": 0.3, "rate": 0.5},
        **{key: {"lam": 0.1} for key in ("every", "pschedule", "prox", "freeze")},
    }.get(name, {})
    trainer = Trainer(digits, METHODS[name](**options), seed=0, lr=0.01, steps=150)
    list(trainer.train())
    result = trainer.finish()
    assert not trainer.diverged
    assert result["accuracy"] > 85
    assert (result["sparsity"] > 0.3) == (name != "adamw"), result["sparsity"]
    assert result["tradeoff"] == result["accuracy"] + result["sparsity"]


def test_p_2_is_proximal_weight_decay(points):
    model = points().model(0)
    start = model.weight.detach().clone()
    run = started("padam", points, model, lr=0.1, p=2.0, lam=0.5)
    stepped(run, model, gradient=0.0)
    torch.testing.assert_close(model.weight.detach(), start / 1.05)


def test_tied_weight_is_trained_once(points):
    model = GPT(symbols=11, block=8, layers=1, heads=2, width=16)
    run = METHODS["padam"]().start(model, points(), 0.1, 10)
    params = [param for group in run.optimizer.param_groups for param in group["params"]]
    assert len(params) == len(set(map(id, params))) == len(list(model.parameters()))


def test_padam_decays_in_the_metric_that_is_asked_for(points):
    run = started("padam", points, metric="adaptive")
    assert [group["metric"] for group in run.optimizer.param_groups] == ["adaptive"] * 2
    with pytest.raises(ValueError, match="metric must be"):
        METHODS["padam"](metric="fisher")
