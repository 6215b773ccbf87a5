"""Operators of programs: what models need is allowed, and wrong arguments are rejected."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pdecay
from pdecay.deployment.program.graph import find_operator


class Bags(nn.EmbeddingBag):
    def forward(self, x):
        return super().forward(x, torch.tensor([0, 2, 2]))


class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


class LSTM(nn.LSTM):
    """An LSTM that returns its outputs only."""

    def forward(self, x):
        return super().forward(x)[0]


class Masked(nn.Module):
    """Python's operators on masks, with another tensor, with a number, and in place."""

    def forward(self, x):
        a, b = x > 0, x < 1
        both = (a & b) | (a ^ b)
        both &= a
        both |= b
        both ^= a
        return x.masked_fill(both, 0.0), ((x * 8).long() & 5) | 2, (x * 8).long() ^ 3


def test_bitwise_operators_of_python(tmp_path):
    x = torch.randn(5, 7)
    path = tmp_path / "m.safetensors"
    pdecay.save(Masked(), path, example_inputs=x)
    torch.testing.assert_close(pdecay.load(path, trusted=True)(2 * x[:3]), Masked()(2 * x[:3]))


def _operators_with_checks():
    yield "weight norm", nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), torch.randn(2, 4)
    by_columns = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3), dim=1)
    yield "weight norm of columns", by_columns, torch.randn(2, 4)
    yield "bags", Bags(5, 4), torch.tensor([0, 4, 1])
    yield "attention", Attention(), torch.randn(2, 3, 6, 8)
    yield "encoder", nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)
    yield "LSTM", LSTM(4, 3, 2, bidirectional=True, batch_first=True), torch.randn(2, 5, 4)
    yield "LSTM without biases", LSTM(4, 3, bias=False), torch.randn(5, 2, 4)
    yield "LSTM with projections", LSTM(4, 6, 2, proj_size=3), torch.randn(5, 2, 4)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("case", list(_operators_with_checks()), ids=lambda case: case[0])
def test_operators_with_checked_arguments(tmp_path, case):
    _, model, x = case
    model = model.eval()
    path = tmp_path / "m.safetensors"
    pdecay.save(model, path, example_inputs=x)
    with torch.no_grad():
        torch.testing.assert_close(pdecay.load(path, trusted=True)(x), model(x))


def _call(operator, *args, **kwargs):
    return lambda: find_operator(f"aten.{operator}")(*args, **kwargs)


def _wrong_arguments():
    """Yield calls that crash the process or corrupt its memory if nothing checks them."""
    ones = torch.ones
    yield _call("_weight_norm.default", ones(1000, 3), ones(7, 1), 0)
    yield _call("_weight_norm.default", ones(0, 0), ones(0, 0), 0)
    yield _call("embedding_bag.default", ones(5, 8), ones(3).long(), torch.tensor([0, -(10**6), 3]))
    offsets = torch.tensor([0, 3, 1])
    yield _call("embedding_bag.padding_idx", ones(5, 8), ones(3).long(), offsets, padding_idx=2)
    offsets = ones(0).long()
    yield _call("embedding_bag.padding_idx", ones(5, 8), ones(3).long(), offsets, padding_idx=0)
    sdpa = "scaled_dot_product_attention.default"
    yield _call(sdpa, ones(1, 2, 300, 8), ones(1, 2, 500, 8), ones(1, 2, 2, 8))
    repeats = torch.full((4,), 2**62)  # the sum overflows to 0
    yield _call("repeat_interleave.Tensor", repeats)
    yield _call("repeat_interleave.Tensor", repeats, output_size=0)
    yield _call("repeat_interleave.self_Tensor", ones(4), repeats, 0)
    one = [1, 1]
    yield _call("col2im.default", ones(2, 12, 16), [5, 5], [2, 2], one, [0, 2**32], one)
    yield _call("im2col.default", ones(2, 3, 5, 5), [2, 2], one, [2**61, 0], one)
    state, flags = [ones(1, 2, 4), ones(1, 2, 4)], (True, 1, 0.0, False, False, False)
    weights = [ones(16, 8), ones(16, 4), ones(16), ones(16)]
    x = ones(3, 2, 8)
    yield _call("lstm.input", x, [ones(1, 2, 4000), ones(1, 2, 4000)], weights, *flags)
    yield _call("lstm.input", x, [ones(1, 20, 4), ones(1, 20, 4)], weights, *flags)
    yield _call("lstm.input", x, state, [*weights[:2], ones(0), ones(0)], *flags)
    yield _call("lstm.input", ones(3, 2, 8000), state, weights, *flags)
    yield _call("lstm.input", x, state, weights[:3], *flags)


