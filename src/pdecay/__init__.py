"""Sparse neural networks by p-norm weight decay."""

from pdecay.attach import attach
from pdecay.auxiliary import Every, Instant, Slow
from pdecay.control import SparsityTarget, freeze_zeros
from pdecay.doctor import doctor
from pdecay.groups import param_groups
from pdecay.optim import PSGD, PAdam
from pdecay.penalty import Lp
from pdecay.schedules import LamSchedule, PSchedule
from pdecay.sparsity import prune_, sparsity

__all__ = [
    "PSGD",
    "Every",
    "Instant",
    "LamSchedule",
    "Lp",
    "PAdam",
    "PSchedule",
    "Slow",
    "SparsityTarget",
    "attach",
    "doctor",
    "freeze_zeros",
    "param_groups",
    "prune_",
    "sparsity",
]
__version__ = "0.1.0"
