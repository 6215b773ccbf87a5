"""The behaviour of compact besides the removal: inputs, side effects, report and errors."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from pdecay.deployment.compact import CompactError, compact
from pdecay.deployment.compact.fitting import Fitting
from pdecay.deployment.model.inputs import Inputs

from .checks import Model
from .models import build, kill


def with_sparse_weight():
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.eye(3)[:2].to_sparse())
    return model


def dead_unit(width: int = 6) -> nn.Sequential:
    """Return a network whose unit 1 is not read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))
    model[2].weight.data[:, 1] = 0
    return model


def test_original_is_not_changed():
    model, example = build("resnet18")
    kill(model, 0)
    state = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    smaller = compact(model, example)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(not (m._forward_hooks or m._forward_pre_hooks) for m in model.modules())
    assert smaller is not model
    mine = {id(param) for param in model.parameters()}
    assert not any(id(param) in mine for param in smaller.parameters())
    assert not hasattr(model, "compact_report")


@pytest.mark.parametrize("hidden", [False, True])
def test_example_that_the_model_changes_in_place(hidden):
    def forward(self, x):
        x.sub_(1).div_(2)
        if hidden:  # functionalization does not support it
            x.sum().tolist()
        return self.last(self.first(x).relu())

    model = Model(forward, first=nn.Linear(3, 6), last=nn.Linear(6, 2))
    model.last.weight.data[:, 1] = 0
    example = torch.randn(4, 3)
    given = example.clone()
    assert compact(model, example).first.out_features == 5
    assert torch.equal(example, given)


def test_example_in_an_object_that_the_model_changes():
    def forward(self, batch):
        batch.x = batch.x - 1
        return self.last(self.first(batch.x).relu())

    model = Model(forward, first=nn.Linear(3, 6), last=nn.Linear(6, 2))
    model.last.weight.data[:, 1] = 0
    batch = SimpleNamespace(x=torch.randn(4, 3))
    given = batch.x
    assert compact(model, (batch,)).first.out_features == 5
    assert batch.x is given
    inputs = Inputs.of((batch,))
    assert [len(one.args[0].x) for one in inputs.other_batches()] == [8, 1]


def test_modes_flags_and_hooks_are_kept():
    model, example = build("resnet18")
    model.stages[0].conv2.weight.data[:, 0] = 0
    model.train()
    model.stages[0].eval()
    model.stages[0].conv1.weight.requires_grad_(False)
    smaller = compact(model, example)
    assert [m.training for m in smaller.modules()] == [m.training for m in model.modules()]
    assert len(smaller.stages[0].conv1.weight) == 7
    for (name, before), after in zip(model.named_parameters(), smaller.parameters(), strict=True):
        assert before.requires_grad == after.requires_grad, name
        assert isinstance(after, nn.Parameter)
    assert all(not (m._forward_hooks or m._forward_pre_hooks) for m in smaller.modules())


def test_random_state_is_not_changed():
    model, example = build("resnet18")
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    compact(model, example)
    assert torch.equal(torch.rand(3), expected)


def test_torch_backend_flags_are_restored():
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.inference_mode():
        smaller = compact(*build("encoder"))
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.is_grad_enabled()
    smaller(torch.randn(2, 5, 16)).sum().backward()  # fails if there are inference tensors


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype):
    model = dead_unit().to(dtype)
    smaller = compact(model, torch.randn(4, 3, dtype=dtype))
    assert smaller[0].out_features == 5
    assert {param.dtype for param in smaller.parameters()} == {dtype}