@pytest.mark.parametrize("call", list(_wrong_arguments()))
def test_wrong_arguments_of_operators_are_rejected(call):
    with pytest.raises(ValueError, match="the program is damaged: the sizes of its"):
        call()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["div", "div_", "divide", "divide_"])
def test_division_that_traps_is_rejected(name, dtype):
    x = torch.tensor([7, torch.iinfo(dtype).min], dtype=dtype)
    for kind, y in (("Tensor", torch.tensor([-1, -1], dtype=dtype)), ("Scalar", -1)):
        run = find_operator(f"aten.{name}.{kind}_mode")
        with pytest.raises(ValueError, match="the program is damaged: a quotient is too large"):
            run(x.clone(), y, rounding_mode="trunc")
        assert run(x.clone() + 1, y, rounding_mode="trunc").tolist() == (-x - 1).tolist()


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "clone", "add", "where", "sigmoid"])
def test_elementwise_operators_are_allowed(name):
    packet = getattr(torch.ops.aten, name)
    overload = packet.overloads()[0]
    assert find_operator(f"aten.{name}.{overload}") is getattr(packet, overload)


@pytest.mark.parametrize("name", ["relu_.default", "index_put_.default", "add_.Tensor"])
def test_in_place_operators_are_allowed(name):
    assert str(find_operator(f"aten.{name}")) == f"aten.{name}"


def test_group_norm_of_sizes_is_rejected():
    """The product of its sizes may overflow; torch.export records ``group_norm`` instead."""
    with pytest.raises(ValueError, match="must not call"):
        find_operator("aten.native_group_norm.default")


def test_in_place_strides_are_rejected():
    """Torch sets them before it raises an error, so that the input would point elsewhere."""
    with pytest.raises(ValueError, match="must not call"):
        find_operator("aten.as_strided_.default")


@pytest.mark.parametrize("batch", [(), (3,)])
def test_fold_and_unfold(tmp_path, batch):
    options = {"dilation": (2, 1), "padding": (1, 0), "stride": (1, 2)}
    model = nn.Sequential(nn.Unfold((2, 3), **options), nn.Fold((5, 7), (2, 3), **options))
    x = torch.randn(*batch, 2, 5, 7)
    pdecay.save(model, tmp_path / "m.safetensors", example_inputs=x)
    torch.testing.assert_close(pdecay.load(tmp_path / "m.safetensors", trusted=True)(x), model(x))


@pytest.mark.parametrize("name", ["to.prim_dtype", "to.prim_Device", "index.list_int"])
def test_operators_of_torchscript_are_rejected(name):
    """They take any integer as a dtype, with which torch reads foreign memory."""
    with pytest.raises(ValueError, match="must not call"):
        find_operator(f"aten.{name}")


@pytest.mark.parametrize("options", [{"size": (9, 5)}, {"scale_factor": (1.7, 0.6)}])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "antialias"])
def test_upsampling(tmp_path, mode, options):
    class Upsampling(nn.Module):
        def forward(self, x):
            antialias = mode == "antialias"
            how = "bilinear" if antialias else mode
            return nn.functional.interpolate(x, **options, mode=how, antialias=antialias)

    x = torch.randn(2, 3, 7, 7)
    pdecay.save(Upsampling(), tmp_path / "m.safetensors", example_inputs=x)
    loaded = pdecay.load(tmp_path / "m.safetensors", trusted=True)
    torch.testing.assert_close(loaded(x), Upsampling()(x))


@pytest.mark.parametrize(
    "name", ["upsample_nearest2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa"]
)
def test_upsampling_with_size_and_scales_is_rejected(name):
    """Torch reads foreign memory if the scales do not fit the output's size."""
    with pytest.raises(ValueError, match="must not call"):
        find_operator(f"aten.{name}.default")
