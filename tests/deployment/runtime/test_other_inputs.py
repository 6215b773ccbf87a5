"""Deployed models on other inputs than the example, and what they remember of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.deployment.layers.modules import SparseLinear
from pdecay.deployment.runtime.pipeline import deploy
from tests.deployment.networks import (
    Windows,
    assert_same,
    mostly_zero,
    with_batch_statistics,
)

pytestmark = pytest.mark.skipif(bool(layers_kernel.available()), reason="no compiler")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x.sub_(0.5))


def test_example_is_not_changed(clock):
    x = torch.randn(3, 8)
    before = x.clone()
    deployed = deploy(mostly_zero(Centred(), 0.6), x)
    assert torch.equal(x, before)
    assert deployed.report.chosen == "sparse"


class Stateful(nn.Module):
    """A model whose forward changes two buffers, one of them in place; both count its calls."""

    def __init__(self):
        super().__init__()
        self.fc = mostly_zero(nn.Linear(64, 64))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("others", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.others = self.others + 1
        return self.fc(x)


@pytest.mark.parametrize("choose", ["sparse", "dense"])
def test_buffers_that_runs_change_are_restored(clock, choose):
    model, x = Stateful().eval(), torch.randn(3, 64)
    model.calls.fill_(7)
    deployed = deploy(model, x, choose=choose)
    for one in (model, deployed):
        assert (float(one.calls), float(one.others)) == (7, 0)
    deployed(x)
    assert (float(deployed.calls), float(deployed.others)) == (8, 1)
    assert (float(model.calls), float(model.others)) == (7, 0)


class BatchBranch(nn.Module):
    """A model whose code treats a batch of one row in another way."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(256, 256)
        self.norm = nn.BatchNorm1d(256)
        self.second = nn.Linear(256, 16)
        self.other = nn.Linear(256, 16)
        mostly_zero(self.first, 0.95)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)
            if kind != "norm":
                self.second.weight[:, :128] = 0

    def forward(self, x):
        h = self.first(x)
        if self.kind == "norm":
            return self.second((self.norm(h) if len(x) > 1 else h).relu())
        if self.kind == "activation":
            return self.second(h.relu() if len(x) > 1 else h)
        return (self.second if len(x) > 1 else self.other)(h.relu())


@pytest.mark.parametrize("kind", ["norm", "activation", "layer"])
def test_branch_on_the_batch_size_keeps_both_branches(kind):
    model = BatchBranch(kind).eval()
    x = torch.randn(16, 256)
    deployed = deploy(model, x)
    with torch.inference_mode():
        for given in (x, x[:1], torch.cat([x, x])):
            torch.testing.assert_close(deployed(given), model(given), rtol=1e-4, atol=1e-4)
    notes = " ".join(deployed.report.notes)
    if kind != "activation":  # there, no unit is removed and no ReLU is fused
        assert "for another size" in notes or "the model's code takes another" in notes


def test_checks_of_other_batch_sizes_keep_no_plans():
    model = mostly_zero(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), 0.98)
    deployed = deploy(model, torch.randn(1, 512))
    layers = [layer for layer in deployed.modules() if isinstance(layer, SparseLinear)]
    assert all(len(layer._calls) == 1 for layer in layers)


def test_checks_of_other_sizes_do_not_change_later_runs(clock):
    model = Windows().eval()
    with torch.no_grad():
        model.second.weight[:, :3] = 0
    x = torch.randn(2, 12, 5)
    deployed = deploy(model, x, choose="sparse")
    assert deployed.report.removed == 3
    assert not deployed.report.notes
    torch.testing.assert_close(deployed(x), model(x))
    assert deployed.size == model.size == 4


class Remembers(nn.Module):
    """A network that remembers its first or its last features in an attribute."""

    def __init__(self, last):
        super().__init__()
        self.last, self.features = last, None
        self.layer, self.norm, self.relu = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()

    def forward(self, x):
        x = self.norm(self.layer(x))
        if self.features is not None and self.last:
            x = x + self.features[: len(x)]
        x = self.relu(x)
        if self.features is None or self.last:
            self.features = x
        return x if self.last else x - self.features[: len(x)].mean()


@pytest.mark.parametrize("choose", ["sparse", "dense"])
@pytest.mark.parametrize("last", [False, True])
def test_deployed_model_does_not_remember_the_example(clock, choose, last):
    model = mostly_zero(Remembers(last)).eval()
    nn.init.normal_(model.norm.running_mean)
    deployed = deploy(model, torch.randn(4, 32), choose=choose)
    assert model.features is deployed.features is None
    assert (deployed.report.chosen == "dense") == last  # it uses the layer in two ways
    for x in torch.randn(3, 4, 32):
        torch.testing.assert_close(deployed(x), model(x), rtol=1e-4, atol=1e-5)


class Domains(nn.Module):
    """A network with a batch norm for each domain, or one without for the second domain."""

    def __init__(self, norms):
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(norms))

    def forward(self, x, domain=0):
        x = self.layer(x)
        return self.norms[int(domain)](x) if domain < len(self.norms) else x


@pytest.mark.parametrize(
    ("norms", "number"), [(2, ()), (2, (0,)), (2, (torch.tensor(0),)), (1, (0,))]
)
def test_batch_norm_that_a_number_chooses(clock, norms, number):
    model = Domains(norms)
    for norm in model.norms:
        nn.init.normal_(norm.running_mean)
    x = torch.randn(2, 3, 8, 8)
    deployed = deploy(model.eval(), (x, *number), choose="dense")
    for domain in (0, 1):
        torch.testing.assert_close(deployed(x, domain), model(x, domain), rtol=1e-4, atol=1e-4)


