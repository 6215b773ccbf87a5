"""Sparse layers as modules: equal to torch's layers, except that they have no gradients."""

from __future__ import annotations

import copy
import io
import json
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from pdecay.deployment.layers import base
from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.deployment.layers.modules import SparseConv2d, SparseLinear, why_not

from .dense import dense_conv, dense_linear, needs_kernel


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": "same"},
        {"padding": "same", "kernel_size": (4, 2), "dilation": 2},
        {"padding": "valid"},
        {"padding": 2, "stride": (2, 1), "dilation": (1, 2)},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": "same", "padding_mode": "reflect", "kernel_size": 5},
        {"padding": 1, "padding_mode": "replicate", "bias": False},
        {"groups": 2, "bias": False},
        {"groups": 4, "padding": 1},
    ],
    ids=str,
)
def test_convolution_options(options):
    dense = dense_conv(4, 8, **{"kernel_size": 3, **options})
    sparse = SparseConv2d(dense)
    for size in ((3, 4, 12, 9), (4, 16, 16), (1, 4, 32, 32), (0, 4, 12, 9)):
        x = torch.randn(size)
        torch.testing.assert_close(sparse(x), dense(x), rtol=1e-5, atol=1e-5)
    back = sparse.to_dense()
    assert str(back) == str(dense)
    assert torch.equal(back.weight, dense.weight)
    torch.testing.assert_close(back(x), dense(x))


@pytest.mark.parametrize("name", ["kernel_size", "stride", "padding", "dilation", "groups"])
def test_options_may_be_integers_of_numpy(name):
    dense = dense_conv(4, 8, **{"kernel_size": 3, name: np.int64(2)})
    sparse = SparseConv2d(dense)
    x = torch.randn(2, 4, 12, 9)
    torch.testing.assert_close(sparse(x), dense(x), rtol=1e-5, atol=1e-5)
    json.dumps(sparse._options())  # as in a saved program


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_layer_input_shapes(bias, dtype):
    dense = dense_linear(30, 20, bias=bias, dtype=dtype)
    sparse = SparseLinear(dense)
    for size in ((30,), (1, 30), (5, 30), (2, 3, 30), (4, 100, 30), (0, 30), (2, 0, 30)):
        x = torch.randn(size, dtype=dtype)
        torch.testing.assert_close(sparse(x), dense(x), rtol=1e-5, atol=1e-5)
    back = sparse.to_dense()
    assert str(back) == str(dense)
    assert torch.equal(back.weight, dense.weight)
    assert (back.bias is None) == (dense.bias is None)


def test_input_memory_formats():
    dense = dense_conv(4, 8, 3, padding=1)
    sparse = SparseConv2d(dense)
    x = torch.randn(2, 4, 10, 20)
    formats = [x.to(memory_format=torch.channels_last), x.transpose(2, 3).clone().transpose(2, 3)]
    formats += [x[:, :, ::2, 1:], x[:1].expand(3, -1, -1, -1)]
    for given in formats:
        got = sparse(given)
        torch.testing.assert_close(got, dense(given), rtol=1e-5, atol=1e-5)
        assert got.is_contiguous()
    linear = dense_linear(20, 6)
    torch.testing.assert_close(SparseLinear(linear)(x.mT.mT[..., :, :]), linear(x))


