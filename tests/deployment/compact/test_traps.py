"""Difficult cases: units that look dead but are not, and dead units that must be kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from pdecay.deployment.compact import CompactError, compact
from pdecay.deployment.compact.analysis import analyse
from pdecay.deployment.compact.fitting import first_mismatch
from pdecay.deployment.compact.removal import Removal
from pdecay.deployment.compact.trace import record
from pdecay.deployment.model.inputs import Inputs

from .checks import Model, compacted, reasons


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("shape", [(2, 8, 8), (1, 2, 8, 8), (3, 2, 8, 8)])
def test_instance_norm_updates_num_features(affine, statistics, shape):
    norm = nn.InstanceNorm2d(6, affine=affine, track_running_stats=statistics)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), norm, nn.Conv2d(6, 4, 3))
    model[2].weight.data[:, 1] = 0
    assert compacted(model, torch.randn(shape))[1].num_features == 5


@pytest.mark.parametrize("affine", [False, True])
def test_group_norm_updates_num_groups_and_num_channels(affine):
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6, affine=affine), nn.Conv2d(6, 4, 3))
    model[2].weight.data[:, 2:4] = 0
    norm = compacted(model, torch.randn(2, 2, 8, 8))[1]
    assert (norm.num_groups, norm.num_channels) == (2, 4)


def test_filter_taps_outside_the_example_image_count():
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 3, 3, padding=1))
    model[1].weight.data[:, 2, 1, 1] = 0  # the only tap that reads a 1x1 image
    smaller = compacted(model, torch.randn(2, 2, 1, 1), also=[(torch.randn(2, 2, 5, 5),)])
    assert smaller[0].out_channels == 4


def test_constant_that_an_average_of_padding_makes_smaller():
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.AvgPool2d(3, 2, 1), nn.BatchNorm2d(4)),
        *(nn.ReLU(), nn.Conv2d(4, 2, 1)),
    )
    # The averages of the constant 1 are 4 / 9, 6 / 9 and 1. For an image of one pixel it is 1 / 9.
    model[0].weight.data[0], model[0].bias.data[0] = 0, 1
    model[2].weight.data[0], model[2].bias.data[0] = -1, 0.3
    compacted(model, torch.randn(2, 3, 12, 12), also=[(torch.randn(2, 3, 1, 1),)])


def test_position_embeddings_beyond_the_example_are_kept():
    layers = {"positions": nn.Parameter(torch.randn(1, 9, 6)), "head": nn.Linear(6, 2)}
    model = Model(lambda self, x: self.head(x + self.positions[:, : x.shape[1]]), **layers)
    smaller = compacted(model, torch.randn(2, 1, 6), also=[(torch.randn(2, 9, 6),)])
    assert smaller.positions.shape == (1, 9, 6)


@pytest.mark.parametrize("like", [torch.zeros_like, torch.ones_like])
def test_tensors_like_a_parameter(like):
    """The queries of DETR, for example."""

    def forward(self, x):
        queries = like(self.positions) + self.positions
        return self.last(self.first(queries)) + x

    layers = {"first": nn.Linear(6, 8), "last": nn.Linear(8, 6)}
    model = Model(forward, positions=nn.Parameter(torch.randn(3, 6)), **layers)
    model.last.weight.data[:, 2:4] = 0
    assert compacted(model, torch.randn(2, 3, 6)).first.out_features < 8


def test_position_embedding_rows_may_differ_beyond_the_example():
    def forward(self, x):
        alone = self.mix(self.positions[:, : x.shape[1]])
        return self.head(torch.cat([alone.expand(len(x), -1, -1), x], -1))

    layers = {"mix": nn.Linear(4, 5), "head": nn.Linear(8, 2)}
    model = Model(forward, positions=nn.Parameter(torch.randn(1, 9, 4)), **layers)
    compacted(model, torch.randn(2, 1, 3), also=[(torch.randn(2, 9, 3),)])


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.RMSNorm(6), nn.Softmax(-1)])
def test_normalized_channels_are_kept(norm):
    model = nn.Sequential(nn.Linear(3, 6), norm, nn.Linear(6, 2))
    model[0].weight.data[1] = 0
    model[2].weight.data[:, 2] = 0
    smaller = compacted(model, torch.randn(4, 3))
    assert smaller[0].out_features == 6
    assert "mixes all of them" in reasons(smaller)["0.weight"]


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_norm_whose_weight_and_bias_a_network_computes(norm):
    def forward(self, x, style):
        weight, bias = self.scales(self.style(style).relu()).view(2, -1)
        x = self.body(x)
        if norm == "batch":
            mean, variance = torch.zeros(len(bias)), torch.ones(len(bias))
            x = nn.functional.batch_norm(x, mean, variance, weight, bias)
        else:
            x = nn.functional.group_norm(x, len(bias), weight, bias)
        return self.head(x.relu())

    layers = {"style": nn.Linear(4, 6), "scales": nn.Linear(6, 16)}
    model = Model(forward, body=nn.Conv1d(3, 8, 1), head=nn.Conv1d(8, 2, 1), **layers)
    with torch.no_grad():
        model.scales.weight[:, 2] = 0
        model.body.weight[1] = 0  # its norm is the bias, which varies
        model.style.bias[:2] = -9  # zero on the example
    also = [(torch.randn(2, 3, 5), 20 * torch.randn(1, 4)) for _ in range(4)]
    smaller = compacted(model, torch.randn(2, 3, 5), torch.randn(1, 4), also=also)
    assert smaller.style.out_features == 5


class _Ensemble(nn.Linear):
    """Several linear layers; their weights are one tensor of (members, inputs, outputs)."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.weight = nn.Parameter(torch.randn(3, inputs, outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class _LowRank(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.weight = None
        self.down = nn.Parameter(torch.randn(2, inputs))
        self.up = nn.Parameter(torch.randn(outputs, 2))

    def forward(self, x):
        return x @ self.down.mT @ self.up.mT + self.bias


