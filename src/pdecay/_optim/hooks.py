"""Which call of ``step()`` runs a hook.

An optimizer's hooks run twice where a subclass's ``step()`` calls ``super().step()``; only the
outermost call is the user's.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch.optim import Optimizer

_OPTIMIZER_FILE = sys.modules[Optimizer.__module__].__file__


def calling_step() -> FrameType:
    """The frame of the ``step()`` that runs the hook: torch calls both hooks from the same one.

    Counting calls instead would go wrong for good after a step that raised, since the hook after
    it never runs.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _OPTIMIZER_FILE:
            return frame
        frame = frame.f_back
    raise RuntimeError("an optimizer's step hook was called from outside a step()")


def is_inside(frame: FrameType | None, outer: FrameType) -> bool:
    """Whether a call is under way within another, which is still running."""
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False
