"""Outputs that are not plain containers of tensors."""

from __future__ import annotations

from collections import deque
from types import MethodType, SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.distributions import Categorical

from pdecay.deployment.compact import CompactError, compact
from pdecay.deployment.files import save
from pdecay.deployment.model.errors import DeploymentError
from pdecay.deployment.model.outputs import difference, tensors_of
from pdecay.deployment.runtime.pipeline import deploy

from .checks import Model, compacted

WIDTH = 8


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


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


CONVERSIONS = {
    "tolist": lambda tensor: tensor.tolist(),
    "numpy": lambda tensor: tensor.numpy(),
    "array": lambda tensor: numpy.asarray(tensor),
    "dlpack": lambda tensor: numpy.from_dlpack(tensor),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_choice_by_values_of_a_list_or_an_array(convert):
    def forward(self, x):
        choices = convert(self.router(x).argmax(-1))
        return torch.stack([self.experts[int(i)](row) for i, row in zip(choices, x, strict=True)])

    router = nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    router[2].weight.data[:, 1] = 0
    model = Model(forward, router=router, experts=nn.ModuleList(nn.Linear(3, 2) for _ in range(2)))
    smaller = compacted(model, torch.randn(1, 3), also=[(torch.randn(40, 3),)])
    assert smaller.router[0].out_features == WIDTH - 1


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_returned_lists_and_arrays_keep_their_units(convert):
    def forward(self, x):
        hidden = self.body(x).detach()
        return self.head(hidden), convert(hidden)

    model = Model(forward, body=nn.Linear(3, WIDTH), head=nn.Linear(WIDTH, 2)).eval()
    model.head.weight.data[:, 1] = 0
    assert len(compact(model, torch.randn(1, 3))(torch.randn(1, 3))[1][0]) == WIDTH


COUNTS = {
    "nonzero": lambda mask: len(mask.nonzero()),
    "index": lambda mask: len(mask[mask]),
    "masked_select": lambda mask: len(mask.masked_select(mask)),
    "unique": lambda mask: len(mask.sum(-1).unique()),
}


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_size_that_depends_on_values_is_live(count):
    def forward(self, x):
        return self.head(x) / (1 + count(self.mask(x) > 0))

    mask = nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 7))
    mask[2].weight.data[:, 1] = 0
    model = Model(forward, mask=mask, head=nn.Linear(3, 2))
    also = [(torch.randn(n, 3),) for n in (4, 4, 9)]
    assert compacted(model, torch.randn(4, 3), also=also).mask[0].out_features == WIDTH - 1


MASKS = [-1e4, -1e9, torch.finfo(torch.float32).min]


@pytest.mark.parametrize("mask", MASKS)
def test_masked_outputs_do_not_hide_differences(mask):
    def forward(self, x, legal):
        hidden = self.body(x) / x.shape[1]
        return self.head(hidden).amax(1).masked_fill(~legal, mask)

    model = Model(forward, body=nn.Linear(3, WIDTH), head=nn.Linear(WIDTH, 5)).eval()
    model.body.weight.data[2] = 0
    legal = torch.tensor([True, False, True, True, False])
    with pytest.raises(CompactError, match=r"shape \[2, 3, 3\] instead of \[2, 6, 3\]"):
        compact(model, (torch.randn(2, 6, 3), legal))


@pytest.mark.parametrize("mask", [*MASKS, torch.inf])
def test_difference_relative_to_elements_that_are_not_masked(mask):
    expected = torch.tensor([1.0, mask, -2.0, mask, 1e-3])
    got = expected + torch.tensor([0.0, 0.0, 0.0, 0.0, 0.02])
    assert difference([expected], [got]) == pytest.approx(0.01)
    shifted = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    both = torch.where(expected.abs() > 9, expected + shifted, expected)
    assert difference([both], [both]) == 0
    assert difference([both], [both + torch.tensor([0.02, 0, 0, 0, 0])]) == pytest.approx(0.01)


def test_difference_relative_to_large_elements():
    expected = torch.tensor([3e4, 1e4, 2e3, 0.0, 1.0])
    assert difference([expected], [expected + 3]) == pytest.approx(1e-4)
    expected = torch.tensor([3e4, 0.0, 0.0])
    assert difference([expected], [expected + 3]) == pytest.approx(1e-4)


