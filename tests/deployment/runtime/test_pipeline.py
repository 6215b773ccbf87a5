"""deploy: equal outputs, an unchanged original, and fused layers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from pdecay.deployment.compact import CompactError, compact
from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.deployment.layers.modules import SparseConv2d, SparseLinear
from pdecay.deployment.model.errors import DeploymentError
from pdecay.deployment.runtime import layer_choice, pipeline
from pdecay.deployment.runtime.pipeline import deploy
from pdecay.lab.models import GPT, MLP, ResNet
from tests.deployment.networks import (
    NETWORKS,
    assert_same,
    mostly_zero,
    with_batch_statistics,
)

pytestmark = pytest.mark.skipif(bool(layers_kernel.available()), reason="no compiler")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


CASES = NETWORKS | {
    "batch norm without weights": lambda: (
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, affine=False), nn.ReLU()),
        torch.randn(5, 8),
    ),
    "grouped": lambda: (
        nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)),
        torch.randn(2, 4, 9, 9),
    ),
    "batch norm of rows": lambda: (
        nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU()),
        torch.randn(5, 8),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_equal_and_original_is_unchanged(clock, name):
    model, x = CASES[name]()
    model = with_batch_statistics(mostly_zero(model), x)
    before = copy.deepcopy(model.state_dict())
    deployed = deploy(model, x)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert deployed.report.chosen == "sparse"
    assert not any(module.training for module in deployed.modules())
    assert not any(parameter.requires_grad for parameter in deployed.parameters())
    assert not {p.data_ptr() for p in deployed.parameters()} & {
        p.data_ptr() for p in model.parameters()
    }
    assert_same(deployed, model, x)


def test_batch_norms_and_relus_are_folded(clock):
    model = with_batch_statistics(mostly_zero(ResNet(4, (1, 2))), torch.randn(3, 3, 16, 16))
    deployed = deploy(model, torch.randn(1, 3, 16, 16))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in deployed.modules())
    assert deployed.report.folded[:2] == ("stem.1", "stages.0.norm1")
    assert "stem.2" in deployed.report.folded
    assert isinstance(deployed.stem[0], SparseConv2d)
    assert deployed.stem[0].relu
    assert isinstance(deployed.stem[2], nn.Identity)
    block = deployed.stages[0]
    # The calls have the functional ReLUs, not the layers: other methods may call these.
    assert not block.conv1.relu
    assert not block.conv2.relu
    assert "the ReLU after stages.0.conv1" in deployed.report.folded
    assert "the ReLU after stages.0.conv2" in deployed.report.folded
    assert "the sum after stages.0.conv2" in deployed.report.folded
    assert "18 in total" in str(deployed.report)


class Encoder(nn.Module):
    """Its forward calls another method, as users do for embeddings."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 8)

    def embed(self, x):
        h = self.first(x).relu()
        return torch.relu(self.second(h) + h)

    def project(self, x):
        return self.head(self.embed(x))

    def forward(self, x):
        return self.project(x).relu()


def test_other_methods_of_a_fused_model_are_unchanged(clock):
    model = mostly_zero(Encoder()).eval()
    x = torch.randn(5, 32)
    deployed = deploy(model, x, choose="sparse")
    assert "the sum after second" in deployed.report.folded
    assert "the ReLU after head" in deployed.report.folded
    with torch.inference_mode():
        for method in ("forward", "embed", "project"):
            expected, got = (getattr(one, method)(x) for one in (model, deployed))
            torch.testing.assert_close(got, expected)
            got = getattr(copy.deepcopy(deployed), method)(x)
            torch.testing.assert_close(got, expected)


class AsksForItsDevice(nn.Module):
    """Sparse layers have no parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.second(self.first(x.to(next(self.parameters()).device)).relu())


@pytest.mark.parametrize("choose", ["measured", "sparse"])
def test_models_that_need_parameters_stay_dense(clock, choose):
    model = mostly_zero(AsksForItsDevice()).eval()
    x = torch.randn(5, 32)
    deployed = deploy(model, x, choose=choose)
    assert deployed.report.chosen == "dense"
    assert all(layer.choice == "dense" for layer in deployed.report.layers)
    assert "does not run with sparse layers (StopIteration)" in str(deployed.report)
    assert_same(deployed, model, x)


class PadsByItsKernel(nn.Module):
    """A causal convolution."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, stride=(1, 2), dilation=2, groups=2)

    def forward(self, x):
        conv = self.conv
        height, width = (
            step * (size - 1) for step, size in zip(conv.dilation, conv.kernel_size, strict=True)
        )
        return conv(functional.pad(x, (width, 0, height, 0))) / conv.groups / conv.stride[1]


def test_models_read_the_geometry_of_sparse_convolutions(clock):
    model = mostly_zero(PadsByItsKernel()).eval()
    x = torch.randn(2, 8, 9, 9)
    deployed = deploy(model, x, choose="sparse")
    assert isinstance(deployed.conv, SparseConv2d)
    assert_same(deployed, model, x)


