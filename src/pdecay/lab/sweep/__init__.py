"""Sweeps: many training runs as one Optuna study, on one machine or on many.

A plan (`Grid` or `Search`) lists the runs, called *cells*. `study.py` keeps one Optuna trial in the
queue for each unfinished cell. Worker processes (`worker.py`) take trials from the queue with
``study.optimize``, train them and write the results to the study. The launcher (`launcher.py`)
starts the workers and replaces those that die. It reads the progress from the study, fails the
trials of dead workers, queues their cells again and writes ``records.jsonl``. `storage.py` opens
the journal file or the database.
"""

from __future__ import annotations

from pdecay.lab.sweep.grid import Grid, read_grids
from pdecay.lab.sweep.launcher import Outcome, SweepStoppedError, sweep
from pdecay.lab.sweep.plan import Plan, SweepError
from pdecay.lab.sweep.search import Range, Search

__all__ = [
    "Grid",
    "Outcome",
    "Plan",
    "Range",
    "Search",
    "SweepError",
    "SweepStoppedError",
    "read_grids",
    "sweep",
]