def test_relu():
    for dense, x in (
        (dense_conv(4, 8, 3), torch.randn(2, 4, 9, 9)),
        (dense_linear(16, 8), torch.randn(40, 16)),
    ):
        kind = SparseConv2d if isinstance(dense, nn.Conv2d) else SparseLinear
        torch.testing.assert_close(kind(dense, relu=True)(x), dense(x).relu())


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(
    ("dense", "size"),
    [
        ((4, 8, 3), (2, 4, 9, 9)),
        ((4, 8, 3, 2), (5, 4, 9, 9)),  # images side by side
        ((64, 16, 3), (1, 64, 34, 34)),  # blocks of channels
        ((16, 8, 1), (2, 16, 8, 8)),  # in place
        ((16, 8), (2, 16)),  # dot products
        ((300, 200), (40, 300)),
    ],
    ids=str,
)
def test_sum_with_tensor_of_output_shape(dense, size, relu):
    linear = len(dense) == 2
    dense = dense_linear(*dense) if linear else dense_conv(*dense)
    sparse = (SparseLinear if linear else SparseConv2d)(dense, relu=relu)
    x = torch.randn(size)
    wanted = dense(x)
    for more in (torch.randn_like(wanted), torch.randn_like(wanted[:1]).expand_as(wanted)):
        both = (wanted + more).relu() if relu else wanted + more
        torch.testing.assert_close(sparse(x, more), both, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sparse(x), wanted.relu() if relu else wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        3,
        torch.tensor(-0.5),
        torch.randn(8),
        torch.randn(3, 1),
        torch.randn(4, 3, 8),  # broadcasts the output
        torch.randn(3, 8, dtype=torch.float64),
        torch.arange(8),
    ],
    ids=lambda more: str(getattr(more, "shape", more)),
)
def test_sum_broadcasts_like_torch(more, relu):
    dense = dense_linear(16, 8)
    sparse, x = SparseLinear(dense, relu=relu), torch.randn(3, 16)
    wanted = (dense(x) + more).relu() if relu else dense(x) + more
    torch.testing.assert_close(sparse(x, more), wanted, rtol=1e-5, atol=1e-5)
    one = sparse(x[:1])  # the plan is unchanged
    torch.testing.assert_close(one, dense(x[:1]).relu() if relu else dense(x[:1]))


def test_summand_may_require_gradient():
    with torch.inference_mode(False):
        sparse, x = SparseLinear(dense_linear(16, 8)), torch.randn(3, 16)
        more = torch.randn(3, 8, requires_grad=True)
        sparse(x, more).sum().backward()
        assert torch.equal(more.grad, torch.ones(3, 8))


def test_layer_without_nonzeros():
    dense = dense_linear(8, 4)
    dense.weight.data.zero_()
    sparse = SparseLinear(dense)
    assert sparse.sparsity == 1.0
    assert torch.equal(sparse(torch.randn(3, 8)), dense.bias.expand(3, 4))


