"""Sparse layers under autograd, transforms of functions and exports."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.deployment.layers.modules import SparseConv2d, SparseLinear

from .dense import dense_conv, dense_linear, needs_kernel


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def test_gradient_is_rejected_unless_no_grad():
    with torch.inference_mode(False):
        sparse = SparseLinear(dense_linear(8, 4))
        x = torch.randn(3, 8, requires_grad=True)
        with pytest.raises(RuntimeError, match="computes no gradients, but its input requires one"):
            sparse(x)
        with torch.no_grad():
            assert not sparse(x).requires_grad
            sparse(x)
        assert not sparse(x.detach()).requires_grad


@needs_kernel
@pytest.mark.parametrize(
    "transform", ["functionalize", "vmap", "make_fx", "pre_dispatch", "fx", "fake"]
)
def test_transforms_use_dense_layer(transform):
    """Traced tensors may have no memory, and the kernel's work would not be recorded."""
    with torch.inference_mode(False), torch.no_grad():
        dense = dense_linear(8, 4)
        sparse, x = SparseLinear(dense), torch.randn(3, 8)
        sparse(x)  # the shape is cached
        if transform == "functionalize":
            got = torch.func.functionalize(sparse)(x)
        elif transform == "vmap":
            got = torch.func.vmap(sparse)(x)
        elif transform == "make_fx":
            got = make_fx(sparse)(torch.randn(3, 8))(x)
        elif transform == "fx":
            got = torch.fx.symbolic_trace(nn.Sequential(sparse))(x)
        elif transform == "pre_dispatch":
            got = make_fx(sparse, pre_dispatch=True)(torch.randn(3, 8))(x)
        else:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = mode.from_tensor(x)
            assert sparse(fake).shape == (3, 4)
            return
        torch.testing.assert_close(got, dense(x))


@needs_kernel
def test_forward_differentiation_uses_dense_layer():
    with torch.inference_mode(False), torch.no_grad():
        dense = dense_linear(8, 4)
        sparse, x = SparseLinear(dense), torch.randn(3, 8)
        sparse(x)  # the shape is cached
        with forward_ad.dual_level():
            got = sparse(forward_ad.make_dual(x, torch.ones_like(x)))
            tangent = forward_ad.unpack_dual(got).tangent
        torch.testing.assert_close(tangent, dense.weight.sum(1).expand(3, 4))


@needs_kernel
def test_torch_export_uses_dense_layer():
    with torch.inference_mode(False), torch.no_grad():
        dense = dense_conv(4, 8, 3, padding=1)
        sparse, x = SparseConv2d(dense), torch.randn(2, 4, 9, 9)
        exported = torch.export.export(sparse, (x,)).module()
        other = torch.randn(2, 4, 9, 9)
        torch.testing.assert_close(exported(other), dense(other))


@pytest.mark.slow
@needs_kernel
@pytest.mark.filterwarnings("ignore")  # warnings of the exporter
def test_onnx_export_uses_dense_layer(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with torch.inference_mode(False), torch.no_grad():
        dense, x = dense_linear(8, 4), torch.randn(3, 8)
        path = tmp_path / "layer.onnx"
        torch.onnx.export(SparseLinear(dense, relu=True), (x,), dynamo=True, verbose=False).save(
            path
        )
        session = runtime.InferenceSession(path)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), dense(x).relu())


@needs_kernel
@pytest.mark.parametrize("layer", [dense_linear(8, 6), dense_conv(2, 3, 3)], ids=["linear", "conv"])
def test_lazy_negation_of_inputs_is_applied(layer):
    shape = (5, 8) if isinstance(layer, nn.Linear) else (2, 2, 8, 8)
    sparse = (SparseLinear if isinstance(layer, nn.Linear) else SparseConv2d)(layer)
    x = torch._neg_view(torch.randn(shape))
    assert x.is_neg()
    assert x.is_contiguous()
    expected = layer(x)
    torch.testing.assert_close(sparse(x), expected)
    more = torch._neg_view(torch.randn(expected.shape))
    torch.testing.assert_close(sparse(x, more), expected + more)
    zero = torch._efficientzerotensor(shape)
    torch.testing.assert_close(sparse(zero), layer(torch.zeros(shape)))


@needs_kernel
def test_lazy_negation_of_bias_is_applied():
    layer = dense_linear(8, 6)
    with torch.inference_mode(False), torch.no_grad():
        layer.bias = nn.Parameter(torch._neg_view(torch.randn(6)))
    x = torch.randn(5, 8)
    torch.testing.assert_close(SparseLinear(layer)(x), layer(x))


@pytest.mark.parametrize("has_kernel", [True, False])
def test_functional_call_uses_the_given_buffers(monkeypatch, has_kernel):
    if not has_kernel:
        monkeypatch.setattr(layers_kernel, "available", lambda: "no compiler")
    layer = dense_linear(8, 6)
    sparse = nn.Sequential(SparseLinear(layer))
    x = torch.randn(5, 8)
    with contextlib.nullcontext() if has_kernel else pytest.warns(UserWarning, match="densely"):
        before = sparse(x)
    given = {"0.values": 2 * sparse[0].values, "0.bias": torch.ones(6)}
    expected = nn.functional.linear(x, 2 * layer.weight, torch.ones(6))
    torch.testing.assert_close(torch.func.functional_call(sparse, given, x), expected)
    torch.testing.assert_close(sparse(x), before)
    with torch.inference_mode(False):
        values = sparse[0].values.clone().requires_grad_()
        torch.func.functional_call(sparse, {"0.values": values}, x.clone()).sum().backward()
        assert values.grad is not None