class _Transposed(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


@pytest.mark.parametrize("kind", [_Ensemble, _LowRank, _Transposed])
def test_subclass_with_another_kind_of_weight(kind):
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), kind(4, 2))
    model[2].weight.data[:, :3] = 0
    smaller = compacted(model, torch.randn(3, 5, 3))
    assert (smaller[0].out_features, smaller[2].in_features) == (5, 5)
    assert (smaller[4].in_features, smaller[4].out_features) == (4, 2)


def test_rounding_errors_of_the_model_are_tolerated():
    def forward(self, x):
        return (self.body(x) + 1e3) - 1e3

    body = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64))
    body[0].weight.data[1] = 0  # folding this constant changes the order of summation
    model = Model(forward, body=body)
    smaller = compact(model, torch.randn(64, 3))
    assert smaller.body[0].out_features == 63
    assert smaller.compact_report.difference > 1e-5
    assert compact(model.double(), torch.randn(64, 3).double()).compact_report.difference < 1e-12


def test_zero_factors_are_not_both_removed():
    """a = b = u - 1 with u = 1: each factor makes the other unread, so one must be live."""
    model = Model(
        lambda self, x: self.head(self.a(self.u(x)) * self.b(self.u(x)) + self.live(x)),
        u=nn.Linear(3, 2),
        a=nn.Linear(2, 4),
        b=nn.Linear(2, 4),
        live=nn.Linear(3, 4),
        head=nn.Linear(4, 2),
    )
    with torch.no_grad():
        model.u.weight.zero_()
        model.u.bias.fill_(1)
        for layer in (model.a, model.b):
            layer.weight.copy_(torch.tensor([[1.0, 0.0]] * 4))
            layer.bias.fill_(-1)
    compacted(model, torch.randn(4, 3))