class Counting(nn.Module):
    """Counts its runs in a buffer shared by two modules, and stores its last input in another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dead_unit()
        self.register_buffer("runs", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", None)
        self.register_buffer("history", torch.zeros(0))
        self.body[0].register_buffer("runs", self.runs)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.last = x
        self.history = torch.cat([self.history, x.detach().sum().view(1)])
        return self.body(x)


def test_buffers_changed_by_a_run_are_restored():
    model = Counting()
    smaller = compact(model, torch.randn(4, 3))
    assert smaller.body[0].out_features == 5
    for one in (model, smaller):
        assert one.runs == 0
        assert one.runs is one.body[0].runs
        assert one.last is None
        assert one.history.shape == (0,)


def test_shared_buffer_stays_shared():
    model = dead_unit()
    scale = torch.rand(6)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", scale)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = nn.Sequential(model[0], Scale(), nn.ReLU(), Scale(), model[2])
    smaller = compact(model, torch.randn(4, 3))
    assert smaller[1].scale.shape == (5,)
    assert smaller[3].scale is smaller[1].scale


@dataclass
class Outputs:
    logits: Tensor
    nested: dict[str, list[Tensor]]
    number: int = 3


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = dead_unit()
        self.words = nn.Embedding(9, 3)

    def forward(self, x: Tensor, tokens: Tensor, *, scale: float = 1.0) -> Outputs:
        y = self.body(x * scale + self.words(tokens))
        return Outputs(y, {"twice": [2 * y, tokens]})


@pytest.mark.parametrize(
    "example",
    [
        (torch.randn(4, 3), torch.tensor([1, 2, 3, 4])),
        [torch.randn(4, 3), torch.tensor([1, 2, 3, 4])],
        {"x": torch.randn(4, 3), "tokens": torch.tensor([1, 2, 3, 4]), "scale": 0.5},
    ],
    ids=["tuple", "list", "dict"],
)
def test_nested_inputs_and_outputs(example):
    smaller = compact(ManyOutputs(), example)
    assert smaller.body[0].out_features == 5


def test_report():
    model = dead_unit()
    model.append(nn.LayerNorm(2))
    model[0].weight.data[3] = 0
    model[0].bias.data[3] = -1.0
    model[2].weight.data[0] = 0
    report = compact(model, torch.randn(4, 3)).compact_report
    assert report.units == 2
    assert report.removed == {"zero": 1, "unread": 1}
    assert report.parameters == (42, 30)
    assert [(one.name, one.before, one.after) for one in report.tensors] == [
        ("0.weight", (6, 3), (4, 3)),
        ("0.bias", (6,), (4,)),
        ("2.weight", (2, 6), (2, 4)),
    ]
    assert [(one.layer, one.units) for one in report.kept] == [("2.weight", (0,))]
    assert str(report) == (
        "42 parameters -> 30 (28.6% fewer)\n"
        "removed 2 units: 1 unread, 1 zero\n"
        "\n"
        "weight    before  after\n"
        "-----------------------\n"
        "0.weight  6x3       4x3\n"
        "2.weight  2x6       2x4\n"
        "\n"
        "dead units that were kept:\n"
        "  2.weight: 1 unit: 3 (native_layer_norm) mixes all of them"
    )
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_report_uses_unit_indices_of_the_original():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.Softmax(-1))
    model[2].weight.data[:, [0, 1]] = 0  # two units are removed
    model[0].weight.data[5] = 0  # a constant: removed with fold, kept without
    report = compact(model, torch.randn(4, 3), fold=False).compact_report
    assert [(one.layer, one.units) for one in report.kept] == [("0.weight", (5,))]


def test_smaller_model_can_be_pickled_copied_and_trained():
    smaller = compact(dead_unit(), torch.randn(4, 3))
    again = pickle.loads(pickle.dumps(copy.deepcopy(smaller)))
    assert again.compact_report == smaller.compact_report
    again(torch.randn(4, 3)).sum().backward()
    assert again[0].weight.grad.shape == (5, 3)
    assert set(smaller.state_dict()) == set(dead_unit().state_dict())


def test_second_compact_removes_nothing():
    model, example = build("resnet18")
    kill(model, 1)
    once = compact(model, example)
    assert compact(once, example).compact_report.units == 0


@pytest.mark.parametrize(
    ("model", "example", "error", "message"),
    [
        ("model", torch.randn(1), TypeError, "needs a torch.nn.Module, got str"),
        (dead_unit(), "x", TypeError, "must be a tensor, a tuple .* a dict .* got str"),
        (dead_unit(), {1: 2}, TypeError, "must be strings .*got 1"),
        (dead_unit(), torch.randn(4, 9), CompactError, "does not run on example_inputs: mat1"),
        (nn.Identity(), (), CompactError, "does not run on example_inputs"),
        (dead_unit(), torch.randn(0, 4), ValueError, r"no elements, got .* shape \(0, 4\)"),
        (nn.DataParallel(dead_unit()), torch.randn(4, 3), CompactError, "give its .module"),
        (nn.LazyLinear(3), torch.randn(4, 3), CompactError, "run the model once before compact"),
        (nn.Linear(3, 2, device="meta"), torch.randn(4, 3), CompactError, "on the meta device"),
        (dead_unit(), torch.eye(4).to_sparse(), TypeError, "has a torch.sparse_coo tensor: give"),
        (with_sparse_weight(), torch.randn(4, 3), CompactError, "weight is a torch.sparse_coo"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_bad_arguments_raise(model, example, error, message):
    with pytest.raises(error, match=message):
        compact(model, example)


def test_sparse_tensor_in_the_forward_raises():
    class Graph(nn.Linear):
        def forward(self, x):
            return torch.sparse.mm(torch.eye(len(x)).to_sparse(), super().forward(x))

    with pytest.raises(CompactError, match=r"in the forward is a torch.sparse_coo tensor: compact"):
        compact(Graph(3, 2), torch.randn(4, 3))


def test_quantized_model_raises():
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(8, 4))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    with pytest.raises(CompactError, match=r"0.weight is a Int8Tensor: .* before a quantization"):
        compact(model, torch.randn(2, 8))


def test_compiled_model_raises():
    compiled = nn.Identity()
    compiled._orig_mod = dead_unit()  # like the wrapper of torch.compile
    with pytest.raises(CompactError, match="then compile the result"):
        compact(compiled, torch.randn(4, 3))


def test_random_outputs_in_eval_mode_raise():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.randn(1)

    with pytest.raises(CompactError, match="different outputs for the same inputs"):
        compact(Noisy(3, 2), torch.randn(4, 3))


def test_model_without_outputs_raises():
    class Nothing(nn.Linear):
        def forward(self, x):
            return None

    with pytest.raises(CompactError, match="returns no tensors"):
        compact(Nothing(3, 2), torch.randn(4, 3))


def test_model_that_cannot_be_copied_raises():
    model = dead_unit()
    model.cache = model(torch.randn(4, 3))  # has a gradient history
    with pytest.raises(CompactError, match="cannot be copied"):
        compact(model, torch.randn(4, 3))


def test_different_outputs_raise(monkeypatch):
    """The final check finds any error of the steps before."""
    fit = Fitting.fit

    def spoiled(self):
        smaller = fit(self)
        with torch.no_grad():
            smaller[2].bias.add_(1e-3)
        return smaller

    monkeypatch.setattr(Fitting, "fit", spoiled)
    with pytest.raises(CompactError, match=r"outputs differ by .* more than 1e-05"):
        compact(dead_unit(), torch.randn(4, 3))


@pytest.mark.parametrize("constant", [0.0, 1.0, -3.0])
def test_constant_example_is_checked_on_random_numbers(constant):
    other = Inputs.of(torch.full((2, 5), constant)).randomized(torch.Generator().manual_seed(0))
    assert other.args[0].std() > 0.5
