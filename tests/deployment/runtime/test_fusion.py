"""Fusion of ReLUs and sums into sparse layers, in the usual ways to write a forward."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.deployment.layers.modules import SparseConv2d, SparseLayer
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.runtime.fusion import fuse
from pdecay.deployment.runtime.usage import count_tensor_calls

pytestmark = pytest.mark.skipif(bool(layers_kernel.available()), reason="no compiler")


class Block(nn.Module):
    """A residual block whose forward is defined by subclasses."""

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


class ReversedSum(Block):
    """The layer is the second summand, and no ReLU follows."""

    def forward(self, x):
        return x + self.norm(self.second(functional.relu(self.first(x), inplace=True)))


BOTH = ["the ReLU after first", "the sum after second", "the ReLU after second"]


def fused_once(model, *args):
    """Fuse the operations of a model whose modules are called once."""
    return fuse(model, dict.fromkeys(model.modules(), 1), Inputs.of(args))


@pytest.mark.parametrize(
    ("kind", "fused"),
    [(Functions, BOTH), (Methods, BOTH), (InPlace, BOTH), (ReversedSum, BOTH[:2])],
)
def test_relus_and_sums_are_fused(kind, fused):
    model, x = kind(), torch.randn(2, 4, 9, 9)
    with torch.inference_mode():
        wanted = model(x.clone())
        assert fused_once(model, x) == fused
        model(x.clone())  # creates the plans
        calls = called_functions(model, x.clone())
        assert not {"relu", "relu_", "add", "add_", "__iadd__"} & calls
        torch.testing.assert_close(model(x), wanted)
        torch.testing.assert_close(model(x[:1]), wanted[:1])  # another size


def called_functions(model, x):
    """Return the names of the torch functions that a run calls."""
    names = set()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.add(func.__name__)
            return func(*args, **(kwargs or {}))

    with Watch():
        model(x)
    return names


@pytest.mark.parametrize("method", ["copy", "pickle", "save", "double"])
def test_fused_model_copies_and_converts(method):
    model, x = InPlace(), torch.randn(2, 4, 9, 9)
    with torch.inference_mode():
        wanted = model(x)
    fused_once(model, x)
    names = list(model.state_dict())
    if method == "copy":
        other = copy.deepcopy(model)
    elif method == "pickle":
        other = pickle.loads(pickle.dumps(model))
    elif method == "save":
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
        if method != "double":  # the copy shares no buffers
            for parameter in other.buffers():
                parameter.data.zero_()
            torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("copied", [False, True])
@torch.no_grad()
def test_replaced_submodules_of_a_fused_model_take_effect(copied):
    model, x = ReversedSum(), torch.randn(2, 4, 9, 9)
    model.norm = nn.BatchNorm2d(4).eval()
    fused_once(model, x)
    model = pickle.loads(pickle.dumps(model)) if copied else model
    wanted = model(x)
    model.norm = nn.Hardtanh(-0.1, 0.1)
    assert (model(x) - x).abs().max() <= 0.1001
    model.norm = nn.BatchNorm2d(4).eval()
    torch.testing.assert_close(model(x), wanted)
    model.first = model.first.to_dense()  # it takes no ReLU
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)
    model.first.weight.zero_()
    assert not torch.allclose(model(x), wanted, rtol=1e-2, atol=1e-2)


def test_fused_forward_keeps_its_signature():
    model = Functions()
    before = inspect.signature(model.forward)
    fused_once(model, torch.randn(2, 4, 9, 9))
    assert inspect.signature(model.forward).parameters.keys() == before.parameters.keys()


class Broadcasts(Block):
    """The other summand broadcasts the layer's output, but not on the example."""

    def forward(self, x):
        mean = functional.adaptive_avg_pool2d(x, 1)
        return functional.relu(self.short(mean) + self.first(x).tanh())


def test_sum_may_broadcast_layer_output():
    model, x = Broadcasts(), torch.randn(2, 4, 9, 9)
    with torch.inference_mode():
        wanted = model(x)
        assert "the sum after short" in fused_once(model, x)
        model(x[..., :1, :1])
        torch.testing.assert_close(model(x), wanted)


class InPlaceBetween(Block):
    """The first layer's input is changed in place before the sum."""

    def forward(self, x):
        short = self.short(x)
        return self.second(self.relu(x)) + short


def test_layer_is_not_moved_past_in_place_change():
    model = InPlaceBetween()
    x = torch.randn(2, 4, 9, 9)
    with torch.inference_mode():
        wanted = model(x.clone())
        assert fused_once(model, x) == ["the sum after second"]
        torch.testing.assert_close(model(x.clone()), wanted)


