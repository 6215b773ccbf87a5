import pytest
import torch
from torch import nn

from pdecay import PSGD, Lp, find_lam, sparsity


@pytest.mark.parametrize("p", [0.0, 0.5, 0.8, 1.0, 1.2])
@pytest.mark.parametrize("share", [0.2, 0.7])
def test_share_is_zero_after_the_steps(p, share):
    torch.manual_seed(0)
    model = nn.Linear(60, 60, dtype=torch.float64)
    nn.init.normal_(model.weight, std=0.1)
    lam = find_lam(model, p, lr=1e-2, steps=2000, share=share)
    optimizer = PSGD(model.parameters(), lr=1e-2, decay=Lp(p, lam))
    for _ in range(2000):
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    # for p >= 1 the decay becomes geometric near zero and does not reach it
    assert sparsity(model, threshold=1e-3).total == pytest.approx(share, abs=0.03)


def test_ignores_norms_and_biases():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    nn.init.constant_(model[0].weight, 0.5)
    nn.init.constant_(model[0].bias, 100.0)
    assert find_lam(model, 1, lr=0.1, steps=10, share=0.99) == pytest.approx(0.5)


def test_ignores_frozen_weights_and_tensors_that_start_at_zero():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8))
    model[0].requires_grad_(False)
    nn.init.constant_(model[1].weight, 0.5)
    nn.init.zeros_(model[2].weight)
    assert find_lam(model, 1, lr=0.1, steps=10) == pytest.approx(0.5)


def test_share_that_is_zero_already_is_an_error():
    model = nn.Linear(4, 4)
    model.weight.data[:2] = 0
    assert find_lam(model, 1, lr=0.1, steps=10, share=0.6) > 0
    with pytest.raises(ValueError, match=r"0\.5 of the weights are zero already"):
        find_lam(model, 1, lr=0.1, steps=10, share=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p": 2}, "p must be below 2"),
        ({"p": -1}, "p must be finite and >= 0, got -1"),
        ({"lr": 0}, "lr must be above 0"),
        ({"steps": 0}, "steps must be a whole number >= 1, got 0"),
        ({"share": 1.0}, "share must be above 0 and below 1, got 1.0"),
    ],
)
def test_rejects_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        find_lam(nn.Linear(2, 2), **{"p": 1, "lr": 0.1, "steps": 10, **arguments})


def test_rejects_models_without_weights():
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module"):
        find_lam([], 1, 0.1, 10)
    with pytest.raises(ValueError, match="no weights that decay"):
        find_lam(nn.LayerNorm(3), 1, 0.1, 10)
