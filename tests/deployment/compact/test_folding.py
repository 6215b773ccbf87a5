"""Units with constant outputs, removed if the next layer can add the constants to its bias."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from pdecay.deployment.compact import CompactError, compact

from .checks import Model, compacted, reasons
from .models import trained


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def two_convolutions(constant: float, **options) -> nn.Sequential:
    """Return two convolutions; channel 1 of the first is constant."""
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Identity(), nn.Conv2d(4, 3, 3, **options))
    model[0].weight.data[1] = 0
    model[0].bias.data[1] = constant
    return model


@pytest.mark.parametrize("options", [{}, {"padding": 1, "padding_mode": "reflect"}])
def test_constant_is_folded_into_the_bias(options):
    smaller = compacted(two_convolutions(0.7, **options), torch.randn(2, 2, 6, 6))
    assert smaller[0].out_channels == 3
    assert smaller.compact_report.removed == {"constant": 1}


def test_nonzero_constant_before_zero_padding_is_kept():
    smaller = compacted(two_convolutions(0.7, padding=1), torch.randn(2, 2, 6, 6))
    assert smaller[0].out_channels == 4
    assert "pads the image with zeros" in reasons(smaller)["0.weight"]


@pytest.mark.parametrize(("padding", "channels"), [(0, 3), (1, 4)])
def test_constant_before_a_depthwise_convolution(padding, channels):
    """With zero padding the depthwise output is not constant at the border."""
    depthwise = nn.Conv2d(4, 4, 3, padding=padding, groups=4)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), depthwise, nn.Conv2d(4, 3, 1))
    model[0].weight.data[1] = 0
    smaller = compacted(model, torch.randn(2, 2, 6, 6))
    assert smaller[0].out_channels == smaller[1].groups == channels
    assert channels == 3 or "a depthwise convolution" in reasons(smaller)["0.weight"]


def test_hidden_in_place_operation_is_reported_as_unknown():
    """Circular padding in torch copies into an empty tensor."""
    model = two_convolutions(0.7, padding=1, padding_mode="circular")
    smaller = compacted(model, torch.randn(2, 2, 6, 6))
    assert smaller[0].out_channels == 4
    assert smaller.compact_report.unknown == ("2 (copy_)",)


def test_zero_before_zero_padding_is_removed():
    smaller = compacted(two_convolutions(0.0, padding=1), torch.randn(2, 2, 6, 6))
    assert smaller[0].out_channels == 3


@pytest.mark.parametrize("bias", [False, True])
def test_layer_without_bias_gets_one(bias):
    model = nn.Sequential(nn.Linear(3, 5), nn.Sigmoid(), nn.Linear(5, 2, bias=bias))
    model[0].weight.data[[1, 3]] = 0  # the biases are not zero
    smaller = compacted(model, torch.randn(4, 3))
    assert smaller[0].out_features == 3
    assert smaller[2].bias.requires_grad
    kept = compact(model, torch.randn(4, 3), fold=False)
    assert kept[0].out_features == 5
    assert reasons(kept)["0.weight"].endswith("folding constants into biases is off")


def test_batch_norm_channel_of_weight_zero_is_constant():
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
    )
    trained(model)
    model[1].weight.data[[0, 2]] = 0
    model[1].bias.data[:3] = torch.tensor([0.5, 0.1, -0.5])
    smaller = compacted(model, torch.randn(2, 2, 8, 8))
    assert smaller[0].out_channels == 4
    assert smaller.compact_report.removed == {"constant": 1, "zero": 1}


@pytest.mark.parametrize(("unevenness", "size"), [(1e-7, 4), (1e-4, 5)])
def test_constants_are_equal_up_to_rounding(unevenness, size):
    model = Model(
        lambda self, x: self.out(self.layer(x) + self.rows),
        layer=nn.Linear(3, 5),
        out=nn.Linear(5, 2),
    )
    model.register_buffer("rows", torch.ones(4, 5) + unevenness * torch.arange(4)[:, None])
    model.layer.weight.data[1] = 0
    smaller = compacted(model, torch.randn(4, 3))
    assert smaller.layer.out_features == size
    assert size == 4 or "not the same at all positions" in reasons(smaller)["layer.weight"]


def test_new_bias_is_not_a_mismatch():
    """A layer with a new bias runs another operation; fitting must ignore the difference."""
    body = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 6, bias=False))
    counts = Model(lambda self, x: self.out(x.view(len(x), self.units)), out=nn.Linear(6, 2))
    counts.units = 6
    body[0].weight.data[1] = 0
    body[0].bias.data[1] = 1.0
    counts.out.weight.data[:, 4] = 0
    smaller = compacted(nn.Sequential(body, counts), torch.randn(4, 3))
    assert smaller[0][0].out_features == 4
    assert smaller[0][2].bias is not None
    assert smaller[1].units == smaller[1].out.in_features == 5


def test_constant_is_folded_into_the_running_layer_of_a_shared_weight():
    model = Model(
        lambda self, x: self.runs(self.body(x).relu()),
        body=nn.Linear(3, 5), other=nn.Linear(5, 2), runs=nn.Linear(5, 2),
    )  # fmt: skip
    model.runs.weight = model.other.weight
    model.body.weight.data[1] = 0
    model.body.bias.data[1] = 1.0
    model.other.weight.data[:, 3] = 0
    smaller = compacted(model, torch.randn(4, 3))
    assert smaller.runs.weight is smaller.other.weight
    assert smaller.body.out_features == 4


@pytest.mark.parametrize("computed", ["prune", "parametrize", "shared"])
def test_no_folding_into_computed_or_shared_biases(computed):
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2), nn.Linear(2, 2))
    model[0].weight.data[1] = 0
    model[0].bias.data[1] = 1.0
    if computed == "prune":
        prune.identity(model[2], "bias")
        model[2].bias = model[2].bias.detach()
    elif computed == "parametrize":
        parametrize.register_parametrization(model[2], "bias", nn.Tanh())
    else:
        model[3].bias = model[2].bias
    smaller = compacted(model, torch.randn(4, 3))
    assert smaller[0].out_features == 5
    assert "bias" in reasons(smaller)["0.weight"]
    assert computed != "shared" or smaller[3].bias is smaller[2].bias


class Doubling(nn.Linear):
    """A layer whose forward would double a bias."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_no_folding_into_layers_with_custom_forward():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), Doubling(5, 2))
    model[0].weight.data[1] = 0
    model[0].bias.data[1] = 1.0
    smaller = compacted(model, torch.randn(4, 3))
    assert smaller[0].out_features == 5
    assert "not a layer with a bias that compact knows" in reasons(smaller)["0.weight"]