@pytest.mark.parametrize("method", ["copy", "pickle", "save"])
def test_copy_and_pickle_after_use(method):
    dense = dense_conv(4, 8, 3, padding=1)
    sparse, x = SparseConv2d(dense), torch.randn(2, 4, 9, 9)
    wanted = sparse(x)
    if method == "copy":
        other = copy.deepcopy(sparse)
    elif method == "pickle":
        other = pickle.loads(pickle.dumps(sparse))
    else:
        file = io.BytesIO()
        torch.save(sparse, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert torch.equal(other(x), wanted)
    assert other.values.data_ptr() != sparse.values.data_ptr()


def test_load_state_dict_and_conversion_take_effect():
    with torch.inference_mode(False):
        one, x = SparseLinear(dense_linear(8, 4)), torch.randn(3, 8)
        before = one(x)
        state = {name: value.clone() for name, value in one.state_dict().items()}
        assert set(state) == {"values", "columns", "row", "bias"}
        state["values"] *= 2
        state["bias"] *= 2
        one.load_state_dict(state)
        torch.testing.assert_close(one(x), 2 * before)
        torch.testing.assert_close(one.double()(x.double()).float(), 2 * before)
        with pytest.raises(ValueError, match=r"takes torch\.float64 on cpu, got torch\.float32"):
            one(x)


def test_inconsistent_buffers_are_rejected():
    with torch.inference_mode(False):
        one, x = SparseLinear(dense_linear(8, 4)), torch.randn(3, 8)
        before = one(x)
        state = {name: value.clone() for name, value in one.state_dict().items()}
        for name in ("columns", "row"):
            one.load_state_dict({**state, name: state[name] + 100})
            with pytest.raises(ValueError, match="not the non-zeros of a 4 x 8 weight: load its"):
                one(x)
        odd = {name: torch.stack([value] * 2, -1)[:, 0] for name, value in state.items()}
        odd["columns"] = odd["columns"].long()
        odd["bias"] = odd["bias"].double()
        one.load_state_dict(odd, assign=True)
        assert torch.equal(one(x), before)


@pytest.mark.parametrize("rows", [1, 40])
def test_buffers_changed_in_place_take_effect(rows):
    """Plans hold sorted copies of large weights, and of small ones the memory itself."""
    with torch.inference_mode(False), torch.no_grad():
        dense, x = dense_linear(512, 256), torch.randn(rows, 512)
        sparse = SparseLinear(dense)
        sparse(x)
        dense.weight.mul_(2)
        dense.bias.add_(1)
        sparse.state_dict()["values"].mul_(2)
        sparse.bias.add_(1)
        torch.testing.assert_close(sparse(x), dense(x), rtol=1e-4, atol=1e-4)
        sparse.columns.add_(10**8)
        with pytest.raises(ValueError, match="not the non-zeros of a 256 x 512 weight"):
            sparse(x)


@pytest.mark.parametrize("rows", [1, 40])
def test_buffers_moved_to_shared_memory(rows):
    """torch.multiprocessing moves each tensor that it sends, and frees the old memory."""
    with torch.inference_mode(False), torch.no_grad():
        dense, x = dense_linear(64, 64), torch.randn(rows, 64)
        sparse = SparseLinear(dense)
        sparse(x)
        sizes = [buffer.nbytes // 4 for buffer in sparse.buffers()]
        for buffer in sparse.buffers():
            buffer.share_memory_()
        reuse = [torch.full((size,), -1, dtype=torch.int32) for size in 5 * sizes]
        torch.testing.assert_close(sparse(x), dense(x))
        assert len(reuse) == 20


@pytest.mark.parametrize("rows", [1, 40])
def test_values_with_other_memory_take_effect(rows):
    with torch.inference_mode(False), torch.no_grad():
        dense, x = dense_linear(64, 64, bias=False), torch.randn(rows, 64)
        sparse = SparseLinear(dense)
        sparse(x)
        sparse.values.data = 2 * sparse.values
        torch.testing.assert_close(sparse(x), 2 * dense(x))


def test_layer_made_in_inference_mode():
    with torch.inference_mode():
        dense, x = dense_linear(8, 4), torch.randn(3, 8)
        sparse = SparseLinear(dense)
        torch.testing.assert_close(sparse(x), dense(x))


def test_input_without_memory_is_rejected():
    sparse = SparseLinear(dense_linear(8, 4))
    with torch.inference_mode(False), torch.no_grad():
        x = torch.randn(3, 8)
        x.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="the memory of the input was freed"):
            sparse(x)


def test_unsupported_dtype_computes_densely():
    with torch.inference_mode(False), torch.no_grad():
        dense, x = dense_linear(8, 4), torch.randn(3, 8).bfloat16()
        sparse = SparseLinear(dense).bfloat16()
        with pytest.warns(UserWarning, match="computes densely: of dtype bfloat16"):
            got = sparse(x)
        torch.testing.assert_close(got, dense.bfloat16()(x))


def test_repr():
    dense = dense_linear(100, 10)
    sparse = SparseLinear(dense)
    count = int((dense.weight != 0).sum())
    assert repr(sparse) == (
        f"SparseLinear(100, 10, bias=True, nonzeros={count} ({1 - count / 1000:.1%} sparse))"
    )
    shown = repr(SparseConv2d(dense_conv(4, 8, 3), relu=True))
    assert "kernel_size=(3, 3), stride=(1, 1), padding=(0, 0)" in shown
    assert "relu=True" in shown


def test_nbytes_includes_plans():
    sparse = SparseLinear(dense_linear(64, 32))
    stored = sum(tensor.nbytes for tensor in sparse.state_dict().values())
    assert sparse.nbytes == stored
    sparse(torch.randn(1, 64))
    for_a_row = sparse.nbytes
    assert for_a_row >= stored  # tiles take memory, dot products none
    sparse(torch.randn(64, 64))
    assert sparse.nbytes > for_a_row


def test_caches_are_bounded():
    sparse = SparseConv2d(dense_conv(1, 2, 3))
    dense = sparse.to_dense()
    for size in range(3, 3 + 3 * base._MAX_PLANS):
        x = torch.randn(1, 1, size, 5)
        torch.testing.assert_close(sparse(x), dense(x), rtol=1e-5, atol=1e-5)
        assert len(sparse._plans) <= base._MAX_PLANS
    linear = SparseLinear(dense_linear(4, 4))
    for rows in range(200):
        linear(torch.randn(rows, 4))
    assert len(linear._plans) <= 9
    assert len(linear._calls) <= base._MAX_SHAPES


@pytest.mark.parametrize(
    ("layer", "size", "message"),
    [
        ("linear", (3, 7), r"expected an input of 8 features, got \(3, 7\)"),
        ("linear", (), r"expected an input of 8 features, got \(\)"),
        ("conv", (3, 7), r"expected images of 4 channels, got \(3, 7\)"),
        ("conv", (1, 3, 9, 9), r"expected images of 4 channels, got \(1, 3, 9, 9\)"),
        ("conv", (1, 4, 2, 9), "the kernel covers 3 x 3 pixels, more than the padded input"),
    ],
)
def test_wrong_input_shape_is_rejected(layer, size, message):
    sparse = SparseLinear(dense_linear(8, 4)) if layer == "linear" else None
    sparse = sparse or SparseConv2d(dense_conv(4, 8, 3))
    with pytest.raises(ValueError, match=message):
        sparse(torch.randn(size))


def test_other_dtypes_are_rejected():
    dense = dense_linear(8, 4, dtype=torch.bfloat16)
    assert why_not(dense) == "of dtype bfloat16"
    with pytest.raises(ValueError, match="holds float32 or float64 weights on the CPU, got torch"):
        SparseLinear(dense)


def test_dense_fallback_without_compiler_warns_once(monkeypatch):
    monkeypatch.setattr(layers_kernel, "available", lambda: "no C compiler found")
    for dense, x in (
        (dense_linear(8, 4), torch.randn(3, 8)),
        (dense_conv(4, 8, (3, 5), padding="same"), torch.randn(2, 4, 9, 9)),
    ):
        kind = SparseConv2d if isinstance(dense, nn.Conv2d) else SparseLinear
        sparse = kind(dense, relu=True)
        with pytest.warns(UserWarning, match="computes densely: no C compiler found"):
            torch.testing.assert_close(sparse(x), dense(x).relu())
        sparse(x)
        assert why_not(dense) == "no C compiler found"


def test_autocast_accepts_half_precision_input():
    dense = dense_linear(8, 4)
    sparse, x = SparseLinear(dense), torch.randn(3, 8)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(sparse(x.bfloat16()), dense(x).float(), rtol=0.1, atol=0.1)
        with pytest.raises(ValueError, match=r"got torch.bfloat16 on cpu: convert the input"):
            sparse(x.bfloat16())


@pytest.mark.parametrize("kind", [SparseLinear, SparseConv2d])
def test_default_device_is_ignored(kind):
    linear = kind is SparseLinear
    dense = dense_linear(64, 48) if linear else dense_conv(4, 8, 3, padding=1)
    sparse = kind(dense)
    for size in [(1, 64), (20, 64)] if linear else [(2, 4, 9, 9), (1, 4, 32, 32)]:
        x = torch.randn(size)
        with torch.device("meta"):
            got = sparse(x)
        torch.testing.assert_close(got, dense(x), rtol=1e-5, atol=1e-5)
    with torch.device("meta"):
        assert torch.equal(sparse.to_dense().weight, dense.weight)


def test_concurrent_calls_beyond_cache_size():
    from concurrent.futures import ThreadPoolExecutor

    dense = dense_conv(1, 2, 3)
    sparse = SparseConv2d(dense)
    inputs = [torch.randn(1, 1, 3 + k % (2 * base._MAX_PLANS), 5) for k in range(400)]
    with torch.inference_mode(False), torch.no_grad():
        wanted = [dense(x) for x in inputs]
        with ThreadPoolExecutor(4) as pool:
            for got, one in zip(pool.map(sparse, inputs), wanted, strict=True):
                torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-5)


