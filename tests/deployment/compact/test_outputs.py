"""Outputs that are not plain containers of tensors."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributions import Categorical

from pdecay.deployment.compact import compact
from pdecay.deployment.model.outputs import tensors_of
from pdecay.deployment.runtime.pipeline import deploy

from .checks import Model


class Slotted:
    __slots__ = ("logits",)

    def __init__(self, logits):
        self.logits = logits


def policy(wrap):
    """Return an actor and critic, whose actor alone reads the first hidden units."""

    def forward(self, x):
        hidden = self.body(x).relu()
        return wrap(self.actor(hidden)), self.critic(hidden)

    layers = {"body": nn.Linear(4, 16), "actor": nn.Linear(16, 3), "critic": nn.Linear(16, 1)}
    model = Model(forward, **layers).eval()
    model.critic.weight.data[:, :8] = 0
    model.actor.weight.data[:, 6:10] = 0
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits: Categorical(logits=logits),
        lambda logits: SimpleNamespace(logits=logits, steps=[1, "a", None]),
        Slotted,
        lambda logits: deque([logits]),
    ],
    ids=["distribution", "namespace", "slots", "deque"],
)
@pytest.mark.parametrize("optimize", ["compact", "deploy"])
def test_tensors_in_objects_are_outputs(wrap, optimize):
    torch.manual_seed(0)
    model, x = policy(wrap), torch.randn(2, 4)
    if optimize == "compact":
        smaller = compact(model, x)
        assert smaller.body.out_features == 14  # of the actor's units, the critic reads two
    else:
        smaller = deploy(model, x, seconds=0, choose="sparse")
    expected, got = (list(tensors_of(one(x))) for one in (model, smaller))
    assert len(expected) == len(got) > 1
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other)


def test_objects_may_refer_to_each_other_and_to_modules():
    one = SimpleNamespace(tensor=torch.ones(1), module=nn.Linear(2, 2), kind=nn.Linear)
    one.other = SimpleNamespace(back=one, tensors={"a": (torch.zeros(1),)})
    assert [tensor.item() for tensor in tensors_of(one)] == [1, 0]
