"""Stochastic rounding of bfloat16 weights."""

import copy

import pytest
import torch
from torch import nn

from pdecay import PSGD, Every, Lp, PAdam, Slow, SparsityTarget
from pdecay._optim.rounding import stochastically_rounded


def test_rounds_to_neighbours_without_bias():
    values = torch.tensor([1.0 + 2**-9, -3.0 - 2**-8, 1e-3, 7e-39]).repeat(20_000, 1)
    rounded = stochastically_rounded(values, torch.Generator().manual_seed(0))
    assert rounded.dtype == torch.bfloat16
    for number, column in zip(values[0], rounded.float().T, strict=True):
        assert len(column.unique()) == 2
        assert column.min() < number < column.max()
        width = column.max() - column.min()
        assert abs(column.double().mean() - number) < 0.02 * width


def test_representable_numbers_do_not_change():
    values = torch.tensor([0.0, -0.0, 1.5, -(2.0**-130), torch.inf, -torch.inf, torch.nan])
    for seed in range(20):
        rounded = stochastically_rounded(values, torch.Generator().manual_seed(seed)).float()
        assert torch.equal(rounded[:-1], values[:-1])
        assert torch.signbit(rounded[1])
        assert rounded[-1].isnan()


def quadratic(make, dtype, steps=300, **options):
    """Approach the weights 1 from 0.9; each step is below half of bfloat16's resolution."""
    weight = nn.Parameter(torch.full((64, 64), 0.9).to(dtype))
    optimizer = make([weight], decay=None, **options)
    for _ in range(steps):
        weight.grad = weight.detach() - 1
        optimizer.step()
    return weight.detach().float().mean().item()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (PAdam, {"lr": 2e-4}),
        (PAdam, {"lr": 2e-4, "foreach": True}),
        (PSGD, {"lr": 5e-3}),
        (PSGD, {"lr": 5e-4, "momentum": 0.9}),
    ],
)
def test_small_updates_are_not_lost(make, options):
    exact = quadratic(make, torch.float32, **options)
    assert exact > 0.94
    assert quadratic(make, torch.bfloat16, **options) < 0.91
    rounded = quadratic(make, torch.bfloat16, **options, stochastic_rounding=True)
    assert rounded == pytest.approx(exact, abs=3e-3)


def train(weight, optimizer, steps):
    for step in steps:
        weight.grad = torch.sin(9 * weight.detach() + step)
        optimizer.step()


def check_resumes(start, steps):
    """Train with a break in the middle and without; return the weight and the optimizer."""
    half = steps // 2
    weight, optimizer = start()
    train(weight, optimizer, range(half))
    saved = copy.deepcopy((weight.detach(), optimizer.state_dict()))
    train(weight, optimizer, range(half, steps))
    again, resumed = start()
    again.data.copy_(saved[0])
    resumed.load_state_dict(saved[1])
    torch.manual_seed(123)  # the global generator does not matter
    train(again, resumed, range(half, steps))
    assert torch.equal(weight, again)
    return weight, optimizer


@pytest.mark.parametrize("make", [PAdam, PSGD])
def test_resumes_exactly_and_reaches_the_target(make):
    def start():
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(16, 16).bfloat16())
        momentum = {"momentum": 0.9} if make is PSGD else {}
        optimizer = make([weight], lr=1e-2, decay=Lp(0.8, 1), stochastic_rounding=True, **momentum)
        rank = "magnitude" if make is PSGD else "adaptive"
        SparsityTarget(optimizer, 0.75, 40, rank=rank, pull=0.5, per_layer=True)
        return weight, optimizer

    weight, optimizer = check_resumes(start, steps=40)
    assert (weight == 0).sum() == 192
    state = [value for value in optimizer.state[weight].values() if value.shape == weight.shape]
    assert state
    assert {value.dtype for value in state} == {torch.bfloat16}


@pytest.mark.parametrize("auxiliary", [Every(3), Slow(0.01)])
@pytest.mark.parametrize("make", [PAdam, PSGD])
def test_resumes_exactly_with_anchors(make, auxiliary):
    def start():
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(16, 16).bfloat16())
        decay = {"decay": Lp(0.8, 1), "auxiliary": auxiliary}
        return weight, make([weight], lr=1e-2, stochastic_rounding=True, **decay)

    weight, optimizer = check_resumes(start, steps=20)
    assert optimizer.state[weight]["anchor"].dtype == torch.bfloat16
    assert optimizer.state[weight]["anchor_steps"] == 20
    assert optimizer.state[weight]["anchor"].unique().numel() > 16  # it follows the weights