class ChangesItsInput(nn.Module):
    """The second layer's input is changed in place before the sum."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.first(x)
        z = self.second(y)
        y.mul_(-3)
        return z + y


def test_sum_is_not_fused_past_in_place_change(clock):
    x = torch.randn(2, 4, 8, 8)
    model = mostly_zero(ChangesItsInput(), 0.5)
    deployed = deploy(model, x)
    assert deployed.report.chosen == "sparse"
    assert deployed.report.folded == ()
    assert_same(deployed, model, x)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.sparse = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return self.sparse(self.dense(x))


def test_dense_layers_return_contiguous_images(clock):
    model = Mixed()
    mostly_zero(model.sparse)
    model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    deployed = deploy(model, x)
    assert [layer.choice for layer in deployed.report.layers] == ["dense", "sparse"]
    formats = []
    deployed.sparse.register_forward_pre_hook(lambda _, args: formats.append(args[0]))
    assert_same(deployed, model, x)
    assert all(image.is_contiguous() for image in formats)
    assert_same(pickle.loads(pickle.dumps(deploy(model, x))), model, x)
    assert not model.dense.weight.is_contiguous()


class Odd(nn.Module):
    """No batch norm and no ReLU of this model may be folded."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.twice = nn.Conv2d(4, 4, 1)
        self.norm2 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.conv(x)
        z = self.norm(y) + y  # y is used twice
        z = self.norm2(self.twice(z)) + self.twice(z)  # called twice, normed once
        z = self.relu(self.last(z))
        return self.relu(self.last(z)) - self.relu(z - 1), y.mean()  # a ReLU of several


def test_outputs_used_twice_are_not_folded(clock):
    x = torch.randn(2, 2, 8, 8)
    model = with_batch_statistics(mostly_zero(Odd()), x)
    deployed = deploy(model, x)
    assert deployed.report.folded == ()
    model.eval()
    for got, wanted in zip(deployed(x), model(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


class Inplace(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)
        )

    def forward(self, x):
        return self.body(x)


def test_in_place_relu_is_folded(clock):
    x = torch.randn(2, 2, 8, 8)
    model = with_batch_statistics(mostly_zero(Inplace()), x)
    deployed = deploy(model, x)
    assert deployed.report.folded == ("body.1", "body.2")
    assert_same(deployed, model, x)


def test_weights_used_elsewhere_stay_dense(clock):
    model = mostly_zero(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))
    x = torch.randn(2, 5, 16)
    deployed = deploy(model, x)
    why = {layer.name: layer.why for layer in deployed.report.layers}
    assert why["self_attn.out_proj"] == "a NonDynamicallyQuantizableLinear"
    assert why["linear1"] == why["linear2"] == "not called on the example"  # a fused path
    assert_same(deployed, model, x)


def test_head_tied_to_embedding_becomes_sparse(clock):
    gpt = mostly_zero(GPT(20, 16, 1, 2, 16))
    tokens = torch.randint(20, (1, 16))
    deployed = deploy(gpt, tokens)
    assert isinstance(deployed.head, SparseLinear)
    assert isinstance(deployed.embedding, nn.Embedding)
    assert torch.equal(deployed.head.weight, deployed.embedding.weight)
    assert_same(deployed, gpt, tokens)


def test_dead_units_are_removed_first(clock):
    model = mostly_zero(MLP(16, (12,), 4), 0.5)
    model.layers[3].weight.data[:, :5] = 0
    x = torch.randn(2, 16)
    deployed = deploy(model, x)
    assert deployed.report.layers[0].shape == (7, 16)
    assert deployed.report.removed == 5
    assert_same(deployed, model, x)


def test_layers_are_chosen_if_compaction_fails(clock, monkeypatch):
    def fail(model, example):
        raise CompactError("too odd")

    monkeypatch.setattr(pipeline, "compact", fail)
    model, x = mostly_zero(MLP(64, (32,), 10)), torch.randn(3, 64)
    deployed = deploy(model, x)
    assert deployed.report.notes == ("not compacted: too odd",)
    assert deployed.report.chosen == "sparse"
    assert_same(deployed, model, x)
    with pytest.raises(CompactError, match="too odd"):
        deploy(model, torch.randn(3, 63))


class Block(nn.Module):
    """A residual block with one shared in-place ReLU and an in-place sum."""

    def __init__(self, channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 8, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 8, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.downsample = None
        if channels != 8:
            short = nn.Conv2d(channels, 8, 1, stride, bias=False)
            self.downsample = nn.Sequential(short, nn.BatchNorm2d(8))

    def forward(self, x):
        identity = x
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_in_place_residual_blocks_are_fused(clock, memory):
    x = torch.randn(2, 4, 16, 16).to(memory_format=memory)
    model = with_batch_statistics(mostly_zero(nn.Sequential(Block(4, 2), Block(8))), x).to(
        memory_format=memory
    )
    deployed = deploy(model, x)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in deployed.modules())
    for block in ("0", "1"):
        for fused in ("ReLU after {}.conv1", "sum after {}.conv2", "ReLU after {}.conv2"):
            assert f"the {fused.format(block)}" in deployed.report.folded
    assert_same(deployed, model, x)
    assert_same(deployed, model, torch.randn(5, 4, 9, 12))


