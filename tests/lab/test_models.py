from __future__ import annotations

import pytest
import torch
from torch import nn

import pdecay
from pdecay.lab.models import CNN, GPT, MLP, ResNet


def count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


@pytest.fixture(scope="module")
def nano() -> GPT:
    torch.manual_seed(0)
    return GPT(symbols=65, block=256, layers=6, heads=6, width=384, dropout=0.2)


def test_resnet18_has_the_papers_size():
    model = ResNet()
    assert count(model) == 11_173_962
    decayed, _ = pdecay.param_groups(model)
    assert sum(param.numel() for param in decayed["params"]) == 11_164_352


def test_nano_gpt_has_the_papers_size(nano):
    """10.65 M parameters beside the position embedding; all but 13 norms' of them decay."""
    assert count(nano) - nano.position.weight.numel() == 10_646_784
    decayed, spared = pdecay.param_groups(nano, exclude="position.weight")
    assert sum(param.numel() for param in decayed["params"]) == 10_641_792
    assert sum(param.numel() for param in spared["params"]) == 13 * 384 + 256 * 384


def test_a_narrower_resnet_is_smaller():
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
def test_images_become_class_scores_and_every_weight_learns(model, shape):
    scores = model(torch.randn(4, *shape))
    assert scores.shape == (4, 10)
    scores.square().sum().backward()
    assert all(param.grad is not None and param.grad.any() for param in model.parameters())


def test_a_gpt_does_not_look_ahead():
    model = GPT(symbols=11, block=8, layers=2, heads=2, width=16).eval()
    one = torch.randint(11, (1, 8), generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[0, 5:] = (one[0, 5:] + 1) % 11
    with torch.no_grad():
        a, b = model(one), model(other)
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5:], b[:, 5:])


def test_a_gpt_takes_shorter_inputs_and_refuses_longer():
    model = GPT(symbols=11, block=8, layers=1, heads=2, width=16)
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 11)
    with pytest.raises(ValueError, match="up to 8 symbols, got 9"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def test_a_gpt_starts_as_gpt_2_does(nano):
    assert nano.head.weight is nano.embedding.weight
    for name, weight in nano.named_parameters():
        if weight.ndim == 1:
            assert (weight == 1).all()
        else:
            std = 0.02 / 12**0.5 if name.endswith("project.weight") else 0.02
            assert weight.std().item() == pytest.approx(std, rel=0.03), name


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="multiple of heads, got 10 and 3"):
        GPT(symbols=5, block=4, layers=1, heads=3, width=10)
