"""Timing of several functions in turns, on a machine that may be busy with other processes."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

if sys.platform != "win32":
    import resource

# Within minutes, this quantile of an MLP with 17 MB of weights varied by 1.25 times, also beside
# busy processes. Its median varied by 1.6 times, because others use the same outer cache.
_QUANTILE = 0.05
_GROUPS = 3  # parts of a measurement whose results are compared
_MAX_SPREAD = 0.1  # measure longer while the parts differ by more than this
_LONGER = 1.3  # by this factor
_LONG = 20e-3  # seconds of a long call
_PROBE_SIZE = 1 << 17  # numbers that torch divides between at least four threads


@dataclass(frozen=True)
class Timing:
    """The result of :func:`interleaved`.

    Args:
        seconds: the seconds of an undisturbed call of each function.
        medians: the seconds of the median call of each function.
        spread: how much the ratios of `seconds` differ between the parts of the measurement; 0.1 is
            10 %.
        is_uncertain: whether the ratios vary, or whether there was time for few calls only.
    """

    seconds: tuple[float, ...]
    medians: tuple[float, ...]
    spread: float
    is_uncertain: bool = False


def interleaved(
    functions: Sequence[Callable[[], object]],
    *,
    rounds: int = 7,
    seconds: float = 0.1,
    limit: float | None = None,
    turn: float = 5e-3,
    on_round: Callable[[], None] = lambda: None,
) -> Timing:
    """Measure the seconds per call of each function.

    In its turn, a function is called repeatedly, as in a server. The result is a low quantile over
    all calls, because other processes only ever make calls slower. Untimed are the first calls of a
    function, which may compile and allocate, and the first call of each turn, which runs with the
    caches that the previous function left.

    If torch uses one thread, a call that was interrupted by another process counts with its CPU
    time, so that the duration of the interruption does not matter.

    Args:
        functions: the functions to time.
        rounds: the minimum number of turns of each function.
        seconds: the minimum total time; more rounds follow until it is reached.
        limit: measure up to this many seconds while the results vary, and stop after it even if
            there were fewer rounds. The default measures no longer than `rounds` and `seconds` ask.
        turn: the seconds of one turn; at least one call. Large weights need long turns: the other
            functions and processes evict them from the processor's cache, and it takes some calls
            until they are back, as they are in a server that repeats one call.
        on_round: called after each round.
    """
    start = time.perf_counter()
    times: list[list[list[float]]] = [[] for _ in functions]
    for function in functions:
        function()
    # The time of a long call hardly depends on warm caches.
    warm_up = time.perf_counter() - start < len(functions) * _LONG
    for done in itertools.count(1):
        for shift in range(len(functions)):
            k = (done + shift) % len(functions)  # each function is the first in some rounds
            if warm_up:
                functions[k]()
            times[k].append(_durations(functions[k], turn))
        on_round()
        elapsed = time.perf_counter() - start
        if limit is not None and elapsed >= limit:
            break
        if done >= rounds and elapsed >= seconds:
            if limit is None or _spread(times) <= _MAX_SPREAD:
                break
            seconds = _LONGER * elapsed  # when to look again
    spread = _spread(times)
    return Timing(
        tuple(map(_low, times)),
        tuple(statistics.median(itertools.chain.from_iterable(turns)) for turns in times),
        spread,
        done < _GROUPS or spread > _MAX_SPREAD,
    )


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
        numbers.sin()
        seconds_alone += _durations(numbers.sin, 0.1 * seconds)
        torch.set_num_threads(threads)
        numbers.sin()  # starts the threads
        seconds_together += _durations(numbers.sin, 0.4 * seconds)
    # Of the undisturbed time alone, the threads together need about a half or less.
    return statistics.mean(seconds_together) > 1.3 * min(seconds_alone)


def _durations(function: Callable[[], object], seconds: float) -> list[float]:
    """Call a function until the time is over, at least once; return the seconds of each call."""
    durations: list[float] = []
    has_one_thread = torch.get_num_threads() == 1
    end = time.perf_counter() + seconds
    interruptions = _interruptions()
    while True:
        cpu = time.thread_time()
        start = time.perf_counter()
        function()
        stop = time.perf_counter()
        cpu = time.thread_time() - cpu
        before, interruptions = interruptions, _interruptions()
        was_interrupted = has_one_thread and interruptions > before
        durations.append(cpu if was_interrupted else stop - start)
        if stop >= end:
            return durations


def _interruptions() -> int:
    """Return how often other processes have interrupted this thread; 0 if that is unknown."""
    if sys.platform == "win32":
        return 0
    # macOS counts for the whole process only.
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(who).ru_nivcsw


def _spread(times: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the largest relative difference of the functions' ratios between thirds."""
    turns = len(times[0])
    ends = [turns * k // _GROUPS for k in range(_GROUPS + 1)] if turns >= _GROUPS else [0, turns]
    ratios = [
        [_low(one[begin:end]) / _low(times[0][begin:end]) for begin, end in pairwise(ends)]
        for one in times
    ]
    return max(max(one) / min(one) for one in ratios) - 1


def _low(turns: Sequence[Sequence[float]]) -> float:
    """Return a low quantile of the durations in all turns."""
    durations = sorted(itertools.chain.from_iterable(turns))
    return durations[int(_QUANTILE * len(durations))]
