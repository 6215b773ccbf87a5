"""Custom methods for the tests of sweeps."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from pdecay.lab.methods import Method, Run
from pdecay.lab.methods.decay import PAdamMethod

PAUSE = "PDECAY_TEST_PAUSE"  # environment variable: the path of the file with the pause


@dataclass(frozen=True)
class Slow(PAdamMethod):
    """PAdam that waits after each step for the seconds in a file.

    The sweep becomes long enough to be killed, with the same settings and records.
    """

    def start(self, model, task, lr, steps):
        pause = float(Path(os.environ[PAUSE]).read_text())
        run = super().start(model, task, lr, steps)
        run.after_step = lambda: time.sleep(pause)
        return run


@dataclass(frozen=True)
class Faulty(Method):
    """SGD that raises (unless the file `cure` exists), diverges or dies."""

    how: str = "raise"
    cure: str = ""

    def start(self, model, task, lr, steps):
        run = Run(torch.optim.SGD(model.parameters(), lr=lr))
        if self.how == "diverge":
            next(model.parameters()).data.fill_(math.inf)
        elif self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "raise" and not os.path.exists(self.cure):
            raise ZeroDivisionError("no luck today")
        return run
