"""Tiny jobs to train: real digits, and a stream that needs no data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from pdecay.lab.tasks import Task, task


class Points:
    """Two classes of points in four dimensions, told apart by a hidden direction."""

    def batch(self, seed, step):
        random = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(16, 4, generator=random)
        return x, (x[:, 0] - x[:, 1] > 0).long()

    def validation(self):
        yield self.batch(99, 0)


@pytest.fixture
def points():
    """A task of points, with a model of choice."""

    def make(build=None, **changes) -> Task:
        job = Task(
            "digits",  # a name that is known; nothing else of it is used
            "quick",
            build or (lambda: nn.Linear(4, 2)),
            lambda device: Points(),
            steps=20,
            warmup=2,
            lr=0.01,
        )
        return replace(job, **changes)

    return make


@pytest.fixture(scope="session")
def digits() -> Task:
    return task("digits", "quick")