def test_layers_with_two_names(clock):
    class TwoNames(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.old_first = nn.Linear(8, 16)
            self.norm = self.old_norm = nn.BatchNorm1d(16)
            self.relu = self.old_relu = nn.ReLU()

        def forward(self, x):
            return self.old_relu(self.old_norm(self.old_first(x)))

    x = torch.randn(5, 8)
    model = with_batch_statistics(mostly_zero(TwoNames()), x)
    deployed = deploy(model, x)
    assert deployed.report.chosen == "sparse"
    assert deployed.first is deployed.old_first
    assert_same(deployed, model, x)


def test_results_in_attributes_stay_the_same(clock):
    class Stores(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
            self.second, self.relu, self.last = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)

        def forward(self, x):
            self.before_norm = self.first(x)
            self.before_relu = self.second(self.norm(self.before_norm))
            return self.last(self.relu(self.before_relu))

    x = torch.randn(5, 8)
    model = with_batch_statistics(mostly_zero(Stores()).requires_grad_(False), x)
    deployed = deploy(model, x)
    assert deployed.report.chosen == "sparse"
    assert_same(deployed, model, x)
    torch.testing.assert_close(deployed.before_norm, model.before_norm)
    torch.testing.assert_close(deployed.before_relu, model.before_relu)


class Adding(nn.Module):
    """A network that adds the results of two layers to an argument."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.second, self.relu, self.last = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)

    def forward(self, x, found):
        found["first"] = self.first(x)
        found["second"] = [self.second(self.norm(found["first"]))]
        return self.last(self.relu(found["second"][0]))


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("choose", ["sparse", "dense"])
def test_results_that_are_added_to_an_argument_stay_the_same(clock, by_name, choose):
    def run(model, found):
        return model(x, found=found) if by_name else model(x, found)

    x = torch.randn(5, 8)
    model = mostly_zero(Adding()).eval().requires_grad_(False)
    model.norm.running_mean.normal_()
    deployed = deploy(model, ((x,), {"found": {}}) if by_name else (x, {}), choose=choose)
    wanted, got = {}, {}
    torch.testing.assert_close(run(deployed, got), run(model, wanted))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("choose", ["sparse", "dense"])
def test_hooks_of_outer_modules_see_the_same(clock, choose):
    x = torch.randn(5, 8)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(8, 16)), nn.BatchNorm1d(16),
        nn.Linear(16, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 4)),
    )  # fmt: skip
    model = mostly_zero(model).eval().requires_grad_(False)
    model[1].running_mean.normal_()
    seen = {}
    model[0].register_forward_hook(lambda module, args, output: seen.update(after=output))
    model[3].register_forward_pre_hook(lambda module, args: seen.update(before=args[0]))
    deployed = deploy(model, x, choose=choose)
    torch.testing.assert_close(deployed(x), model(x))
    wanted = dict(seen)
    deployed(x)
    torch.testing.assert_close(seen, wanted)


@pytest.mark.parametrize("index", range(4))
def test_modules_whose_forward_was_replaced_are_kept(clock, index):
    x = torch.randn(5, 8)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
    model = mostly_zero(nn.Sequential(*layers)).eval()
    forward = model[index].forward
    model[index].forward = lambda x: forward(x.clamp(-9, 9))  # the example has no such numbers
    deployed = deploy(model, x, choose="sparse")
    assert deployed.report.chosen == "sparse"
    assert_same(deployed, model, 50 * x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("in_example", [True, False])
@pytest.mark.parametrize("dead_heads", [True, False])
def test_encoder_that_nests_padded_sequences(clock, in_example, dead_heads):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    if dead_heads:
        for one in model.layers:
            one.self_attn.out_proj.weight.data[:, :4] = 0
    x, padding = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 3:] = True
    masked = {"src_key_padding_mask": padding}
    deployed = deploy(model, ((x,), masked if in_example else {}), choose="sparse")
    with torch.inference_mode():
        torch.testing.assert_close(deployed(x, **masked), model(x, **masked))


def test_model_that_takes_its_input_out_of_a_dict():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, batch):
            return self.layer(batch.pop("x"))

    model = Model()
    batch = {"x": torch.randn(2, 8)}
    deployed = deploy(model, (batch,), seconds=0)
    torch.testing.assert_close(deployed(dict(batch)), model(dict(batch)))


class Collecting(nn.Module):
    """A network whose first run registers hooks that collect the outputs of its layers.

    The models of transformers do so for ``output_hidden_states=True``.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16)))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        if not getattr(self, "has_hooks", False):
            self.layers[1].register_forward_pre_hook(self.collect)
            self.layers[1].register_forward_hook(self.collect)
            self.has_hooks = True
        self.collected = []
        self.layers(x)
        return self.head(torch.cat(self.collected, 1))

    def collect(self, layer, args, output=None):
        # From the model, since a hook of a copy refers to the original.
        CURRENT[0].collected.append(args[0] if output is None else output)

    def __call__(self, x):
        CURRENT[:] = [self]
        return super().__call__(x)


CURRENT = []


def test_hooks_that_the_first_run_registers(clock):
    model, x = mostly_zero(Collecting()), torch.randn(5, 8)
    deployed = deploy(model, x, choose="sparse")
    assert deployed.report.chosen == "sparse"
    assert_same(deployed, model, x)
    assert len(deployed.collected) == len(model.collected) == 2
