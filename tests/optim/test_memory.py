"""Tests of tensors that the C kernel cannot read: they are left to torch, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pdecay import PSGD, Lp, PAdam

DECAY = Lp(0.8, 0.3)


def padam(params, decay=DECAY, **options):
    return PAdam(params, decay=decay, **options)


def psgd(params, decay=DECAY, **options):
    return PSGD(params, **{"momentum": 0.9, "decay": decay, **options})


def one_weight(build, gradient, **options):
    """Return a weight and its optimizer, after one step with this gradient."""
    weight = nn.Parameter(torch.linspace(-1, 2, gradient.numel()).reshape(gradient.shape))
    optimizer = build([weight], lr=0.1, **options)
    weight.grad = gradient
    optimizer.step()
    return weight, optimizer


class TestMemory:
    """The C kernel reads addresses: tensors that it cannot read are left to torch's operations."""

    @pytest.mark.parametrize("build", [padam, psgd])
    @pytest.mark.parametrize("fused", [None, True])
    def test_state_on_another_device_is_refused(self, build, fused):
        if fused:
            pytest.importorskip("torch._inductor")
        weight, optimizer = one_weight(build, torch.ones(2, 2))
        state = optimizer.state[weight]
        for key in ("exp_avg", "momentum_buffer"):
            if key in state:
                state[key] = state[key].to("meta")
        with pytest.raises((RuntimeError, NotImplementedError), match=r"meta|device"):
            optimizer.step()

    @pytest.mark.parametrize("build", [padam, psgd])
    def test_gradient_with_negative_bit(self, build):
        z = torch.view_as_complex(torch.randn(1, 3, 2))
        negative = z.conj().imag
        assert negative.is_neg()
        lazy, _ = one_weight(build, negative)
        plain, _ = one_weight(build, negative.resolve_neg())
        torch.testing.assert_close(lazy, plain, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("build", [padam, psgd])
    def test_gradient_of_one_element_with_negative_bit(self, build):
        negative = torch.tensor([[1 + 2j]]).conj().imag
        lazy, _ = one_weight(build, negative)
        plain, _ = one_weight(build, negative.resolve_neg())
        torch.testing.assert_close(lazy, plain, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("build", [padam, psgd])
    def test_weight_with_negative_bit(self, build):
        def step(resolve):
            values = torch.tensor([[1 + 2j, 3 - 4j]]).conj().imag
            weight = nn.Parameter(values.resolve_neg() if resolve else values)
            optimizer = build([weight], lr=0.1)
            weight.grad = torch.ones(1, 2)
            optimizer.step()
            return weight.detach().resolve_neg()

        torch.testing.assert_close(step(False), step(True), rtol=1e-5, atol=0)

    @pytest.mark.parametrize("build", [padam, psgd])
    def test_gradient_of_lazy_zeros(self, build):
        lazy, _ = one_weight(build, torch._efficientzerotensor((2, 2)))
        plain, _ = one_weight(build, torch.zeros(2, 2))
        torch.testing.assert_close(lazy, plain, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("build", [padam, psgd])
    def test_fake_gradient_raises_torchs_error(self, build):
        from torch._subclasses.fake_tensor import FakeTensorMode

        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = build([weight])
        with FakeTensorMode():
            fake = torch.ones(2, 2)
        weight.grad = fake
        with pytest.raises(Exception, match=r"[Ff]ake"):
            optimizer.step()

    @pytest.mark.usefixtures("needs_native")  # torch's own operations crash
    @pytest.mark.parametrize("build", [padam, psgd])
    def test_freed_memory_raises(self, build):
        weight, optimizer = one_weight(build, torch.ones(2, 2))
        weight.grad.untyped_storage().resize_(0)
        with pytest.raises((RuntimeError, ValueError), match=r"no memory|storage"):
            optimizer.step()

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64])
    def test_step_counts_of_other_dtypes(self, dtype):
        expected, plain = one_weight(padam, torch.ones(2, 2))
        weight, optimizer = one_weight(padam, torch.ones(2, 2))
        optimizer.state[weight]["step"] = optimizer.state[weight]["step"].to(dtype)
        plain.step()
        optimizer.step()
        assert torch.equal(weight, expected)
        assert optimizer.state[weight]["step"].dtype == dtype
        assert optimizer.state[weight]["step"].item() == 2

    def test_step_counts_of_mixed_dtypes(self):
        weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
        optimizer = padam(weights)
        for weight in weights:
            weight.grad = torch.ones(2, 2)
        optimizer.step()
        optimizer.state[weights[0]]["step"] = torch.tensor(1)
        optimizer.step()
        assert torch.equal(*weights)

    def test_step_count_with_negative_bit(self):
        expected, plain = one_weight(padam, torch.ones(2, 2))
        weight, optimizer = one_weight(padam, torch.ones(2, 2))
        optimizer.state[weight]["step"] = torch.tensor(-1.0j).conj().imag  # 1; memory has -1
        plain.step()
        optimizer.step()
        assert torch.equal(weight, expected)
        assert optimizer.state[weight]["step"].item() == 2

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
    @pytest.mark.parametrize("build", [padam, psgd])
    def test_state_that_cannot_hold_the_result_raises(self, build, dtype):
        weight, optimizer = one_weight(build, torch.ones(2, 2))
        key = "exp_avg" if build is padam else "momentum_buffer"
        optimizer.state[weight][key] = torch.ones(2, 2, dtype=dtype)
        before = weight.detach().clone()
        with pytest.raises(ValueError, match="real floating-point"):
            optimizer.step()
        assert torch.equal(weight, before)
