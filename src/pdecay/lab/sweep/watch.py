"""Which workers are still alive, as far as one launcher can tell."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from pdecay.lab.sweep.locks import is_dead

PULSES = 6  # signs of life that a worker sends in the time after which it is held for dead

_UNNAMED = 10.0  # seconds in which a worker that claims a trial must have signed it


class Watch:
    """Tells the trials of dead workers.

    A worker of the same folder is known at once by its lock. One on another machine signs the
    trial now and then: it is dead if nothing has changed for a while by our own clock, so that
    the machines' clocks need not agree.

    Args:
        folder: where the workers' locks are.
        grace: seconds without a sign of life after which a worker elsewhere is held for dead.
    """

    def __init__(self, folder: Path, grace: float) -> None:
        self._folder = folder
        self._grace = grace
        self._seen: dict[int, tuple[Any, float]] = {}

    def is_dead(self, trial: FrozenTrial) -> bool:
        """Whether nobody runs a running trial any more."""
        name = worker_of(trial)
        if name is not None:
            known = is_dead(self._folder, name)
            if known is not None:
                return known
        sign = (name, trial.user_attrs.get("pulse"))
        last, since = self._seen.get(trial._trial_id, (None, 0.0))
        now = time.monotonic()
        if sign != last:
            self._seen[trial._trial_id] = (sign, now)
            return False
        # A claim is signed at once; who has not done so has not begun to work either.
        return now - since > (self._grace if name is not None else min(_UNNAMED, self._grace))


def worker_of(trial: FrozenTrial) -> str | None:
    """The name of the worker that has claimed a trial."""
    worker = trial.user_attrs.get("worker")
    return None if worker is None else str(worker["name"])