def test_tensor_converted_to_a_number_is_live():
    def forward(self, x):
        return self.head(self.body(x)) * self.scale(x).abs().max().item()

    model = Model(
        forward, body=nn.Linear(3, 4), head=nn.Linear(4, 2), scale=nn.Sequential(
            nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    )  # fmt: skip
    model.scale[2].weight.data[:, 1] = 0
    smaller = compacted(model, torch.randn(4, 3), also=[(torch.randn(4, 3),)])
    assert smaller.scale[0].out_features == 4


def test_branch_on_the_values_of_the_example():
    def forward(self, x):
        return self.head(self.one(x) if x.sum() > 0 else self.two(x))

    model = Model(forward, one=nn.Linear(3, 4), two=nn.Linear(3, 4), head=nn.Linear(4, 2))
    smaller = compacted(model, torch.ones(4, 3))
    assert smaller.two.out_features == 4


def test_division_by_the_number_of_units_keeps_them():
    """A mean computed from the size changes with fewer units."""
    model = Model(
        lambda self, x: self.head(self.body(x) / self.body.weight.shape[0]),
        body=nn.Linear(3, 6),
        head=nn.Linear(6, 2),
    )
    model.head.weight.data[:, 2] = 0
    smaller = compacted(model, torch.randn(4, 3))
    assert smaller.body.out_features == 6
    assert "the code of" in reasons(smaller)["body.weight"]


def test_hard_coded_size_keeps_units():
    model = Model(
        lambda self, x: self.head(self.body(x).view(-1, 2, 3).flatten(1)),
        body=nn.Linear(3, 6),
        head=nn.Linear(6, 2),
    )
    model.head.weight.data[:, 3:] = 0
    smaller = compacted(model, torch.randn(4, 3))
    assert smaller.body.out_features == 6
    assert "the code of the model (Model) needs this size" in reasons(smaller)["body.weight"]


def test_attribute_with_an_equal_number_keeps_its_value():
    def forward(self, x):
        x = x[:, : self.longest]
        parts = self.body(x).split([self.first, self.second], -1)
        return self.head(parts[0] * parts[1])

    model = Model(forward, body=nn.Linear(3, 12), head=nn.Linear(6, 2))
    model.first = model.second = model.longest = 6
    model.head.weight.data[:, 2] = 0
    smaller = compacted(model, torch.randn(4, 2, 3), also=[(torch.randn(4, 6, 3),)])
    assert (smaller.first, smaller.second, smaller.longest) == (5, 5, 6)


def test_uninitialized_memory_is_not_compared():
    model = Model(lambda self, x: self.layer(torch.empty_like(x).copy_(x)), layer=nn.Linear(3, 2))
    inputs = Inputs.of(torch.randn(4, 3))
    trace, run = record(model, inputs), record(model, inputs)
    found = analyse(trace, {})
    for number, one in enumerate((trace, run)):
        (fresh,) = (call for call in one.calls if call.uninitialized)
        fresh.outs[0].tensor.fill_(number)
    assert first_mismatch(Removal(found.units), trace, run) is None


def test_layer_that_runs_twice():
    model = Model(
        lambda self, x: self.head(self.step(self.step(self.start(x)).relu())),
        start=nn.Linear(3, 5),
        step=nn.Linear(5, 5),
        head=nn.Linear(5, 2),
    )
    model.start.weight.data[1] = 0  # constant before the first step only
    model.step.weight.data[:, 2] = 0
    model.head.weight.data[:, 2] = 0
    smaller = compacted(model, torch.randn(4, 3))
    assert smaller.step.weight.shape == (4, 4)
    assert smaller.start.out_features == 4


def test_gradient_in_the_forward():
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = self.last(torch.tanh(self.first(x))).sum()
            return torch.autograd.grad(energy, x)[0]

    model = Model(forward, first=nn.Linear(4, 8), last=nn.Linear(8, 1))
    model.first.weight.data[:3] = 0
    smaller = compacted(model, torch.randn(5, 4))
    assert smaller.first.weight.shape == (5, 4)
    assert {one.layer for one in smaller.compact_report.kept} <= {"last.weight"}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag_dimensions(mode):
    model = nn.Sequential(nn.EmbeddingBag(9, 6, mode=mode), nn.Linear(6, 3))
    model[1].weight.data[:, 1] = 0
    model[0].weight.data[:, 2] = 0
    model[0].weight.data[:, 3] = 0.5  # constant, except for empty bags and other bag sizes
    other = [torch.tensor([3, 1, 8]), torch.tensor([0, 2, 2])]  # the second bag is empty
    smaller = compact(model, torch.randint(0, 9, (4, 5)))
    assert smaller[0].embedding_dim == smaller[1].in_features == 4
    torch.testing.assert_close(smaller[1](smaller[0](*other)), model[1](model[0](*other)))


def test_tied_embeddings_are_kept():
    model = Model(
        lambda self, tokens: self.head(self.words(tokens)),
        words=nn.Embedding(9, 6),
        head=nn.Linear(6, 9, bias=False),
    )
    model.head.weight = model.words.weight
    model.words.weight.data[:, 2] = 0
    smaller = compacted(model, torch.randint(0, 9, (2, 5)))
    assert smaller.words.weight.shape == (9, 6)
    assert smaller.head.weight is smaller.words.weight


def test_masks_of_torch_prune_are_cut():
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    mask = torch.ones(2, 6)
    mask[:, 1] = 0
    prune.custom_from_mask(model[2], "weight", mask)
    model[2].weight = model[2].weight.detach()  # like after a run under no_grad
    smaller = compacted(model, torch.randn(4, 3))
    assert smaller[0].out_features == 5
    assert smaller[2].weight_mask.shape == smaller[2].weight_orig.shape == (2, 5)


def test_weight_norm_removes_only_zeros():
    layers = [parametrizations.weight_norm(nn.Conv1d(6, 6, 3, padding=1)) for _ in range(3)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    directions = [layer.parametrizations.weight.original1.data for layer in layers]
    directions[1][:, 2] = 0  # nothing reads channel 2 of the first
    layers[1].parametrizations.weight.original0.data[4] = 0  # channel 4 of the second is zero, but
    layers[1].bias.data[4] = 0  # its weights in the consumer are part of a norm
    smaller = compacted(model, torch.randn(2, 6, 9))
    assert [tuple(layer.weight.shape[:2]) for layer in smaller[::2]] == [(5, 6), (6, 5), (6, 6)]
    assert "mixes all of them" in reasons(smaller)["2.parametrizations.weight.original1"]


def test_weight_computed_from_all_its_elements_is_kept():
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    parametrizations.spectral_norm(model[0])
    model[2].weight.data[:, 1] = 0
    model(torch.randn(4, 3))
    smaller = compacted(model, torch.randn(4, 3))
    assert smaller[0].weight.shape == (6, 3)


def test_operation_without_a_rule_is_reported():
    model = Model(
        lambda self, x: self.head(torch.cdist(self.body(x), self.body(x))),
        body=nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4)),
        head=nn.Linear(5, 2),
    )
    model.body[2].weight.data[:, 1] = 0
    smaller = compacted(model, torch.randn(5, 3))
    assert smaller.body[0].out_features == 5  # units before the operation are removed
    assert any("cdist" in one for one in smaller.compact_report.unknown)
    assert "operations without a rule" in str(smaller.compact_report)


