"""Timing of several functions in turns, so that load on the machine affects all of them alike."""

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
    """Return the median seconds per call of each function.

    In its turn, a function is called repeatedly, as in a server. Untimed are its first two calls,
    which may compile and allocate, and the first call of each turn, which runs with the caches
    that the previous function left.

    Args:
        functions: the functions to time.
        rounds: the minimum number of turns of each function.
        seconds: the minimum total time; more rounds follow until it is reached.
        turn: the seconds of one turn.
    """
    calls = []
    for function in functions:
        function()
        calls.append(max(1, round(turn / max(_time(function, 1), 1e-7))))
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + seconds
    while len(times[0]) < rounds or time.perf_counter() < end:
        for function, count, measured in zip(functions, calls, times, strict=True):
            function()
            measured.append(_time(function, count))
    return [statistics.median(measured) for measured in times]


def _time(function: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - start) / count
