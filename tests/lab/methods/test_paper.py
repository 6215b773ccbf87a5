"""The paper's settings, trained for two steps with its networks and shapes."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from pdecay.lab.tasks import get_task
from pdecay.lab.train.loop import Trainer, lr_factor
from pdecay.lab.train.run_settings import Settings


class Noise:
    """Small batches of random inputs with the paper's shapes."""

    def __init__(self, name):
        self.name = name

    def batch(self, seed, step):
        random = torch.Generator().manual_seed(step)
        if self.name == "cifar10":
            images = torch.randn(4, 3, 32, 32, generator=random)
            return images, torch.randint(10, (4,), generator=random)
        symbols = torch.randint(65, (2, 257), generator=random)
        return symbols[:, :-1], symbols[:, 1:]

    def validation(self):
        yield self.batch(0, 99)

    def test(self):
        yield self.batch(0, 98)


@pytest.mark.parametrize(
    ("name", "method", "weights"),
    [
        ("cifar10", "padam", 11_164_352),
        ("cifar10", "oto", 11_164_352),
        ("shakespeare", "elastic", 10_641_792 + 256 * 384),  # and the position embedding
        ("shakespeare", "dwf", 10_641_792 + 256 * 384),
    ],
)
def test_two_steps(name, method, weights):
    settings = Settings.of(name, method, scale="paper")
    task = replace(get_task(name, "paper"), load=lambda device: Noise(name))
    trainer = Trainer(task, settings.build(), seed=0, lr=settings.lr, steps=settings.steps)
    before = [param.detach().clone() for param in trainer.model.parameters()]
    losses = list(islice(trainer.train(), 2))
    assert all(0 < loss < 6 for loss in losses)
    moved = [
        not torch.equal(old, new)
        for old, new in zip(before, trainer.model.parameters(), strict=True)
    ]
    assert all(moved)
    for group in trainer.optimizer.param_groups:
        assert (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-8)
    assert trainer.add_point()["step"] == 2
    assert trainer.finish()["weights"] == weights
    parameters = sum(param.numel() for param in trainer.model.parameters())
    if name == "cifar10":
        assert parameters == 11_173_962
    else:
        assert parameters - 256 * 384 == 10_646_784


@pytest.mark.parametrize(
    ("name", "warmup", "steps"), [("cifar10", 2346, 78_200), ("shakespeare", 100, 5000)]
)
def test_learning_rate_schedule(name, warmup, steps):
    task = get_task(name, "paper")
    assert (task.warmup, task.steps) == (warmup, steps)
    assert lr_factor(0, steps, warmup) == 1 / warmup
    assert lr_factor(warmup - 1, steps, warmup) == 1
    assert lr_factor(steps - 1, steps, warmup) == pytest.approx(0.01)
    assert task.clip == (1.0 if name == "shakespeare" else None)
