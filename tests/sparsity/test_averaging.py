"""Averages of weights keep exact zeros."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_swa_avg_fn

from pdecay import EMA, SWA, Lp, PAdam, SparsityTarget, param_groups, sparsity


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize(
    ("average", "usual"), [(EMA(0.95), get_ema_avg_fn(0.95)), (SWA(), get_swa_avg_fn())]
)
def test_average_has_the_zeros_of_the_weights(average, usual, use_buffers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    averaged = AveragedModel(model, avg_fn=average, use_buffers=use_buffers)
    dense = AveragedModel(model, avg_fn=usual, use_buffers=use_buffers)
    optimizer = PAdam(param_groups(model), lr=1e-2, decay=Lp(0.8, 1))
    target = SparsityTarget(optimizer, 0.9, 40)
    for _ in range(40):
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
        averaged.update_parameters(model)
        dense.update_parameters(model)
    assert sparsity(averaged.module, 0.0).total == target.sparsity == pytest.approx(0.9, abs=2e-3)
    assert sparsity(dense.module, 0.0).total < 0.1
    for ours, theirs, current in zip(
        averaged.module.parameters(), dense.module.parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(ours == 0, current == 0)
        always = (current != 0) & (current.detach().abs() > 0.1)  # never was zero
        torch.testing.assert_close(ours[always], theirs[always], rtol=1e-4, atol=1e-5)
    if use_buffers:
        assert int(averaged.module[1].num_batches_tracked) == 40


def test_decay_must_be_a_share():
    with pytest.raises(ValueError, match=r"decay must be from 0 to 1, got 1\.5"):
        EMA(1.5)


@pytest.mark.parametrize("average", [EMA(), SWA()])
def test_average_of_many_tensors_raises(average):
    model = nn.Linear(4, 2)
    averaged = AveragedModel(model, multi_avg_fn=average)
    averaged.update_parameters(model)  # the first one copies
    with pytest.raises(TypeError, match="pass them as avg_fn, not as multi_avg_fn"):
        averaged.update_parameters(model)
