"""Timing of several functions in turns, on a machine that may be busy with other processes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

_QUANTILE = 0.1  # a low quantile ignores the turns that other processes interrupted
_GROUPS = 3  # groups of rounds whose results are compared
_MAX_SPREAD = 0.1  # measure longer while the groups differ by more than this
_LONGER = 1.3  # by this factor
_DISTURBED = 1.3  # the ratio of the median and the low quantile on a busy machine
_LONG = 20e-3  # seconds of a long call
_PROBE_SIZE = 1 << 17  # numbers that torch divides between at least four threads

_Call = Sequence[float]  # the seconds of a call, or of its parts
_Turn = Sequence[_Call]  # the calls of one turn


@dataclass(frozen=True)
class Timing:
    """The result of :func:`interleaved`.

    Args:
        seconds: the seconds per call of each function.
        spread: how much the ratios of these times differ between parts of the measurement; 0.1 is
            10 %.
        is_disturbed: whether the ratios vary, or whether most calls took much longer than others,
            because other processes used the processor.
    """

    seconds: tuple[float, ...]
    spread: float
    is_disturbed: bool = False


def interleaved(
    functions: Sequence[Callable[[], object]],
    *,
    rounds: int = 7,
    seconds: float = 0.1,
    limit: float | None = None,
    turn: float = 5e-3,
    by_parts: bool = False,
    on_round: Callable[[], None] = lambda: None,
) -> Timing:
    """Measure the seconds per call of each function.

    In its turn, a function is called repeatedly, as in a server. The result is a low quantile over
    all calls, which ignores those that other processes interrupted. Untimed are the first calls of
    a function, which may compile and allocate, and the first call of each turn, which runs with the
    caches that the previous function left.

    Args:
        functions: the functions to time.
        rounds: the minimum number of turns of each function.
        seconds: the minimum total time; more rounds follow until it is reached.
        limit: measure up to this many seconds while the results vary, and stop after it even if
            there were fewer rounds. The default measures no longer than `rounds` and `seconds` ask.
        turn: the seconds of one turn; at least one call. Large weights need long turns: the other
            functions and processes evict them from the processor's cache, and it takes some calls
            until they are back, as they are in a server that repeats one call.
        by_parts: for functions that run models. Divide each call where modules are called, and
            return the sum of the low quantiles of all parts. On a busy machine, a long call is
            always interrupted, but each of its parts is not. This adds some microseconds per
            module.
        on_round: called after each round.
    """
    start = time.perf_counter()
    times: list[list[_Turn]] = [[] for _ in functions]
    for function in functions:
        function()
    # The time of a long call hardly depends on warm caches.
    warm_up = time.perf_counter() - start < len(functions) * _LONG
    with _Clock(by_parts) as clock:
        for done in itertools.count(1):
            for shift in range(len(functions)):
                k = (done + shift) % len(functions)  # each function is the first in some rounds
                times[k].append(clock.measure(functions[k], turn, warm_up))
            on_round()
            elapsed = time.perf_counter() - start
            if limit is not None and elapsed >= limit:
                break
            if done >= rounds and elapsed >= seconds:
                if limit is None or _spread(times) <= _MAX_SPREAD:
                    break
                seconds = _LONGER * elapsed  # when to look again
    lows = tuple(_low(turns) for turns in times)
    medians = [statistics.median(sum(call) for turn in turns for call in turn) for turns in times]
    slowest = max(median / low for median, low in zip(medians, lows, strict=True))
    spread = _spread(times)
    is_disturbed = done < _GROUPS or spread > _MAX_SPREAD
    is_disturbed |= not by_parts and slowest > _DISTURBED  # parts are free of interruptions
    return Timing(lows, spread, is_disturbed)


@contextmanager
def usable_threads(seconds: float) -> Iterator[int]:
    """Set torch's number of threads to 1 in the block if its threads have to wait for processors.

    Parallel operations end when their last thread has run. If other processes use the processors,
    that takes milliseconds instead of microseconds, and ratios of times are arbitrary.

    Args:
        seconds: the time of the check; 0 does not check.

    Yields:
        The number of threads in the block.
    """
    before = torch.get_num_threads()
    try:
        if before > 1 and seconds > 0 and _threads_wait(before, seconds):
            torch.set_num_threads(1)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _threads_wait(threads: int, seconds: float) -> bool:
    """Return whether an operation takes longer with all threads than with one, on average."""
    numbers = torch.linspace(0.0, 1.0, _PROBE_SIZE, device="cpu", dtype=torch.float32)
    seconds_alone: list[float] = []
    seconds_together: list[float] = []
    end = time.perf_counter() + seconds
    while not seconds_together or time.perf_counter() < end:
        torch.set_num_threads(1)
        seconds_alone += _durations(numbers.sin, 0.1 * seconds)
        torch.set_num_threads(threads)
        seconds_together += _durations(numbers.sin, 0.4 * seconds)
    # Of the undisturbed time alone, the threads together need about a half or less.
    return statistics.mean(seconds_together) > 1.3 * min(seconds_alone)


def _durations(function: Callable[[], object], seconds: float) -> list[float]:
    """Call a function repeatedly; return the seconds of all calls except the first."""
    function()
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while not durations or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        durations.append(time.perf_counter() - start)
    return durations


class _Clock:
    """A clock for calls and, if asked, for their parts between calls of modules."""

    def __init__(self, by_parts: bool) -> None:
        self._marks: list[float] = []
        self._hook = register_module_forward_pre_hook(self._mark) if by_parts else None

    def _mark(self, *args: object) -> None:
        self._marks.append(time.perf_counter())

    def measure(self, function: Callable[[], object], turn: float, warm_up: bool) -> _Turn:
        """Call a function until the turn is over; return the seconds of its calls."""
        if warm_up:
            function()
        calls: list[_Call] = []
        end = time.perf_counter() + turn
        while not calls or self._marks[-1] < end:
            self._marks[:] = [time.perf_counter()]
            function()
            self._mark()
            calls.append([after - before for before, after in itertools.pairwise(self._marks)])
        return calls

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._hook is not None:
            self._hook.remove()


def _spread(times: Sequence[Sequence[_Turn]]) -> float:
    """Return the largest relative difference of the functions' ratios between groups of turns."""
    groups = min(_GROUPS, len(times[0]))
    lows = [[_low(turns[group::groups]) for group in range(groups)] for turns in times]
    ratios = [[low / first for low, first in zip(one, lows[0], strict=True)] for one in lows]
    return max(max(one) / min(one) for one in ratios) - 1


def _low(turns: Sequence[_Turn]) -> float:
    """Return a low quantile of the calls; with parts, the sum of the low quantiles of the parts."""
    calls = [call for turn in turns for call in turn]
    if len(set(map(len, calls))) > 1:  # the calls took different branches
        calls = [[sum(call)] for call in calls]
    lows = [sorted(part)[int(_QUANTILE * len(part))] for part in zip(*calls, strict=True)]
    return float(sum(lows))
