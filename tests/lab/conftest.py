"""Small tasks to train: the digits, and points that need no data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from pdecay.lab.tasks import Task, get_task


class Points:
    """Two classes of points in four dimensions, separated by a plane."""

    def batch(self, seed, step):
        random = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(16, 4, generator=random)
        return x, (x[:, 0] - x[:, 1] > 0).long()

    def validation(self):
        yield self.batch(99, 0)

    def test(self):
        yield self.batch(98, 0)


@pytest.fixture
def points():
    """Make a task of points with a given model."""

    def make(build=None, **changes) -> Task:
        task = Task(
            "digits",  # any known name
            "quick",
            build or (lambda: nn.Linear(4, 2)),
            lambda device: Points(),
            steps=20,
            warmup=2,
            lr=0.01,
        )
        return replace(task, **changes)

    return make


@pytest.fixture(scope="session")
def digits() -> Task:
    return get_task("digits", "quick")
