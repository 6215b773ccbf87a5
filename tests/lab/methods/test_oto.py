"""Only-Train-Once: the half-space rule, the units and their readers, the number of dead units."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import pdecay
from pdecay.lab.methods.oto import OTOMethod, half_space_step
from pdecay.lab.methods.units import find_units, zero_readers
from pdecay.lab.models import CNN, GPT, MLP, ResNet
from pdecay.lab.train.loop import Trainer

OLD = torch.tensor([[3.0, 4.0]])


@pytest.mark.parametrize(
    ("after", "eps", "expected"),
    [
        # the update (-0.6, -0.8) has length 1, so has the pull: down to (1.8, 2.4)
        ([2.4, 3.2], 0.0, [1.8, 2.4]),
        # <(1.8, 2.4), (3, 4)> = 15 and |(3, 4)|^2 = 25
        ([2.4, 3.2], 0.59, [1.8, 2.4]),
        ([2.4, 3.2], 0.61, [0.0, 0.0]),
        # an update straight outwards is just met by the pull
        ([6.0, 8.0], 0.0, [3.0, 4.0]),
        # (-4, 3) is at a right angle, of length 5: (-1, 7) - (3, 4), on the half-space's border
        ([-1.0, 7.0], 0.0, [-4.0, 3.0]),
        ([-1.0, 7.0], 0.01, [0.0, 0.0]),
        # beyond zero
        ([0.0, 0.0], 0.0, [0.0, 0.0]),
        ([-0.3, -0.4], 0.0, [0.0, 0.0]),
    ],
)
def test_half_space_rule_matches_hand_computed_steps(after, eps, expected):
    stepped = half_space_step(OLD, torch.tensor([after]), eps)
    torch.testing.assert_close(stepped, torch.tensor([expected]))


def test_groups_are_independent_and_zero_stays_zero():
    old = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3.0, 4.0]])
    after = torch.tensor([[2.4, 3.2], [0.5, 0.5], [-1.0, -1.0]])
    expected = torch.tensor([[1.8, 2.4], [0.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(half_space_step(old, after, 0.0), expected)


vectors = st.lists(st.floats(-3, 3), min_size=3, max_size=3)


@settings(deadline=None)  # for busy machines
@given(vectors, vectors)
def test_pull_decreases_norm_and_loss(old, update):
    w, u = (torch.tensor([one], dtype=torch.float64) for one in (old, update))
    assume(w.norm() > 1e-3)
    assume(u.norm() > 1e-3)
    step = half_space_step(w, w + u, eps=0.0) - w
    if torch.equal(step, -w):
        return  # set to zero
    assert (step * w).sum() <= 1e-9  # towards zero
    assert (step * u).sum() >= -1e-9  # and not against the optimizer, whose update lowers the loss


def test_units_include_bias_and_norm():
    units = find_units(CNN(1, 8, (6, 8), 16, 10), torch.randn(2, 1, 8, 8))
    shapes = {one.name: [tuple(part.shape) for part in one.parts] for one in units}
    assert shapes == {
        "features.0": [(6, 1, 3, 3), (6,), (6,)],
        "features.3": [(8, 6, 3, 3), (8,), (8,)],
        "head.layers.1": [(16, 32), (16,)],
    }  # the last layer's units are the classes


def test_units_of_a_resnet_and_of_a_gpt():
    units = find_units(ResNet(8, (1, 1), stride=2), torch.randn(2, 3, 32, 32))
    assert [one.name for one in units] == [
        "stem.0",
        "stages.0.conv1",
        "stages.0.conv2",
        "stages.1.conv1",
        "stages.1.conv2",
        "stages.1.shortcut.0",
    ]
    assert all(len(one.parts) == 3 for one in units)
    gpt = GPT(symbols=11, block=8, layers=1, heads=2, width=16)
    units = find_units(gpt, torch.zeros(1, 8, dtype=torch.int64))
    names = ["attention.qkv", "attention.project", "mlp.expand", "mlp.project"]
    assert [one.name for one in units] == [f"layers.0.{name}" for name in names]


MODELS = {
    "MLP": (lambda: MLP(64, (30, 20), 10), (4, 1, 8, 8), ["layers.3", "layers.5"]),
    "CNN": (lambda: CNN(1, 8, (6, 8), 16, 10), (4, 1, 8, 8), ["features.3", "head.layers.1"]),
    "ResNet": (lambda: ResNet(8, (1, 1), stride=2), (2, 3, 32, 32), ["stages.0.conv2"]),
    "GPT": (
        lambda: GPT(symbols=11, block=8, layers=2, heads=2, width=16),
        None,
        ["layers.0.attention.project", "layers.1.mlp.project"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_zero_readers_of_dead_units_keeps_outputs(name):
    build, shape, zeroed = MODELS[name]
    torch.manual_seed(0)
    model = build()
    inputs = torch.randint(11, (2, 8)) if shape is None else torch.randn(shape)
    model(inputs)  # running means that are not zero
    units = find_units(model, inputs)
    dead = {}
    for one in units:
        dead[one] = torch.rand(len(one)) < 0.5
        one.zero(dead[one])
    other = torch.randint(11, (2, 8)) if shape is None else torch.randn(shape)
    model.eval()
    expected = model(other)
    before = {layer.name: layer.zeros for layer in pdecay.sparsity(model).layers}
    model.train()
    zero_readers(model, inputs, dead)
    assert model.training
    model.eval()
    torch.testing.assert_close(model(other), expected, rtol=0, atol=1e-6)
    after = {layer.name: layer.zeros for layer in pdecay.sparsity(model).layers}
    for layer in zeroed:
        assert after[f"{layer}.weight"] > before[f"{layer}.weight"], layer
    assert all(not module._forward_hooks for module in model.modules())


def test_share_of_dead_units_is_exact_and_permanent(digits):
    trainer = Trainer(digits, OTOMethod(target=0.6), seed=0, lr=3e-3, steps=100)
    dead = []
    for _ in trainer.train():
        rows = trainer.model.layers[1].weight, trainer.model.layers[3].weight
        dead.append(sum(int((row == 0).all(1).sum()) for row in rows))
    assert dead[8] == 0
    assert dead[10] >= 0.05 * 400  # the first tenth is being removed
    assert dead[19] == dead[99] == round(0.6 * 400)
    result = trainer.finish()
    head = result["layers"][-1]
    assert head["zeros"] > 0.3 * head["size"]  # readers of dead units are zero too
    assert result["accuracy"] > 85


def test_every_layer_keeps_a_unit(digits):
    trainer = Trainer(digits, OTOMethod(target=0.999), seed=0, lr=3e-3, steps=40)
    list(trainer.train())
    for layer in (trainer.model.layers[1], trainer.model.layers[3]):
        assert (layer.weight != 0).any()


def test_eps_sets_groups_to_zero_earlier(digits):
    taken = []
    for eps in (0.0, 0.999):
        trainer = Trainer(digits, OTOMethod(target=0.9, eps=eps), seed=0, lr=1e-4, steps=400)
        list(islice(trainer.train(), 42))
        taken.append(int((trainer.model.layers[3].weight == 0).all(1).sum()))
    assert taken[0] == 0 < taken[1]


def test_layer_without_bias_or_norm(points):
    job = points(lambda: nn.Sequential(nn.Linear(4, 10, bias=False), nn.ReLU(), nn.Linear(10, 2)))
    trainer = Trainer(job, OTOMethod(target=0.5), seed=0, lr=0.01, steps=50)
    list(trainer.train())
    result = trainer.finish()
    assert [layer["zeros"] for layer in result["layers"]] == [20, 10]