def test_one_unit_is_kept_if_all_are_dead():
    model = Model(
        lambda self, x: self.shortcut(x) + self.out(self.inner(x).relu()),
        shortcut=nn.Linear(3, 2),
        inner=nn.Linear(3, 6),
        out=nn.Linear(6, 2),
    )
    model.out.weight.data.zero_()
    smaller = compacted(model, torch.randn(4, 3))
    assert smaller.inner.out_features == 1
    assert reasons(smaller)["inner.weight"] == "a layer needs at least one unit"


def test_negative_zero_is_zero():
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    model[2].weight.data[:, 1] = -0.0
    assert compacted(model, torch.randn(4, 3))[0].out_features == 5


def test_units_read_only_by_dead_units_are_removed():
    """A chain: only dead units read the second unit, and only the second reads the third."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    model[3].weight.data[:, 5] = 0
    model[2].weight.data[:5, 4] = 0
    model[1].weight.data[[0, 1, 2, 3, 5], 3] = 0
    smaller = compacted(model, torch.randn(4, 6))
    assert [layer.out_features for layer in smaller] == [5, 5, 5, 6]


def test_channels_read_only_by_a_dead_group_are_removed():
    model = nn.Sequential(nn.Conv2d(2, 6, 1), nn.Conv2d(6, 6, 1, groups=2), nn.Conv2d(6, 2, 1))
    model[2].weight.data[:, :3] = 0  # nothing reads the first group, the only consumer of
    model[1].weight.data[3:, 1] = 0  # the second channel of each group
    smaller = compacted(model, torch.randn(2, 2, 4, 4))
    assert (smaller[1].groups, smaller[1].in_channels, smaller[0].out_channels) == (1, 2, 2)


def test_report_names_modules_that_did_not_run():
    model = Model(
        lambda self, x, extra=False: (self.other if extra else self.second)(self.first(x)),
        first=nn.Linear(4, 6),
        second=nn.Linear(6, 2),
        other=nn.Linear(6, 2),
    )
    model.second.weight.data[:, :3] = 0
    report = compact(model, torch.randn(5, 4)).compact_report
    assert report.unused == ("other",)
    assert "modules that did not run on the example, which may not fit any more:\n  other" in str(
        report
    )
    assert report.to_dict()["unused"] == ["other"]
    whole = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    assert compact(whole, torch.randn(2, 3)).compact_report.unused == ()


def test_failing_rule_is_reported_as_a_bug(monkeypatch):
    def fail(self, call, units):
        raise TypeError("a mistake in the rule")

    monkeypatch.setattr("pdecay.deployment.compact.rules.products.MatrixProduct.label", fail)
    with pytest.raises(CompactError, match=r"the rule for .*addmm.* failed \(TypeError: a mistake"):
        compact(nn.Sequential(nn.Linear(3, 2)), torch.randn(2, 3))


def test_dtype_that_a_rule_does_not_support_keeps_units(monkeypatch):
    def fail(self, call, units):
        raise NotImplementedError("not implemented for 'ComplexFloat'")

    monkeypatch.setattr("pdecay.deployment.compact.rules.products.MatrixProduct.label", fail)
    report = compact(nn.Sequential(nn.Linear(3, 2)), torch.randn(2, 3)).compact_report
    assert report.unknown == ("0 (addmm)",)