@needs_kernel
@pytest.mark.parametrize("shape", [(9,), (8, 2), ()])
def test_bias_of_another_shape_is_rejected(shape):
    sparse = SparseLinear(dense_linear(16, 8))
    sparse.bias = torch.zeros(shape)
    sparse._reset()
    with pytest.raises(ValueError, match="are not the non-zeros"):
        sparse(torch.randn(5, 16))


@pytest.mark.parametrize("layer", [nn.ConvTranspose2d(2, 2, 1), nn.Linear(2, 2), nn.ReLU(), 3])
def test_other_layers_than_conv2d_are_refused(layer):
    with pytest.raises(TypeError, match=f"needs an nn.Conv2d, got {type(layer).__name__}"):
        SparseConv2d(layer)


@pytest.mark.parametrize("layer", [nn.Conv2d(2, 2, 1), nn.Bilinear(2, 2, 2), 3])
def test_other_layers_than_linear_are_refused(layer):
    with pytest.raises(TypeError, match=f"needs an nn.Linear, got {type(layer).__name__}"):
        SparseLinear(layer)


def test_relu_that_is_no_flag_is_refused():
    with pytest.raises(TypeError, match="relu must be True or False, got 'yes'"):
        SparseLinear(nn.Linear(4, 3), relu="yes")