class OperatorBetween(Block):
    def forward(self, x):
        short = self.short(x)
        x *= 2
        return self.second(x) + short


def test_operators_work_in_place_in_a_fused_forward():
    model = OperatorBetween()
    x = torch.randn(2, 4, 9, 9)
    with torch.inference_mode():
        wanted, given = model(x.clone()), x.clone()
        assert fused_once(model, x) == ["the sum after second"]
        torch.testing.assert_close(model(given), wanted)
        torch.testing.assert_close(given, 2 * x)
        torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x.clone()), wanted)


class InHelper(Block):
    def forward(self, x, mask):
        return self.masked(functional.relu(self.first(x)), mask)

    def masked(self, x, mask):
        return 2 * x if mask is None else x * mask


class OfAttribute(Block):
    def forward(self, batch):
        y = functional.relu(self.first(batch.x))
        return 2 * y if batch.mask is None else y * batch.mask


@pytest.mark.parametrize("kind", [InHelper, OfAttribute])
@torch.no_grad()
def test_branch_on_an_argument_that_is_no_tensor(kind):
    model, x = kind(), torch.randn(2, 4, 9, 9)
    arguments = (x, None) if kind is InHelper else (SimpleNamespace(x=x, mask=None),)
    wanted = model(*arguments)
    assert fused_once(model, *arguments) == ["the ReLU after first"]
    torch.testing.assert_close(model(*arguments), wanted)


def test_modules_that_get_other_arguments_than_tensors_are_not_fused():
    model, x = OfAttribute(), torch.randn(2, 4, 9, 9)
    inputs = Inputs.of((SimpleNamespace(x=x, mask=x),))
    calls = count_tensor_calls(model, inputs)
    assert calls == {model.first: 1}
    assert fuse(model, calls, inputs) == []


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


class ChangesTheOtherByOperator(Block):
    def forward(self, x):
        x += self.first(x)
        return x


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
    """A layer that is called twice and followed by a ReLU once."""

    def forward(self, x):
        return functional.relu(self.first(x)) + self.first(x - 1)


class Remembers(Block):
    """A forward that stores its result in the module."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(functional.relu(self.first(x)))
        return self.seen[-1]


class RemembersElsewhere(Block):
    """A forward that stores its result in an object of the module."""

    def __init__(self):
        super().__init__()
        self.seen = SimpleNamespace(last=None)

    def forward(self, x):
        self.seen.last = functional.relu(self.first(x))
        return self.seen.last


class Counts(Block):
    runs = 0

    def forward(self, x):
        self.runs += 1
        return functional.relu(self.first(x))


class MayBeNone(Block):
    def forward(self, x, mask):
        y = functional.relu(self.first(x))
        return y if mask is None else y * mask


class OptionalKey(Block):
    def forward(self, batch):
        y = functional.relu(self.first(batch["x"]))
        mask = batch.get("mask")
        return y if mask is None else y * mask


class OptionalPart(Block):
    def forward(self, parts):
        x, mask = parts
        y = functional.relu(self.first(x))
        return y * mask if mask is not None else y


class ChecksType(Block):
    def forward(self, x):
        return functional.relu(self.first(x[0] if isinstance(x, list) else x))


class Replaced(Block):
    """A forward set on the instance; torch.fx would trace the class's."""

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
        *(Remembers, RemembersElsewhere, Counts, MayBeNone, OptionalKey, OptionalPart),
        *(ChecksType, Replaced, ByName, ChangesTheOtherByOperator),
    ],
)
def test_unsafe_forwards_are_not_fused(kind):
    model = kind()
    x = torch.randn(2, 4, 9, 9)
    other = {MayBeNone: (x, x), OptionalKey: ({"x": x},), OptionalPart: ((x, x),)}
    called = {**dict.fromkeys(model.modules(), 1), model.first: 2 if kind is Reused else 1}
    before = model.forward
    state = dict(vars(model))
    assert fuse(model, called, Inputs.of(other.get(kind, x))) == []
    assert model.forward == before
    assert vars(model) == state
    assert not any(one.relu for one in model.modules() if isinstance(one, SparseLayer))


def test_fused_model_can_be_exported():
    model, x = Functions().eval(), torch.randn(2, 4, 6, 6)
    expected = model(x)
    assert fused_once(model, x)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected, rtol=1e-4, atol=1e-5)
