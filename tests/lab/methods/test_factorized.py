"""Deep weight factorization: chain rule, equivalent penalty, initialisation and solution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pdecay import Lp
from pdecay.lab.methods.factorized import EPSILON, DWFMethod, new_factors, others_product


@settings(deadline=None)  # for busy machines
@given(st.lists(st.floats(-2, 2), min_size=2, max_size=5))
def test_chain_rule_matches_autograd_including_zeros(values):
    factors = torch.tensor(values, dtype=torch.float64)[:, None].requires_grad_()
    product = factors[0]
    for factor in factors[1:]:
        product = product * factor
    product.sum().backward()
    torch.testing.assert_close(others_product(factors.detach()), factors.grad)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_equal_factors_have_p_norm_penalty(depth):
    w = torch.tensor([0.7, -0.02, 1.5], dtype=torch.float64)
    equal = w.abs() ** (1 / depth)
    least = 0.5 * 0.3 * depth * equal.square().sum()
    assert least.item() == pytest.approx(float(Lp(2 / depth, 0.3).value(w)))
    other = torch.stack([equal * 1.3, equal / 1.3, *[equal] * (depth - 2)])
    torch.testing.assert_close(other.prod(0), w.abs())
    assert 0.15 * other.square().sum() > least


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_initial_products_have_deviation_of_weights(depth):
    torch.manual_seed(0)
    weight = nn.init.normal_(torch.empty(300, 300), std=0.05)
    factors = new_factors(weight, depth)
    product = factors.detach().prod(0)
    assert factors.shape == (depth, 300, 300)
    assert 0.4 < product.std().item() / 0.05 < 1.3  # truncation reduces it
    assert product.abs().min().item() >= 3e-3 * (1 - 1e-5)
    assert product.abs().max().item() <= 0.1 * (1 + 1e-5)
    assert product.mean().abs().item() < 1e-3


def test_step_matches_adam_on_factors(points):
    """The reference differentiates through the product, with the factors as parameters."""
    job = points(lambda: nn.Linear(4, 3, bias=False))
    model = job.model(0)
    torch.manual_seed(0)
    run = DWFMethod(depth=3, lam=0.01).start(model, job, 0.05, 30)
    twin = [
        factor.detach().clone().requires_grad_()
        for factor in run.optimizer.param_groups[0]["params"][0]
    ]
    adam = torch.optim.Adam(twin, lr=0.05, weight_decay=0.01)
    for step in range(30):
        x, y = job.batch(0, step)
        run.optimizer.zero_grad()
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        run.optimizer.step()
        run.after_step()
        adam.zero_grad()
        weight = twin[0] * twin[1] * twin[2]
        nn.functional.cross_entropy(x @ weight.T, y).backward()
        adam.step()
    expected = (twin[0] * twin[1] * twin[2]).detach()
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-3, atol=1e-5)


def test_two_factors_solve_lasso(points):
    """The minimum of ``sum (w - a)^2 / 2 + lam * |w|`` is the soft threshold of a at lam."""
    model = nn.Linear(4, 1, bias=False)
    a = torch.tensor([[1.0, -0.6, 0.1, -0.2]])
    torch.manual_seed(0)
    run = DWFMethod(depth=2, lam=0.3).start(model, points(), 0.01, 4000)
    with torch.no_grad():  # factors keep their sign, so they start on the right side
        factors = run.optimizer.param_groups[0]["params"][0]
        factors.copy_(factors.abs() * torch.stack([a.sign(), torch.ones_like(a)]))
    for _ in range(4000):
        model.weight.grad = model.weight.detach() - a
        run.optimizer.step()
        run.after_step()
    expected = a.sign() * (a.abs() - 0.3).clamp_min(0)
    torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=2e-3)
    assert (model.weight[0, 2:].abs() < 1e-4).all()


def test_products_below_epsilon_are_zero_and_can_regrow(points):
    model = nn.Linear(2, 2, bias=False)
    run = DWFMethod(depth=2).start(model, points(), 0.01, 10)
    factors = run.optimizer.param_groups[0]["params"][0]
    small = EPSILON**0.5 / 2
    with torch.no_grad():
        factors.fill_(0.5)
        factors[:, 0, 0] = small
    run.after_step()
    assert (model.weight == 0).tolist() == [[True, False], [False, False]]
    model.weight.grad = torch.full((2, 2), -1.0)
    run.optimizer.step()
    run.after_step()
    assert model.weight[0, 0] > 0
