"""Tests of the kernel selection: choice, fallbacks, and agreement of all implementations."""

import os
import subprocess
import sys
import warnings
from functools import lru_cache

import pytest
import torch
from torch import nn

from pdecay import PSGD, Lp, PAdam, attach
from pdecay._core.reference import AdamUpdate, SGDUpdate, pwd
from pdecay._optim import engine
from pdecay._optim.kernels import compiled, native, selection
from pdecay._optim.kernels.selection import kernel_for

PATHS = [{"fused": True}, {"foreach": True}, {"foreach": False}]
ELASTIC = Lp(0.8, 0.02) + Lp(2, 0.1)


@pytest.fixture
def forget_warnings(monkeypatch):
    monkeypatch.setattr(selection, "_warned", set())


class TestChoice:
    def test_c_kernel_is_used_by_default_and_on_request(self):
        w = torch.ones(3, 3)
        assert kernel_for(w, None) is native
        assert kernel_for(w, True) is native
        assert kernel_for(w, False) is None

    def test_explicit_foreach_uses_no_fused_update(self, monkeypatch):
        monkeypatch.setattr(native, "adam_", None)  # would fail if it were called
        w = nn.Parameter(torch.ones(3, 3))
        w.grad = torch.ones(3, 3)
        PAdam([w], foreach=False).step()
        PAdam([w], foreach=True).step()
        PAdam([w], fused=False).step()
        with pytest.raises(TypeError, match="not callable"):
            PAdam([w]).step()

    @pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True, "fused": False}])
    def test_no_kernel_at_all_on_request(self, options, monkeypatch):
        monkeypatch.setattr(native, "c_library", None)  # would fail if it were called
        w = nn.Parameter(torch.ones(3, 3))
        w.grad = torch.ones(3, 3)
        PAdam([w], **options).step()
        with pytest.raises(TypeError, match="not callable"):
            PAdam([w], foreach=True).step()

    def test_fused_with_foreach_raises(self):
        with pytest.raises(ValueError, match="set at most one of them"):
            PAdam([nn.Parameter(torch.ones(2, 2))], fused=True, foreach=True)

    def test_fallback_is_silent_by_default_and_warns_once_on_request(self, forget_warnings):
        w = nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))
        w.grad = torch.ones_like(w)
        PAdam([w], lr=0.1, decay=Lp(1, 0.1)).step()
        optimizer = PAdam([w], lr=0.1, decay=Lp(1, 0.1), fused=True)
        with pytest.warns(RuntimeWarning, match="complex64") as caught:
            optimizer.step()
        assert len(caught) == 2  # the C kernel, then torch.compile
        assert {warning.filename for warning in caught} == {__file__}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()

    def test_mixed_group_uses_kernel_and_fallback(self):
        a = nn.Parameter(torch.ones(3, 3))
        b = nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))
        for w in (a, b):
            w.grad = torch.ones_like(w)
        PAdam([a, b], lr=0.1, decay=Lp(1, 0.1)).step()
        assert torch.allclose(a, b.real)

    def test_gradient_scalers_unscale_and_skip_themselves(self):
        assert not getattr(
            PAdam([nn.Parameter(torch.ones(2, 2))], fused=True), "_step_supports_amp_scaling", False
        )


class TestCuda:
    """The choice on CUDA, with CPU tensors for which the check of the device is faked.

    This tests which kernel is chosen, not that the kernel works on CUDA.
    """

    @pytest.fixture(autouse=True)
    def fake_cuda(self, monkeypatch, forget_warnings):
        monkeypatch.setattr(selection, "_is_on_cuda", lambda tensor: True)
        monkeypatch.setattr(native, "why_not", lambda tensor: "on device cuda")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(compiled, "available", lambda device: None)

    def test_compiled_kernel_is_used_by_default(self):
        assert kernel_for(torch.ones(3, 3), None) is compiled
        assert kernel_for(torch.ones(3, 3), False) is None

    def test_default_falls_back_with_one_warning(self, monkeypatch):
        monkeypatch.setattr(compiled, "available", lambda device: "no Triton")
        with pytest.warns(RuntimeWarning, match="no Triton"):
            assert kernel_for(torch.ones(3, 3), None) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert kernel_for(torch.ones(3, 3), None) is None

    def test_unsupported_dtype_is_silent_by_default(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert kernel_for(torch.ones(3, 3, dtype=torch.complex64), None) is None

    def test_nothing_is_compiled_while_a_graph_is_captured(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert kernel_for(torch.ones(3, 3), None) is None

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, None),
            ({"fused": True}, True),
            ({"foreach": True}, False),
            ({"foreach": False}, False),
            ({"capturable": True}, False),
            ({"capturable": True, "fused": True}, True),
        ],
    )
    def test_explicit_options_win(self, options, expected):
        with torch.device("meta"):  # a parameter that is not on the CPU
            weight = nn.Parameter(torch.ones(2, 2))
        defaults = {"fused": None, "foreach": None, "capturable": False}
        assert engine._fused({**defaults, **options}, [weight]) is expected