class Outsiders(nn.Module):
    """Layers that are not submodules: in a plain list, and created in each run."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.hidden = [nn.BatchNorm2d(4).eval(), nn.Conv2d(4, 4, 1)]

    def forward(self, x):
        norm, conv = self.hidden
        blur = nn.Conv2d(4, 4, 3, groups=4, bias=False)
        nn.init.constant_(blur.weight, 1 / 9)
        return blur(conv(norm(self.conv(x))))


def test_unregistered_layers_are_ignored(clock):
    model, x = mostly_zero(Outsiders(), 0.6), torch.randn(2, 4, 8, 8)
    deployed = deploy(model, x)
    assert [layer.name for layer in deployed.report.layers] == ["conv"]
    assert isinstance(deployed.conv, SparseConv2d)
    assert_same(deployed, model, x)


def test_random_model_stays_dense(clock):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x + torch.rand(()))

    deployed = deploy(mostly_zero(Noisy(), 0.6), torch.randn(3, 8))
    assert deployed.report.chosen == "dense"
    assert "not sparse: its outputs differ" in str(deployed.report)
    assert "not faster" not in str(deployed.report)
    assert {layer.why for layer in deployed.report.layers} == {"the sparse model fails"}


def test_model_with_different_outputs_is_not_deployed(clock, monkeypatch):
    def wrong(layer, relu=False):
        made = SparseLinear(layer, relu=relu)
        made.values.mul_(1.01)
        return made

    monkeypatch.setattr(layer_choice, "make_sparse", wrong)
    deployed = deploy(mostly_zero(MLP(64, (32,), 10)), torch.randn(3, 64))
    assert deployed.report.chosen == "dense"
    assert "not sparse: its outputs differ by" in deployed.report.notes[0]


def test_keyword_and_tuple_arguments(clock):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, *, scale):
            return {"y": self.layer(x) * scale}

    model, x = mostly_zero(Two(), 0.6), torch.randn(3, 8)
    deployed = deploy(model, {"x": x, "scale": torch.tensor(2.0)})
    got, wanted = (one(x, scale=3.0)["y"] for one in (deployed, model))
    torch.testing.assert_close(got, wanted)
    deployed = deploy(mostly_zero(MLP(8, (8,), 2), 0.6), (x,))
    assert deployed.report.chosen == "sparse"


def test_invalid_models_are_rejected(clock):
    with pytest.raises(TypeError, match="deploy needs a"):
        deploy(3, torch.randn(3))
    with pytest.raises(TypeError, match="example_inputs must be a tensor"):
        deploy(nn.Linear(2, 2), 3)
    model = nn.Linear(2, 2)
    model.report = "mine"
    with pytest.raises(ValueError, match="the model has an attribute `report`"):
        deploy(model, torch.randn(1, 2))
    deployed = deploy(mostly_zero(nn.Linear(8, 8)), torch.randn(1, 8))
    with pytest.raises(ValueError, match="the model is deployed already"):
        deploy(deployed, torch.randn(1, 8))
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = nn.Sequential(torch.compile(model))
    with pytest.raises(
        TypeError, match="0 is compiled, which hides its layers: deploy the original model"
    ):
        deploy(compiled, torch.randn(1, 2))
    with pytest.raises(TypeError, match="the model is compiled"):
        deploy(torch.jit.ScriptModule(), torch.randn(1, 2))
    scripted = nn.Sequential(nn.ReLU(), torch.jit.script(model))
    with pytest.raises(TypeError, match="1 is compiled"):
        deploy(scripted, torch.randn(1, 2))
    with pytest.raises(CompactError, match="1 is a RecursiveScriptModule, which has no layers"):
        compact(scripted, torch.randn(1, 2))
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="weight is on the meta device and has no values"):
        deploy(empty, torch.randn(1, 2))
    sparse = nn.Linear(2, 2)
    sparse.register_buffer("graph", torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match=r"graph is a torch.sparse_coo tensor: deploy needs plain"):
        deploy(sparse, torch.randn(1, 2))
    masked = prune.random_unstructured(nn.Linear(2, 2), "weight", 0.5)
    with pytest.raises(CompactError, match=r"remove\(layer, 'weight'\)"):
        deploy(masked, torch.randn(1, 2))


def test_gradient_in_the_forward_raises():
    class Force(nn.Linear):
        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                return torch.autograd.grad(super().forward(x).tanh().sum(), x)[0]

    with pytest.raises(DeploymentError, match=r"does not run under .* only compacted with"):
        deploy(Force(2, 2), torch.randn(1, 2))


def test_everything_is_dense_without_compiler(clock, monkeypatch):
    monkeypatch.setattr(layers_kernel, "available", lambda: "no C compiler found")
    model, x = mostly_zero(MLP(64, (32,), 10)), torch.randn(3, 64)
    deployed = deploy(model, x)
    assert {layer.why for layer in deployed.report.layers} == {"no C compiler found"}
    assert_same(deployed, model, x)
