"""compact on many architectures: outputs do not change, and dead units are removed."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from pdecay.deployment.compact import compact
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import difference, outputs

from .models import ARCHITECTURES, build, kill

SEEDS = range(3)


def over_all(seeds=SEEDS):
    return pytest.mark.parametrize(
        ("name", "seed"), [(name, seed) for name in ARCHITECTURES for seed in seeds]
    )


@over_all()
def test_outputs_do_not_change(name, seed):
    model, example = build(name, seed)
    kill(model, seed)
    model.eval()
    inputs = Inputs.of(example)
    smaller = compact(model, example)
    for other in (inputs, inputs.randomized(torch.Generator().manual_seed(99))):
        assert difference(outputs(model, other), outputs(smaller, other)) < 1e-5
    assert smaller.compact_report.parameters[1] <= smaller.compact_report.parameters[0]


@over_all(seeds=[0])
def test_model_without_dead_units_is_not_changed(name, seed):
    model, example = build(name, seed)
    smaller = compact(model, example)
    assert smaller.compact_report.units == 0
    assert smaller.compact_report.tensors == ()
    for (key, before), after in zip(
        model.state_dict().items(), smaller.state_dict().values(), strict=True
    ):
        assert torch.equal(before, after), key


@over_all(seeds=[0])
def test_every_operation_has_a_rule(name, seed):
    model, example = build(name, seed)
    unknown = compact(model, example).compact_report.unknown
    if name == "lstm":
        assert unknown[0] == "lstm is recurrent"
    else:
        assert unknown == ()


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_recurrent_layers_that_transpose_in_place(kind):
    torch.manual_seed(0)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(5, 4)
            self.inner = kind(4, 6, batch_first=True)
            self.after = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, x):
            return self.after(self.inner(self.before(x))[0])

    model, x = Network().eval(), torch.randn(2, 3, 5)
    model.after[2].weight.data[:, :3] = 0
    smaller = compact(model, x)
    assert smaller.after[0].weight.shape == (5, 6)
    torch.testing.assert_close(smaller(x), model(x))


def zero(model: nn.Module, parameter: str, index) -> None:
    with torch.no_grad():
        model.get_parameter(parameter)[index] = 0


# For each network: the weights to set to zero, and the expected shapes.
PLANTED = {
    "mlp": (
        [("layers.3.weight", (slice(None), [1, 4])), ("layers.5.weight", (slice(None), [0]))],
        {"layers.1.weight": (14, 6), "layers.3.weight": (11, 14), "layers.5.weight": (3, 11)},
    ),
    "cnn": (
        [("features.3.weight", (slice(None), [2])),
         ("head.layers.1.weight", (slice(None), range(9)))],
        # A channel of 3 x 3 pixels is nine columns of the linear layer after flatten.
        {"features.0.weight": (7, 3, 3, 3), "features.1.running_var": (7,),
         "features.3.weight": (11, 7, 3, 3), "head.layers.1.weight": (16, 99)},
    ),
    "vgg": (
        [("features.2.0.weight", (slice(None), [0, 5]))],
        {"features.0.0.weight": (6, 3, 3, 3), "features.2.0.weight": (12, 6, 3, 3)},
    ),
    "resnet18": (
        # Units inside a block, and a residual channel whose producers are all zero.
        [("stages.1.conv2.weight", (slice(None), [3])),
         *((f"{one}.weight", [2]) for one in ("stem.0", "stages.0.conv2", "stages.1.conv2")),
         *((f"{one}.{p}", [2]) for one in ("stem.1", "stages.0.norm2", "stages.1.norm2")
           for p in ("weight", "bias"))],
        {"stages.1.conv1.weight": (7, 7, 3, 3), "stem.0.weight": (7, 3, 3, 3),
         "stages.1.conv2.weight": (7, 7, 3, 3), "stages.2.conv1.weight": (16, 7, 3, 3)},
    ),
    "bottleneck": (
        [("features.1.inner.1.0.weight", (slice(None), [1])),
         ("features.1.inner.2.weight", (slice(None), [0, 2]))],
        {"features.1.inner.0.0.weight": (7, 12, 1, 1),
         "features.1.inner.1.0.weight": (6, 7, 3, 3),
         "features.1.inner.2.weight": (12, 6, 1, 1)},
    ),
    "resnext": (
        # A whole group whose outputs are not read.
        [("features.1.inner.2.weight", (slice(None), slice(3, 6)))],
        {"features.1.inner.0.0.weight": (9, 12, 1, 1),
         "features.1.inner.1.0.weight": (9, 3, 3, 3),
         "features.1.inner.2.weight": (12, 9, 1, 1)},
    ),
    "mobilenet": (
        [("features.1.inner.2.weight", (slice(None), [3, 4, 5]))],
        {"features.1.inner.0.0.weight": (21, 8, 1, 1),
         "features.1.inner.1.0.weight": (21, 1, 3, 3),
         "features.1.inner.2.weight": (8, 21, 1, 1)},
    ),
    "densenet": (
        # The first layer's second output, in all its consumers: after 8 channels of the stem.
        [("features.1.layers.1.0.weight", (slice(None), [9])),
         ("features.1.layers.2.0.weight", (slice(None), [9])),
         ("features.2.0.weight", (slice(None), [9]))],
        {"features.1.layers.0.0.weight": (5, 8, 3, 3),
         "features.1.layers.1.0.weight": (6, 13, 3, 3), "features.2.0.weight": (8, 25, 1, 1)},
    ),
    "squeeze-excite": (
        # A channel that is always zero is removed although its gate is not zero.
        [("features.0.0.weight", [4]), ("features.0.1.weight", [4]), ("features.0.1.bias", [4]),
         ("features.1.excite.weight", (slice(None), [1]))],
        {"features.0.0.weight": (11, 3, 3, 3), "features.1.squeeze.weight": (5, 11),
         "features.1.excite.weight": (11, 5), "features.2.0.weight": (8, 11, 3, 3)},
    ),
    "unet": (
        # The concatenation has 8 channels of the first layer, then 8 upsampled ones.
        [("last.0.0.weight", (slice(None), [9, 10])), ("up.weight", [3])],
        {"up.weight": (11, 6, 2, 2), "up.bias": (6,), "last.0.0.weight": (8, 14, 3, 3),
         "down.1.0.weight": (11, 8, 3, 3)},
    ),
    "generator": (
        [("up.weight", [2]), ("pixels.weight", (slice(None), [0]))],
        {"start.weight": (112, 6), "up.weight": (7, 5, 4, 4), "pixels.weight": (12, 5, 3, 3)},
    ),
    "group norm": (
        [("features.3.weight", (slice(None), slice(3, 6)))],
        {"features.0.weight": (9, 3, 3, 3), "features.1.weight": (9,),
         "features.3.weight": (8, 9, 3, 3)},
    ),
    "gated": (
        # A unit is dead if its gate is zero, its value is zero, or nothing reads it.
        [("both.weight", [0]), ("both.bias", [0]),
         ("both.weight", [12 + 5]), ("both.bias", [12 + 5]), ("down.weight", (slice(None), [7]))],
        {"both.weight": (18, 6), "both.bias": (18,), "down.weight": (4, 9)},
    ),
    "bag of words": (
        [("words.weight", (slice(None), [1, 2])), ("hidden.weight", (slice(None), [5]))],
        {"words.weight": (20, 9), "hidden.weight": (10, 9)},
    ),
    "1-d": (
        [("2.weight", (slice(None), [3])), ("4.weight", (slice(None), range(6)))],
        {"0.weight": (7, 2, 3), "2.weight": (5, 7, 3), "4.weight": (3, 30)},
    ),
    "gpt": (
        [("layers.0.mlp.project.weight", (slice(None), range(40))),
         ("layers.1.mlp.expand.weight", [3])],
        {"layers.0.mlp.expand.weight": (56, 24), "layers.1.mlp.project.weight": (24, 95)},
    ),
    "attention": (
        # Nothing reads head 1 of the first layer; the values of head 2 of the second are zero.
        [("1.out.weight", (slice(None), slice(6, 12))), ("2.qkv.weight", slice(60, 66)),
         ("2.qkv.bias", slice(60, 66))],
        {"1.qkv.weight": (54, 24), "1.qkv.bias": (54,), "1.out.weight": (24, 18),
         "2.qkv.weight": (54, 24), "2.out.weight": (24, 18)},
    ),
    "encoder": (
        [("layers.0.self_attn.out_proj.weight", (slice(None), slice(4, 8))),
         ("layers.0.linear2.weight", (slice(None), range(10)))],
        {"layers.0.self_attn.in_proj_weight": (36, 16), "layers.0.self_attn.in_proj_bias": (36,),
         "layers.0.self_attn.out_proj.weight": (16, 12), "layers.0.linear1.weight": (14, 16),
         "layers.1.self_attn.in_proj_weight": (48, 16)},
    ),
    "transformer": (
        [("decoder.layers.0.multihead_attn.out_proj.weight", (slice(None), slice(8, 16)))],
        {"decoder.layers.0.multihead_attn.in_proj_weight": (24, 16),
         "decoder.layers.0.multihead_attn.out_proj.weight": (16, 8)},
    ),
    "lstm": (
        [("before.2.weight", (slice(None), [0])), ("after.2.weight", (slice(None), [1, 2]))],
        {"before.0.weight": (11, 5), "after.0.weight": (7, 7), "lstm.weight_hh_l0": (28, 7)},
    ),
    "in place": (
        [("head.weight", (slice(None), [2])), ("two.weight", (slice(None), [2]))],
        {"one.weight": (7, 3, 1, 1), "two.weight": (7, 7, 1, 1), "head.weight": (4, 7, 1, 1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_dead_units_are_removed(name):
    model, example = build(name)
    planted, expected = PLANTED[name]
    for parameter, index in planted:
        zero(model, parameter, index)
    before = copy.deepcopy(model.state_dict())
    smaller = compact(model, example)
    shapes = {key: tuple(value.shape) for key, value in smaller.state_dict().items()}
    assert {key: shapes[key] for key in expected} == expected
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_size_attributes_are_updated():
    model, example = build("resnext")
    zero(model, "features.1.inner.2.weight", (slice(None), slice(3, 6)))
    smaller = compact(model, example)
    shown = repr(smaller.features[1])
    assert re.search(r"Conv2d\(9, 9, kernel_size=\(3, 3\).*groups=3", shown)
    assert "BatchNorm2d(9" in shown
    assert "Conv2d(9, 12, kernel_size=(1, 1)" in shown


def test_number_of_heads_is_updated():
    model, example = build("attention")
    zero(model, "1.out.weight", (slice(None), slice(6, 12)))
    smaller = compact(model, example)
    assert (smaller[1].n_head, smaller[2].n_head) == (3, 4)
