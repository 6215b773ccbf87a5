"""The paper's own settings, trained for two iterations with its networks and shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdecay.lab.tasks import task
from pdecay.lab.train.schedule import lr_factor
from pdecay.lab.train.session import Session
from pdecay.lab.train.settings import Settings


class Noise:
    """Inputs of the paper's shape without the data; few a batch, as a full one takes a minute."""

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


@pytest.mark.parametrize(
    ("name", "method", "weights"),
    [
        ("cifar10", "padam", 11_164_352),
        ("cifar10", "oto", 11_164_352),
        ("shakespeare", "elastic", 10_641_792 + 256 * 384),  # and the position embedding
        ("shakespeare", "dwf", 10_641_792 + 256 * 384),
    ],
)
def test_two_iterations(name, method, weights):
    settings = Settings.of(name, method, scale="paper")
    job = replace(task(name, "paper"), open=lambda device: Noise(name))
    session = Session(job, settings.build(), seed=0, lr=settings.lr, steps=settings.steps)
    before = [param.detach().clone() for param in session.model.parameters()]
    losses = [session.advance() for _ in range(2)]
    assert all(0 < loss < 6 for loss in losses)
    moved = [
        not torch.equal(old, new)
        for old, new in zip(before, session.model.parameters(), strict=True)
    ]
    assert all(moved)
    for group in session.run.optimizer.param_groups:
        assert (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-8)
    point = session.add_point()
    assert point["step"] == 2
    assert session.finish()["weights"] == weights
    parameters = sum(param.numel() for param in session.model.parameters())
    if name == "cifar10":
        assert parameters == 11_173_962
    else:
        assert parameters - 256 * 384 == 10_646_784


@pytest.mark.parametrize(
    ("name", "warmup", "steps"), [("cifar10", 2346, 78_200), ("shakespeare", 100, 5000)]
)
def test_the_learning_rates_course(name, warmup, steps):
    job = task(name, "paper")
    assert (job.warmup, job.steps) == (warmup, steps)
    assert lr_factor(0, steps, warmup) == 1 / warmup
    assert lr_factor(warmup - 1, steps, warmup) == 1
    assert lr_factor(steps - 1, steps, warmup) == pytest.approx(0.01)
    assert job.clip == (1.0 if name == "shakespeare" else None)
