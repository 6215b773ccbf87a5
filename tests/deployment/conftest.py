"""Fixtures of the deployment tests."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")


@pytest.fixture
def clock(monkeypatch):
    """Replace the timing: by default sparse layers and the sparse model are the fastest."""

    from pdecay.deployment.runtime import layer_choice, model_choice, pipeline
    from pdecay.deployment.runtime.timing import Timing

    class Clock:
        sparse = 1.0
        dense = 2.0
        model = None  # seconds of the models, in the order dense, smaller, sparse

        slowdown = 1.0  # of the original's median call by other processes
        spread = 0.01
        is_uncertain = False
        threads = torch.get_num_threads()  # the number of usable threads

        def time_models(self, functions, **options):
            for function in functions:
                function()
            times = [*(self.model or [3.0, 2.0, 1.0]), 2.5]  # the last is dense and folded
            times = times[: len(functions)]
            medians = [self.slowdown * times[0], *times[1:]]
            return Timing(tuple(times), tuple(medians), self.spread, self.is_uncertain)

        def time_layer(self, functions, **options):
            for function in functions:
                function()
            return Timing((self.dense, self.sparse), (self.dense, self.sparse), self.spread)

    clock = Clock()
    monkeypatch.setattr(pipeline, "usable_threads", lambda _: nullcontext(clock.threads))
    monkeypatch.setattr(model_choice, "interleaved", clock.time_models)
    monkeypatch.setattr(layer_choice, "interleaved", clock.time_layer)
    return clock


@pytest.fixture
def peak_memory() -> Iterator[Callable[[Callable[[], T], int], tuple[T, int]]]:
    """Run an action; return its result and its peak memory in bytes.

    Imports at first use and other threads may allocate memory, too. An action above the limit is
    therefore run again, up to three times.
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
