"""Orderly stops on Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_requests(notify: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop; a second one acts as usual.

    Yields a function that returns whether a stop was requested. Outside the main thread, where
    Python delivers no signals, it always returns False.

    Args:
        notify: called when the request arrives.
    """
    requested = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        requested = True
        signal.signal(number, before[signal.Signals(number)])
        notify()

    for number in before:
        signal.signal(number, request)
    try:
        yield lambda: requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
