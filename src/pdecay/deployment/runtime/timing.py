"""Times of several functions, taken in turns in one run: on a busy machine all suffer alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def interleaved(
    functions: Sequence[Callable[[], object]],
    *,
    rounds: int = 7,
    seconds: float = 0.1,
    turn: float = 2e-3,
) -> list[float]:
    """The median time of a call of each function, in seconds.

    In a turn a function is called again and again, as a server would. The first two calls, which
    may compile and allocate, are not timed; nor is the first of each turn, which finds the caches
    and the heap as the function before it left them.

    Args:
        functions: what to time.
        rounds: how many turns each has at least.
        seconds: it goes on for so long in all, in rounds.
        turn: the seconds of a turn.
    """
    calls = []
    for function in functions:
        function()
        calls.append(max(1, round(turn / max(_time(function, 1), 1e-7))))
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + seconds
    while len(times[0]) < rounds or time.perf_counter() < end:
        for function, count, taken in zip(functions, calls, times, strict=True):
            function()
            taken.append(_time(function, count))
    return [statistics.median(taken) for taken in times]


def _time(function: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - began) / count
