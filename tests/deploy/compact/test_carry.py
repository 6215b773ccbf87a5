"""An optimizer that is taken along: training goes on as it would have."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pdecay
from pdecay import Lp
from pdecay.deployment.compact import CompactError, compact

DECAY = Lp(0.8, 1e-2)


def data():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 2, 8, 8, generator=generator)
    return x, (x.mean((1, 2, 3)) > 0).long()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Flatten(), nn.Linear(6 * 36, 10), nn.ReLU(), nn.Linear(10, 2),
    )  # fmt: skip


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    x, y = data()
    losses = []
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def kill_for_good(model: nn.Module) -> None:
    """Units of which all weights are zero: no gradient, and no decay, ever moves them."""
    for conv, norm, units in ((0, 1, [1, 4]), (3, 4, [2])):
        model[conv].weight[units] = 0
        model[norm].weight[units] = 0
        model[norm].bias[units] = 0
    model[3].weight[:, [1, 4]] = 0
    model[7].weight[:, 2 * 36 : 3 * 36] = 0
    model[7].weight[[0, 3]] = 0
    model[7].bias[[0, 3]] = 0
    model[9].weight[:, [0, 3]] = 0


OPTIMIZERS = {
    "PAdam": lambda m: pdecay.PAdam(pdecay.param_groups(m), lr=1e-2, decay=DECAY),
    "PAdam amsgrad": lambda m: pdecay.PAdam(
        pdecay.param_groups(m), lr=1e-2, decay=DECAY, amsgrad=True
    ),
    "PSGD": lambda m: pdecay.PSGD(pdecay.param_groups(m), lr=1e-2, momentum=0.9, decay=DECAY),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "attached": lambda m: _attached(torch.optim.RMSprop(pdecay.param_groups(m), lr=1e-3)),
    "each its own scale": lambda m: pdecay.PAdam(
        [{"params": list(m.parameters()), "decay_scale": [float(i) for i in range(10)]}],
        lr=1e-2, decay=DECAY,
    ),
}  # fmt: skip


def _attached(optimizer):
    pdecay.attach(optimizer, DECAY)
    return optimizer


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_goes_on_as_it_would_have(make):
    model = network()
    optimizer = make(model)
    train(model, optimizer, 3)
    kill_for_good(model)
    for param in model.parameters():  # as the momentum of a weight that has long been zero
        for value in optimizer.state[param].values():
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                value[param == 0] = 0
    before = copy.deepcopy(optimizer.state_dict())
    smaller, carried = compact(model, data()[0], optimizer=optimizer)
    assert [smaller[i].weight.shape[0] for i in (0, 3, 7)] == [6, 5, 8]
    assert type(carried) is type(optimizer)
    assert str(optimizer.state_dict()) == str(before)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert settings == [{k: v for k, v in g.items() if k != "params"} for g in carried.param_groups]
    expected = train(model, optimizer, 10)
    assert train(smaller, carried, 10) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]


def test_the_state_is_that_of_the_units_that_stay():
    model = network()
    optimizer = OPTIMIZERS["PAdam"](model)
    train(model, optimizer, 2)
    kill_for_good(model)
    smaller, carried = compact(model, data()[0], optimizer=optimizer)
    kept = [i for i in range(8) if i not in (1, 4)]
    old, new = optimizer.state[model[0].weight], carried.state[smaller[0].weight]
    assert torch.equal(new["exp_avg"], old["exp_avg"][kept])
    assert torch.equal(new["step"], old["step"])
    assert {id(p) for g in carried.param_groups for p in g["params"]} == {
        id(p) for p in smaller.parameters()
    }
    carried.load_state_dict(copy.deepcopy(carried.state_dict()))


def test_an_optimizer_that_has_not_stepped_yet():
    model = network()
    kill_for_good(model)
    smaller, carried = compact(model, data()[0], optimizer=OPTIMIZERS["PAdam"](model))
    train(smaller, carried, 2)


def test_no_bias_is_made_that_the_optimizer_does_not_know():
    model = nn.Sequential(nn.Linear(3, 5), nn.Sigmoid(), nn.Linear(5, 2, bias=False))
    model[0].weight.data[1] = 0
    smaller, _ = compact(model, torch.randn(4, 3), optimizer=torch.optim.AdamW(model.parameters()))
    assert smaller[0].out_features == 5
    assert "has no bias, and the optimizer would not know a new one" in str(smaller.compact_report)
    assert compact(model, torch.randn(4, 3))[0].out_features == 4


def test_an_optimizer_that_is_not_the_models_is_refused():
    with pytest.raises(CompactError, match="not this model's"):
        compact(network(), data()[0], optimizer=OPTIMIZERS["PAdam"](network()))
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got str"):
        compact(network(), data()[0], optimizer="PAdam")


def test_an_optimizer_whose_state_has_other_shapes_is_refused():
    model = network()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, 1)
    with pytest.raises(CompactError, match=r"keeps '\w+' of shape .* Make a new optimizer"):
        compact(model, data()[0], optimizer=optimizer)
