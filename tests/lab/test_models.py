from __future__ import annotations

import pytest
import torch
from torch import nn

import pdecay
from pdecay.lab.models import CNN, GPT, MLP, ResNet, Whitening


def count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


@pytest.fixture(scope="module")
def nano() -> GPT:
    torch.manual_seed(0)
    return GPT(symbols=65, block=256, layers=6, heads=6, width=384, dropout=0.2)


def test_resnet18_has_size_of_paper():
    model = ResNet()
    assert count(model) == 11_173_962
    decayed, _ = pdecay.param_groups(model)
    assert sum(param.numel() for param in decayed["params"]) == 11_164_352


def test_whitening_makes_patches_uncorrelated():
    noise = torch.randn(200, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    images = nn.functional.avg_pool2d(noise, 3, stride=1)  # neighbouring pixels are correlated
    layer = Whitening(3)
    layer.fit(images)
    assert torch.equal(layer.weight[27:], -layer.weight[:27])
    assert not list(layer.parameters())
    outputs = nn.functional.conv2d(images, layer.weight[:27]).transpose(0, 1).flatten(1)
    covariance = outputs @ outputs.T / outputs.shape[1]
    torch.testing.assert_close(covariance, covariance.diag().diag(), rtol=0, atol=1e-3)
    assert 0 < covariance.diag().min() < covariance.diag().max() < 1


def test_nano_gpt_has_size_of_paper(nano):
    """10.65 M parameters besides the position embedding; all but those of 13 norms decay."""
    assert count(nano) - nano.position.weight.numel() == 10_646_784
    decayed, others = pdecay.param_groups(nano, exclude="position.weight")
    assert sum(param.numel() for param in decayed["params"]) == 10_641_792
    assert sum(param.numel() for param in others["params"]) == 13 * 384 + 256 * 384


def test_narrow_resnet_is_small():
    assert count(ResNet(width=16, blocks=(1, 1, 1))) < 80_000


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (MLP(64, (32, 16), 10), (1, 8, 8)),
        (CNN(1, 28, (8, 16), 32, 10), (1, 28, 28)),
        (CNN(3, 32, (8, 16, 32), 32, 10), (3, 32, 32)),
        (ResNet(8, (1, 1, 1), stride=2), (3, 32, 32)),
        (ResNet(8), (3, 32, 32)),
    ],
)
def test_image_models_return_logits_and_train_all_weights(model, shape):
    scores = model(torch.randn(4, *shape))
    assert scores.shape == (4, 10)
    scores.square().sum().backward()
    assert all(param.grad is not None and param.grad.any() for param in model.parameters())


def test_gpt_is_causal():
    model = GPT(symbols=11, block=8, layers=2, heads=2, width=16).eval()
    one = torch.randint(11, (1, 8), generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[0, 5:] = (one[0, 5:] + 1) % 11
    with torch.no_grad():
        a, b = model(one), model(other)
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5:], b[:, 5:])


def test_gpt_refuses_inputs_longer_than_its_block():
    model = GPT(symbols=11, block=8, layers=1, heads=2, width=16)
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 11)
    with pytest.raises(ValueError, match="up to 8 symbols, got 9"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def test_gpt_initialisation_matches_gpt_2(nano):
    assert nano.head.weight is nano.embedding.weight
    for name, weight in nano.named_parameters():
        if weight.ndim == 1:
            assert (weight == 1).all()
        else:
            std = 0.02 / 12**0.5 if name.endswith("project.weight") else 0.02
            assert weight.std().item() == pytest.approx(std, rel=0.03), name


def test_width_must_be_multiple_of_heads():
    with pytest.raises(ValueError, match="multiple of heads, got 10 and 3"):
        GPT(symbols=5, block=4, layers=1, heads=3, width=10)
