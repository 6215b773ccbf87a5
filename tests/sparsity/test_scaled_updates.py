"""Updates that are scaled by a power of the weight."""

import copy

import pytest
import torch

import pdecay
from pdecay import Lp, PAdam
from pdecay._optim.kernels.old_weights import OldWeights
from pdecay._sparsity.scaled_updates import ScaledUpdates, mean_power, scale_update_


def literal(weight, old, power, mean):
    """Return the scaled update, element by element."""
    result = []
    for new, before in zip(weight.flatten().tolist(), old.flatten().tolist(), strict=True):
        scale = min(4.0, abs(before) ** power / mean)
        result.append(new if new == 0 else before + scale * (new - before))
    return torch.tensor(result, dtype=weight.dtype).view(weight.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("power", [0.25, 0.5, 1.0])
def test_scale_update_equals_the_literal_equation(dtype, power):
    torch.manual_seed(0)
    old = torch.randn(50, 7).to(dtype)
    old[::5] = 0
    weight = (old + 0.1 * torch.randn(50, 7)).to(dtype)
    weight[1::5] = 0
    expected = literal(weight, old, power, 0.8)
    scale_update_(weight, old, power, 0.8)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(weight, expected, rtol=tolerance, atol=tolerance)
    assert (weight[1::5] == 0).all()


def test_c_equals_torch():
    torch.manual_seed(1)
    before = [torch.randn(100_001) * torch.logspace(-12, 2, 100_001), torch.ones(3), torch.randn(7)]
    after = [w + torch.randn_like(w) * 1e-3 for w in before]
    after[2][3] = 0
    means, old, weights = [0.3, 0.0, 0.8], OldWeights(), [w.clone() for w in before]
    assert old.copy(weights)
    for weight, new in zip(weights, after, strict=True):
        weight.copy_(new)
    assert old.scale_updates_(means, 0.5, 4.0)
    for i in (0, 2):
        scale_update_(after[i], before[i], 0.5, means[i])
        torch.testing.assert_close(weights[i], after[i], rtol=2e-5, atol=1e-9)  # the sum may cancel
    assert torch.equal(weights[1], after[1])
    assert weights[2][3] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_target_gives_the_same_without_c(dtype, monkeypatch):
    def trained():
        model, optimizer, _ = make(0.5, dtype=dtype)
        train(model, optimizer, 5, dtype=dtype)
        return model.weight.detach()

    in_c = trained()
    monkeypatch.setattr(OldWeights, "copy", lambda *_: False)
    tolerance = {torch.float32: 1e-5, torch.float64: 0, torch.bfloat16: 0}[dtype]
    torch.testing.assert_close(in_c, trained(), rtol=tolerance, atol=tolerance / 10)


def test_mean_power_counts_nonzero_weights_only():
    weight = torch.tensor([[4.0, 0.0], [0.0, 1.0]])
    assert mean_power(weight, 0.5) == 1.5
    assert mean_power(torch.zeros(3, 3), 0.5) == 0.0


def test_mean_power_samples_rows_of_large_tensors():
    weight = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    exact = weight.abs().sqrt().mean().item()
    assert mean_power(weight, 0.5) == pytest.approx(exact, rel=0.1)


def train(model, optimizer, steps, seed=0, dtype=torch.float32):
    for step in range(steps):
        torch.manual_seed(seed + step)
        model(torch.randn(16, 20).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make(power, steps=40, dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 30, dtype=dtype)
    optimizer = PAdam(model.parameters(), 1e-2, decay=Lp(0.8, 1e-2))
    return model, optimizer, pdecay.SparsityTarget(optimizer, 0.9, steps, update_power=power)


def test_target_scales_the_first_update():
    plain, scaled = make(0.0), make(0.5)
    before = plain[0].weight.detach().clone()
    for model, optimizer, _ in (plain, scaled):
        train(model, optimizer, 1)
    moved = plain[0].weight.detach()
    expected = literal(moved, before, 0.5, mean_power(before, 0.5))
    torch.testing.assert_close(scaled[0].weight.detach(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(scaled[0].bias, plain[0].bias, rtol=0, atol=0)


def test_updates_are_plain_after_the_ramp():
    model, optimizer, target = make(0.5)
    train(model, optimizer, 39)
    assert target.sparsity == pytest.approx(0.9, abs=1e-3)
    twin = torch.nn.Linear(20, 30)
    twin.load_state_dict(model.state_dict())
    other = PAdam(twin.parameters(), 1e-2, decay=Lp(0.8, 1e-2))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 1, seed=100)
    train(twin, other, 1, seed=100)
    torch.testing.assert_close(model.weight, twin.weight, rtol=0, atol=0)


def test_resumed_target_continues_exactly():
    model, optimizer, _ = make(0.5)
    train(model, optimizer, 13)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 27, seed=13)
    twin, other, _ = make(0.5)
    twin.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(twin, other, 27, seed=13)
    torch.testing.assert_close(model.weight, twin.weight, rtol=0, atol=0)


def test_checkpoint_of_an_older_version_has_no_means():
    model, optimizer, _ = make(0.5)
    train(model, optimizer, 5)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["target_means"]
    optimizer.load_state_dict(state)
    train(model, optimizer, 35, seed=5)
    assert (model.weight == 0).float().mean() == pytest.approx(0.9, abs=1e-3)


@pytest.mark.parametrize("power", [-0.1, 1.5, float("nan")])
def test_bad_power_is_refused(power):
    with pytest.raises(ValueError, match="update_power"):
        ScaledUpdates(power)