@pytest.mark.parametrize("features", [[], {}], ids=["list", "dict"])
def test_results_that_the_model_adds_to_an_argument_stay_the_same(features):
    def forward(self, x, features):
        hidden = self.body(x).relu()
        if isinstance(features, list):
            features.append(hidden)
        else:
            features["hidden"] = hidden
        return self.head(hidden)

    model = Model(forward, body=nn.Linear(4, WIDTH), head=nn.Linear(WIDTH, 2))
    model.head.weight.data[:, :3] = 0
    smaller = compact(model, (torch.randn(2, 4), features))
    assert not features
    x = torch.randn(5, 4)
    expected, got = type(features)(), type(features)()
    torch.testing.assert_close(smaller(x, got), model(x, expected))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "wrap", [lambda y: y, lambda y: [y], lambda y: {"y": y}, lambda y: SimpleNamespace(y=y)]
)
def test_results_in_attributes_stay_the_same(wrap):
    def forward(self, x):
        hidden = self.body(x).relu()
        self.stored = wrap(self.actor(hidden))
        return self.critic(hidden)

    model = policy(wrap)
    model._forward = forward
    x = torch.randn(5, 4)
    smaller = compact(model, torch.randn(2, 4))
    assert smaller.body.out_features == 14  # nothing reads units 6 and 7
    torch.testing.assert_close(smaller(x), model(x))
    torch.testing.assert_close(
        list(tensors_of(smaller.stored)), list(tensors_of(model.stored)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["output", "input", "keyword"])
def test_hooks_see_the_same(kind):
    seen = []

    def forward(self, x):
        x = self.act(self.middle(self.first(x).relu()))
        return self.last(input=x) if kind == "keyword" else self.last(x)

    layers = {"first": nn.Linear(4, 8), "middle": nn.Linear(8, 6), "last": nn.Linear(6, 2)}
    model = Model(forward, **layers, act=nn.ReLU())
    model.middle.weight.data[:, :3] = model.last.weight.data[:, :3] = 0
    match kind:
        case "output":
            model.act.register_forward_hook(lambda layer, args, output: seen.append(output))
        case "input":
            model.last.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
        case "keyword":
            model.last.register_forward_hook(
                lambda layer, args, kwargs, output: seen.append(kwargs["input"]), with_kwargs=True
            )
    smaller = compact(model, torch.randn(2, 4))
    assert smaller.first.out_features == 5
    seen.clear()
    x = torch.randn(5, 4)
    model(x), smaller(x)
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize("resize", [False, True])
def test_layers_that_only_training_uses_are_not_changed(resize):
    def forward(self, x):
        features = self.first(x).relu()
        more = self.more(features)
        more = more.repeat(1, 2) if resize else more
        return (self.last(features), more) if self.training else self.last(features)

    more = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    model = Model(forward, first=nn.Linear(4, 8), last=nn.Linear(8, 2), more=more)
    model.last.weight.data[:, :4] = model.more[0].weight.data[:, 2:6] = 0
    optimizer = torch.optim.Adam(model.parameters())
    smaller, _ = compact(model, torch.randn(2, 4), optimizer=optimizer)
    assert smaller.first.out_features == 6
    x = torch.randn(5, 4)
    torch.testing.assert_close(smaller.train()(x), model.train()(x))


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize("call", ["compact", "deploy", "save"])
def test_hook_with_a_container_that_copies_share_is_refused(call, ran_before, tmp_path):
    """A copy has its own container, but its hook writes to the container of the original."""
    features = {}

    def keep(layer, args, output):
        features["first"] = output

    def forward(self, x):
        self.first(x)
        return self.last(self.features["first"].relu())

    model = Model(forward, first=nn.Linear(4, 8), last=nn.Linear(8, 2)).eval()
    model.features = features
    model.first.register_forward_hook(keep)
    x = torch.randn(2, 4)
    if ran_before:
        with torch.no_grad():
            model(x)
    run = {
        "compact": lambda: compact(model, x),
        "deploy": lambda: deploy(model, x, seconds=0, choose="sparse"),
        "save": lambda: save(model, tmp_path / "model.safetensors", example_inputs=x),
    }[call]
    with pytest.raises(DeploymentError, match="stores tensors in the attributes"):
        run()


def test_hook_that_is_a_method_can_be_copied():
    def keep(self, layer, args, output):
        self.features["first"] = output

    def forward(self, x):
        self.first(x)
        return self.last(self.features["first"].relu())

    model = Model(forward, first=nn.Linear(4, 8), last=nn.Linear(8, 2)).eval()
    model.features = {}
    model.first.register_forward_hook(MethodType(keep, model))
    smaller = compact(model, torch.randn(2, 4))
    x = torch.randn(5, 4)
    torch.testing.assert_close(smaller(x), model(x))
