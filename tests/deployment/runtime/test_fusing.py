"""What follows a sparse layer in a forward becomes part of it, however people write it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.deployment.layers.modules import SparseConv2d, SparseLayer
from pdecay.deployment.runtime.fusing import fuse

pytestmark = pytest.mark.skipif(bool(layers_kernel.available()), reason="no compiler")


class Block(nn.Module):
    """A residual block; subclasses write its forward in their own way."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = self.sparse()
        self.norm = nn.Identity()
        self.second = self.sparse()
        self.short = self.sparse()
        self.relu = nn.ReLU(inplace=True)
        self.scale = 2.0

    def sparse(self):
        dense = nn.Conv2d(4, 4, 3, padding=1)
        dense.weight.data.mul_(torch.rand(dense.weight.shape) >= 0.8)
        return SparseConv2d(dense)


class Functions(Block):
    def forward(self, x):
        y = functional.relu(self.norm(self.first(x)))
        return torch.relu(torch.add(self.second(y), x))


class Methods(Block):
    def forward(self, x):
        y = self.norm(self.first(x)).relu_()
        return self.second(y).add(x).relu()


class InPlace(Block):
    def forward(self, x):
        y = self.relu(self.first(x))
        y = self.second(y)
        y += self.short(x)
        return self.relu(y)


class Otherwise(Block):
    """The sum's other way round, and nothing after it."""

    def forward(self, x):
        return x + self.norm(self.second(functional.relu(self.first(x), inplace=True)))


BOTH = ["the ReLU after first", "the sum after second", "the ReLU after second"]


def counts(model):
    return dict.fromkeys(model.modules(), 1)


@pytest.mark.parametrize(
    ("kind", "taken"),
    [(Functions, BOTH), (Methods, BOTH), (InPlace, BOTH), (Otherwise, BOTH[:2])],
)
def test_relus_and_sums_are_taken_in(kind, taken):
    model, x = kind(), torch.randn(2, 4, 9, 9)
    with torch.inference_mode():
        wanted = model(x.clone())
        assert fuse(model, counts(model)) == taken
        model(x.clone())  # what it plans, it plans now
        calls = watched(model, x.clone())
        assert not {"relu", "relu_", "add", "add_", "__iadd__"} & calls
        torch.testing.assert_close(model(x), wanted)
        torch.testing.assert_close(model(x[:1]), wanted[:1])  # another size


def watched(model, x):
    """The names of the torch functions that a run calls."""
    names = set()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.add(func.__name__)
            return func(*args, **(kwargs or {}))

    with Watch():
        model(x)
    return names


@pytest.mark.parametrize("way", ["copy", "pickle", "save", "double"])
def test_a_fused_model_is_still_a_module(way):
    model, x = InPlace(), torch.randn(2, 4, 9, 9)
    with torch.inference_mode():
        wanted = model(x)
    fuse(model, counts(model))
    names = list(model.state_dict())
    if way == "copy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    elif way == "save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other, x, wanted = copy.deepcopy(model).double(), x.double(), wanted.double()
    assert type(other) is InPlace
    assert other.scale == 2.0
    assert list(other.state_dict()) == names
    with torch.no_grad():
        torch.testing.assert_close(other(x), wanted, rtol=1e-4, atol=1e-5)
        if way != "double":  # it is a model of its own
            for parameter in other.buffers():
                parameter.data.zero_()
            torch.testing.assert_close(model(x), wanted)


class Spreads(Block):
    """The layer's output is the smaller one of the sum, but not on the example."""

    def forward(self, x):
        mean = functional.adaptive_avg_pool2d(x, 1)
        return functional.relu(self.short(mean) + self.first(x).tanh())


def test_a_sum_may_be_larger_than_the_layers_output():
    model, x = Spreads(), torch.randn(2, 4, 9, 9)
    with torch.inference_mode():
        wanted = model(x)
        assert "the sum after short" in fuse(model, counts(model))
        model(x[..., :1, :1])
        torch.testing.assert_close(model(x), wanted)


class InPlaceBetween(Block):
    """What the first layer reads is changed before the sum, where the example may not show it."""

    def forward(self, x):
        short = self.short(x)
        return self.second(self.relu(x)) + short


def test_a_layer_is_not_moved_past_what_changes_its_input():
    model = InPlaceBetween()
    x = torch.randn(2, 4, 9, 9)
    with torch.inference_mode():
        wanted = model(x.clone())
        assert fuse(model, counts(model)) == ["the sum after second"]
        torch.testing.assert_close(model(x.clone()), wanted)


class Branches(Block):
    def forward(self, x):
        return functional.relu(self.first(x)) if x.mean() > 0 else x


class Optional(Block):
    def forward(self, x, mask=None):
        return functional.relu(self.first(x))


class UsedTwice(Block):
    def forward(self, x):
        y = self.first(x)
        return functional.relu(y) + y


class ChangesTheOther(Block):
    def forward(self, x):
        return x.add_(self.first(x))


class Scaled(Block):
    def forward(self, x):
        return torch.add(self.first(x), x, alpha=2) + 1


class OwnTensor(Block):
    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x):
        return functional.relu(self.first(x)) * self.own


class Hooked(Block):
    def __init__(self):
        super().__init__()
        self.first.register_forward_hook(lambda *_: None)

    def forward(self, x):
        return functional.relu(self.first(x))


class Reused(Block):
    """Called twice, and followed by a ReLU once."""

    def forward(self, x):
        return functional.relu(self.first(x)) + self.first(x - 1)


class Remembers(Block):
    """What a trace would write into it would be no tensor."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(functional.relu(self.first(x)))
        return self.seen[-1]


class Counts(Block):
    runs = 0

    def forward(self, x):
        self.runs += 1
        return functional.relu(self.first(x))


class MayBeNone(Block):
    def forward(self, x, mask):
        y = functional.relu(self.first(x))
        return y if mask is None else y * mask


class AsksForTheType(Block):
    def forward(self, x):
        return functional.relu(self.first(x[0] if isinstance(x, list) else x))


class Replaced(Block):
    """Its forward is not its class's, which fx would trace."""

    def __init__(self):
        super().__init__()
        self.forward = self.other

    def forward(self, x):
        return functional.relu(self.first(x))

    def other(self, x):
        return self.first(x)


class ByName(Block):
    def forward(self, x):
        return functional.relu(self.norm(input=self.first(x)))


@pytest.mark.parametrize(
    "kind",
    [
        *(Branches, Optional, UsedTwice, ChangesTheOther, Scaled, OwnTensor, Hooked, Reused),
        *(Remembers, Counts, MayBeNone, AsksForTheType, Replaced, ByName),
    ],
)
def test_what_would_change_the_result_stays(kind):
    model = kind()
    called = {**counts(model), model.first: 2 if kind is Reused else 1}
    before = model.forward
    state = dict(vars(model))
    assert fuse(model, called) == []
    assert model.forward == before
    assert vars(model) == state
    assert not any(one.relu for one in model.modules() if isinstance(one, SparseLayer))