def test_bias_added_in_one_round_is_cut_in_the_next():
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Linear(4, 4, bias=False), Doubling(4, 4), nn.Linear(4, 2)
    )
    model[0].weight.data[1] = 0  # a constant: the next layer gets a bias
    model[1].weight.data[2, [0, 2, 3]] = 0  # constant, too, but Doubling cannot fold it
    model[2].weight.data[:3, 2] = 0
    model[2].weight.data[3, [0, 1, 3]] = 0  # constant because of it, before a layer that can fold
    smaller = compacted(model, torch.randn(4, 3))
    assert [layer.out_features for layer in smaller] == [3, 3, 3, 2]
    assert smaller[1].bias.shape == (3,)


REDUCTIONS = {
    "sum": lambda h: h.sum(1),
    "norm": lambda h: torch.linalg.vector_norm(h, dim=1),
    "last of cumsum": lambda h: h.cumsum(1)[:, -1],
    "product with ones": lambda h: (torch.ones(1, h.shape[1]) @ h)[:, 0],
    "logsumexp": lambda h: h.logsumexp(1),
    "mean with padding": lambda h: nn.functional.pad(h, (0, 0, 1, 0)).mean(1),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_constants_that_follow_the_length_of_a_sequence_are_kept(name):
    reduce = REDUCTIONS[name]
    model = Model(
        lambda self, x: self.head(reduce(self.body(x).relu())),
        body=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
    )
    model.body.weight.data[1] = 0
    model.body.bias.data[1] = 1.0
    others = [(torch.randn(2, length, 3),) for length in (1, 3, 9)]
    smaller = compacted(model, torch.randn(2, 6, 3), also=others)
    assert smaller.body.out_features == 5


def test_mean_of_a_constant_is_folded():
    model = Model(
        lambda self, x: self.head(self.body(x).mean(1)), body=nn.Linear(3, 5), head=nn.Linear(5, 2)
    )
    model.body.weight.data[1] = 0
    smaller = compacted(model, torch.randn(2, 6, 3), also=[(torch.randn(2, 9, 3),)])
    assert smaller.body.out_features == 4


def test_recurrent_layer_that_reads_constants_only():
    model = Model(
        lambda self, x: self.head(self.layer(self.body(x))[0][:, -1]),
        body=nn.Linear(3, 5),
        layer=nn.LSTM(5, 4, batch_first=True),
        head=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)),
    )
    model.body.weight.data.zero_()  # the state still follows the length of the sequence
    compacted(model, torch.randn(2, 6, 3), also=[(torch.randn(2, 9, 3),)])


def test_norm_of_a_weight_does_not_follow_the_input():
    """The size of a weight is fixed, so that sums over it are constants."""
    model = Model(
        lambda self, x: self.head(x @ nn.functional.normalize(self.body.weight, dim=1).mT),
        body=nn.Linear(3, 5, bias=False),
        head=nn.Linear(5, 2),
    )
    model.head.weight.data[:, 1] = 0
    model.body.weight.data[1] = 0
    assert compacted(model, torch.randn(2, 3)).body.weight.shape[0] == 4


def test_constant_computed_from_the_length_of_a_sequence_is_refused():
    model = Model(
        lambda self, x: self.head((self.body(x) * x.shape[1]).mean(1)),
        body=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
    )
    model.body.weight.data[1] = 0
    with pytest.raises(CompactError, match=r"shape \[2, 3, 3\] instead of \[2, 6, 3\]"):
        compact(model, torch.randn(2, 6, 3))
    assert compact(model, torch.randn(2, 6, 3), fold=False).body.out_features == 5
