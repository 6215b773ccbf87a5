"""compact with an optimizer: training continues as with the original model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pdecay
from pdecay import Lp
from pdecay.deployment.compact import CompactError, compact

from .checks import Model

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


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x, y) -> float:
    model.train()
    optimizer.zero_grad()
    loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        step(model, optimizer, *data())


@torch.no_grad()
def kill_permanently(model: nn.Module) -> None:
    """Set all weights of some units to zero, so that gradients and decay never change them."""
    for conv, norm, units in ((0, 1, [1, 4]), (3, 4, [2])):
        model[conv].weight[units] = 0
        model[norm].weight[units] = 0
        model[norm].bias[units] = 0
    model[3].weight[:, [1, 4]] = 0
    model[7].weight[:, 2 * 36 : 3 * 36] = 0
    model[7].weight[[0, 3]] = 0
    model[7].bias[[0, 3]] = 0
    model[9].weight[:, [0, 3]] = 0


def words():
    tokens = torch.randint(0, 11, (12, 9), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(16, 4, 48, dropout=0.0, batch_first=True) for _ in range(2)
    ]
    return nn.Sequential(nn.Embedding(11, 16), *layers, nn.Linear(16, 11))


@torch.no_grad()
def kill_head_and_units_permanently(model: nn.Sequential) -> None:
    attention = model[1].self_attn
    attention.in_proj_weight.view(3, 4, 4, 16)[:, 2] = 0
    attention.in_proj_bias.view(3, 4, 4)[:, 2] = 0
    attention.out_proj.weight.view(16, 4, 4)[:, 2] = 0
    model[2].linear1.weight[[3, 5, 40]] = 0
    model[2].linear1.bias[[3, 5, 40]] = 0
    model[2].linear2.weight[:, [3, 5, 40]] = 0


OPTIMIZERS = {
    "PAdam": lambda m: pdecay.PAdam(pdecay.param_groups(m), lr=1e-2, decay=DECAY),
    "PAdam amsgrad": lambda m: pdecay.PAdam(
        pdecay.param_groups(m), lr=1e-2, decay=DECAY, amsgrad=True
    ),
    "PSGD": lambda m: pdecay.PSGD(pdecay.param_groups(m), lr=1e-2, momentum=0.9, decay=DECAY),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "attached": lambda m: _attached(torch.optim.RMSprop(pdecay.param_groups(m), lr=1e-3)),
    "each its own scale": lambda m: pdecay.PAdam(_scaled(m), lr=1e-2, decay=DECAY),
}


def _scaled(model):
    params = list(model.parameters())
    return [{"params": params, "decay_scale": [0.1 * i for i in range(len(params))]}]


def _attached(optimizer):
    pdecay.attach(optimizer, DECAY)
    return optimizer


NETWORKS = {
    "cnn": (network, data, kill_permanently),
    "transformer": (transformer, words, kill_head_and_units_permanently),
}


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_continues_like_the_original(make, kind):
    """In float64 every step has the same loss, and the same nonzero weights."""
    build, given, kill = NETWORKS[kind]
    x, y = given()
    x = x.double() if x.is_floating_point() else x
    model = build().double()
    optimizer = make(model)
    for _ in range(3):
        step(model, optimizer, x, y)
    kill(model)
    for param in model.parameters():  # as after many steps at zero
        for value in optimizer.state[param].values():
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                value[param == 0] = 0
    before = copy.deepcopy(optimizer.state_dict())
    smaller, carried = compact(model, x, optimizer=optimizer)
    assert smaller.compact_report.units == {"cnn": 5, "transformer": 4}[kind]
    assert not smaller.compact_report.kept
    assert type(carried) is type(optimizer)
    assert str(optimizer.state_dict()) == str(before)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert settings == [{k: v for k, v in g.items() if k != "params"} for g in carried.param_groups]
    losses = []
    for _ in range(10):
        losses.append(step(model, optimizer, x, y))
        assert step(smaller, carried, x, y) == pytest.approx(losses[-1], rel=1e-9)
        for (name, one), other in zip(model.named_parameters(), smaller.parameters(), strict=True):
            assert torch.allclose(sorted_nonzeros(one), sorted_nonzeros(other), rtol=1e-7), name
    assert losses[-1] < losses[0]


def sorted_nonzeros(param: nn.Parameter) -> torch.Tensor:
    return param[param != 0].sort().values


def test_state_of_kept_units_is_carried_over():
    model = network()
    optimizer = OPTIMIZERS["PAdam"](model)
    train(model, optimizer, 2)
    kill_permanently(model)
    smaller, carried = compact(model, data()[0], optimizer=optimizer)
    kept = [i for i in range(8) if i not in (1, 4)]
    old, new = optimizer.state[model[0].weight], carried.state[smaller[0].weight]
    assert torch.equal(new["exp_avg"], old["exp_avg"][kept])
    assert torch.equal(new["step"], old["step"])
    assert {id(p) for g in carried.param_groups for p in g["params"]} == {
        id(p) for p in smaller.parameters()
    }
    carried.load_state_dict(copy.deepcopy(carried.state_dict()))


def test_optimizer_without_state():
    model = network()
    kill_permanently(model)
    smaller, carried = compact(model, data()[0], optimizer=OPTIMIZERS["PAdam"](model))
    train(smaller, carried, 2)


def test_no_bias_is_added_when_an_optimizer_is_given():
    model = nn.Sequential(nn.Linear(3, 5), nn.Sigmoid(), nn.Linear(5, 2, bias=False))
    model[0].weight.data[1] = 0
    smaller, _ = compact(model, torch.randn(4, 3), optimizer=torch.optim.AdamW(model.parameters()))
    assert smaller[0].out_features == 5
    assert "has no bias, and the optimizer would not train a new one" in str(smaller.compact_report)
    assert compact(model, torch.randn(4, 3))[0].out_features == 4


def test_optimizer_of_another_model_raises():
    with pytest.raises(CompactError, match="not in this model"):
        compact(network(), data()[0], optimizer=OPTIMIZERS["PAdam"](network()))
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got str"):
        compact(network(), data()[0], optimizer="PAdam")


def test_optimizer_with_factored_state_raises():
    model = network()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, 1)
    with pytest.raises(CompactError, match=r"keeps '\w+' of shape .* create a new optimizer"):
        compact(model, data()[0], optimizer=optimizer)


def test_optimizer_with_state_in_a_list_raises():
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    for param in model.parameters():
        optimizer.state[param]["factors"] = [torch.eye(size) for size in param.shape]
    with pytest.raises(CompactError, match=r"keeps 'factors' of shape .* create a new optimizer"):
        compact(model, data()[0], optimizer=optimizer)


def test_optimizer_in_an_attribute_trains_the_smaller_model():
    def forward(self, x):
        return self.last(self.first(x).relu())

    torch.manual_seed(0)
    model = Model(forward, first=nn.Linear(4, 8), last=nn.Linear(8, 2, bias=False))
    model.optimizers = [torch.optim.Adam(model.parameters())]  # as in networks of agents
    model.weights = [model.first.weight, model.last.weight]

    def train(one, x):
        one.optimizers[0].zero_grad()
        one(x).square().sum().backward()
        one.optimizers[0].step()

    train(model, torch.randn(5, 4))
    model.last.weight.data[:, :3] = model.first.weight.data[:3] = 0
    model.first.bias.data[:3] = -1
    model.first.weight.data[4] = 0  # constant, but there is no bias to fold it into
    model.first.bias.data[4] = 1
    smaller = compact(model, torch.randn(2, 4))
    assert smaller.weights[0] is smaller.first.weight
    assert len(smaller.weights[0]) == 5
    for _ in range(3):
        x = torch.randn(5, 4)
        train(model, x)
        train(smaller, x)
    torch.testing.assert_close(smaller.first.weight, model.first.weight[3:])
    torch.testing.assert_close(smaller.last.weight, model.last.weight[:, 3:])
