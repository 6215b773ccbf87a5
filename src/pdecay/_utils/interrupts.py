"""Interrupts that wait for the end of an optimizer's step.

The decay and other hooks keep zeros at zero after the optimizer's own update. A Ctrl-C between the
two would leave weights without a single zero, and the zeros are the only record of which weights
were removed. The same holds for a handler that writes a checkpoint, as Lightning does if a cluster
announces the end of a job by SIGUSR1. While a step runs, the signals below are therefore
remembered, and act at its end. If one is repeated after a second, it acts at once. Before that it
is a duplicate: a scheduler signals all processes of a job, and its script may forward the signal.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # its wrapper in signal takes 40 times as long
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

# Sent by users, job schedulers and timers; some do not exist on Windows.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")
_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))
_DUPLICATE = 1.0  # seconds in which a repeated signal is a duplicate of the first one


class DeferredInterrupts:
    """Handlers that replace those of the program while a step runs in the main thread.

    If a step raises, nobody calls :meth:`end`. The handlers then stay until the next signal or
    step, and pass a signal on at once, because the step is not among the callers any more. Code
    that saves and restores handlers may meanwhile have saved ours, and may install it again later.
    It must then pass signals to the handlers that it stood for when it was saved.
    """

    def __init__(self) -> None:
        self._step: FrameType | None = None
        self._pending: dict[int, float] = {}  # the signals that wait, and when they arrived
        self._renew()

    def run(self, update: Callable[[], None], decay: Callable[[], None]) -> None:
        """Update weights and decay them; defer signals until the end of both."""
        self.begin(sys._getframe())  # a variable for the frame would be a cycle
        try:
            update()
            decay()
        finally:
            self.end(sys._getframe())

    def begin(self, step: FrameType) -> None:
        """Defer signals until the end of a step, unless an outer step does so already."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python runs handlers in the main thread only
        if self._step is not None and is_inside(step, self._step):
            return
        if self._step is not None:  # it raised
            try:
                self.end(self._step)
            finally:
                self._renew()
        self._step = step
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler) and handler is not self._own:
                self._handlers[number] = handler
                _signal.signal(number, self._own)

    def end(self, step: FrameType) -> None:
        """Restore the handlers, and let signals that arrived during the step act now."""
        if self._step is step:
            _raise_all(self._restore())

    def _handle(self, handlers: dict[int, Any], number: int, frame: FrameType | None) -> None:
        others: list[int] = []
        if handlers is self._handlers:
            if self._step is not None and is_inside(frame, self._step):
                now = time.monotonic()
                if now - self._pending.setdefault(number, now) <= _DUPLICATE:
                    return
            others = [other for other in self._restore() if other != number]
        try:
            handlers[number](number, frame)
        finally:
            _raise_all(others)

    def _restore(self) -> list[int]:
        """Restore the handlers of the program and return the signals that wait."""
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) is self._own:
                _signal.signal(number, handler)
        pending = self._pending  # only now: a signal may arrive before its handler is restored
        self._step, self._pending = None, {}
        return [*pending]

    def _renew(self) -> None:
        """Create a handler, and a dict for the program's handlers that it stands for."""
        self._handlers: dict[int, Any] = {}
        self._own = functools.partial(self._handle, self._handlers)


deferred_interrupts = DeferredInterrupts()  # only one: steps may be nested


def _raise_all(numbers: Sequence[int]) -> None:
    """Raise signals one after the other, even if the handler of one raises an exception."""
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _raise_all(numbers[1:])


def is_inside(frame: FrameType | None, outer: FrameType) -> bool:
    """Check whether `outer` is `frame` or among its callers."""
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False