def test_compilation_is_logged_with_its_time(monkeypatch, caplog):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    compiled._compile.cache_clear()
    try:
        with caplog.at_level("INFO", logger="pdecay"):
            compiled._compile(compiled._decay, 2, 5, (), torch.float32, torch.device("cpu"))
    finally:
        compiled._compile.cache_clear()
    before, after = caplog.messages
    assert "compiling the fused step (decay, cpu, torch.float32)" in before
    assert after.endswith(" s")


def weights(dtype):
    generator = torch.Generator().manual_seed(0)
    w = torch.empty(20, 25, dtype=torch.float64)
    return w.normal_(std=0.05, generator=generator).to(dtype)


def gradients(dtype, steps=200):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(20, 25, generator=generator, dtype=torch.float64).to(dtype)


def run(make, dtype):
    w = nn.Parameter(weights(dtype))
    optimizer = make([w])
    for gradient in gradients(dtype):
        w.grad = gradient
        optimizer.step()
    return w.detach().double()


@lru_cache
def reference(kind, penalty, lr, dtype):
    """Run the reference in double precision from the same numbers."""
    update = AdamUpdate() if kind == "adam" else SGDUpdate(0.9)
    w = weights(dtype).double()
    for t, gradient in enumerate(gradients(dtype), start=1):
        w = pwd(w - lr * update(gradient.double(), t), w, penalty, lr)
    return w


def adam_with(lr, penalty, **path):
    return lambda params: PAdam(params, lr, decay=penalty, **path)


def sgd_with(lr, penalty, **path):
    return lambda params: PSGD(params, lr, momentum=0.9, decay=penalty, **path)


def attached(lr, penalty, **path):
    def make(params):
        optimizer = torch.optim.AdamW(params, lr, weight_decay=0)
        attach(optimizer, penalty, **path)
        return optimizer

    return make


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["f32", "f64"]
)
@pytest.mark.parametrize("penalty", [Lp(0.5, 0.02), Lp(0.8, 0.02), Lp(1, 0.2), ELASTIC], ids=str)
class TestAgreement:
    """200 steps of random gradients on weights of scale 0.05."""

    def check(self, got, expected, close):
        # Rounding decides whether a weight that passes close to zero stays there: a few may differ.
        assert ((got - expected).abs() >= close).double().mean() < 0.005
        assert ((got.abs() < 1e-13) != (expected.abs() < 1e-13)).double().mean() < 0.005

    @pytest.mark.parametrize(
        "path", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str
    )
    def test_padam(self, penalty, path, dtype, close):
        expected = reference("adam", penalty, 1e-3, dtype)
        self.check(run(adam_with(1e-3, penalty, **path), dtype), expected, close)

    @pytest.mark.parametrize(
        "path", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str
    )
    def test_psgd(self, penalty, path, dtype, close):
        expected = reference("sgd", penalty, 1e-4, dtype)
        self.check(run(sgd_with(1e-4, penalty, **path), dtype), expected, close)

    @pytest.mark.parametrize("fused", [None, False])
    def test_attach(self, penalty, fused, dtype, close):
        expected = reference("adam", penalty, 1e-3, dtype)
        self.check(run(attached(1e-3, penalty, fused=fused), dtype), expected, close)


NO_COMPILER = """
import warnings, torch, pdecay
from pdecay import Lp, PAdam
torch.manual_seed(0)
start = torch.randn(30, 30)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    results = []
    for path in ({}, {"foreach": False}):
        w = torch.nn.Parameter(start.clone())
        optimizer = PAdam([w], 1e-2, decay=Lp(0.8, 0.1), **path)
        for _ in range(5):
            w.grad = torch.ones_like(w)
            optimizer.step()
        results.append(w.detach())
print(torch.equal(*results), len(caught))
print(caught[0].message)
"""


@pytest.mark.slow
def test_without_compiler_falls_back_with_one_warning(tmp_path):
    environment = {**os.environ, "PATH": "", "PDECAY_CACHE": str(tmp_path), "CC": ""}
    done = subprocess.run(
        [sys.executable, "-c", NO_COMPILER],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first == "True 1"
    assert "the fused C kernel cannot be built" in second
    assert "falling back to a slower path" in second
