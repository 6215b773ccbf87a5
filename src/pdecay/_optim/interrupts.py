"""Interrupts that wait for the end of an optimizer's step.

Hooks keep zeros at zero after the optimizer's own update. A Ctrl-C between the update and the hooks
would leave weights without a single zero, and the zeros are the only record of which weights were
removed. While a step with hooks runs, the signals below are therefore remembered, and act at its
end. A second one acts at once.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # its wrapper in signal takes 40 times as long
import functools
import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))


class DeferredInterrupts:
    """Handlers that replace those of the program while a step runs in the main thread.

    If a step raises, nobody calls :meth:`end`. The handlers then stay until the next signal or
    step, and pass a signal on at once, because the step is not among the callers any more. Code
    that saves and restores handlers may meanwhile have saved ours, and may install it again later.
    It must then pass signals to the handlers that it stood for when it was saved.
    """

    def __init__(self) -> None:
        self._step: FrameType | None = None
        self._pending: int | None = None
        self._renew()

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
        """Restore the handlers, and let a signal that arrived during the step act now."""
        if self._step is not step:
            return
        pending = self._restore()
        if pending is not None:
            signal.raise_signal(pending)

    def _handle(self, handlers: dict[int, Any], number: int, frame: FrameType | None) -> None:
        if handlers is self._handlers:
            if self._pending is None and self._step is not None and is_inside(frame, self._step):
                self._pending = number
                return
            self._restore()
        handlers[number](number, frame)

    def _restore(self) -> int | None:
        """Restore the handlers of the program and return the signal that waits."""
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) is self._own:
                _signal.signal(number, handler)
        pending = self._pending  # only now: a signal may arrive before its handler is restored
        self._step = self._pending = None
        return pending

    def _renew(self) -> None:
        """Create a handler, and a dict for the program's handlers that it stands for."""
        self._handlers: dict[int, Any] = {}
        self._own = functools.partial(self._handle, self._handlers)


def is_inside(frame: FrameType | None, outer: FrameType) -> bool:
    """Check whether `outer` is `frame` or among its callers."""
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False
