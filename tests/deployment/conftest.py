"""What the tests of deployed models share."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

T = TypeVar("T")


@pytest.fixture
def clock(monkeypatch):
    """Decides what is faster, instead of the clock: sparse is, by default, and so is the model."""

    from pdecay.deployment.runtime import deploying as runtime

    class Clock:
        sparse = 1.0
        dense = 2.0
        model = None  # seconds of the models, in the order dense, smaller, sparse

        def __call__(self, functions, **options):
            for function in functions:
                function()
            if options:  # the whole models
                return (self.model or [3.0, 2.0, 1.0])[: len(functions)]
            return [self.dense, self.sparse]

    clock = Clock()
    monkeypatch.setattr(runtime, "interleaved", clock)
    return clock


@pytest.fixture
def peak_memory() -> Iterator[Callable[[Callable[[], T], int], tuple[T, int]]]:
    """Runs an action; gives its result and the bytes that it took at its peak.

    Imports at a first use and other threads of the process take memory too, now and then. What
    the action itself takes, it takes each time: one above the limit is run again.
    """

    def measure(action: Callable[[], T], limit: int) -> tuple[T, int]:
        for _ in range(3):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            result = action()
            peak = tracemalloc.get_traced_memory()[1] - before
            if peak <= limit:
                break
        return result, peak

    tracemalloc.start()
    yield measure
    tracemalloc.stop()
