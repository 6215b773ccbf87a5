"""Sweeps: many runs of the lab on one or many machines, each of them once, whoever dies."""

from __future__ import annotations

from pdecay.lab.sweep.grid import Grid
from pdecay.lab.sweep.launcher import Outcome, SweepError, SweepStoppedError, sweep
from pdecay.lab.sweep.plan import OBJECTIVES, Plan, PlanError
from pdecay.lab.sweep.search import SAMPLERS, Range, Search
from pdecay.lab.sweep.storage import StorageError
from pdecay.lab.sweep.study import StudyError

__all__ = [
    "OBJECTIVES",
    "SAMPLERS",
    "Grid",
    "Outcome",
    "Plan",
    "PlanError",
    "Range",
    "Search",
    "StorageError",
    "StudyError",
    "SweepError",
    "SweepStoppedError",
    "sweep",
]
