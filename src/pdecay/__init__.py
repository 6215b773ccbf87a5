"""Sparse neural networks by p-norm weight decay."""

from pdecay import prox
from pdecay.attach import attach
from pdecay.auxiliary import Every, Instant, Slow
from pdecay.control import SparsityTarget, freeze_zeros
from pdecay.doctor import doctor
from pdecay.finder import find_lam
from pdecay.groups import param_groups
from pdecay.optim import PSGD, PAdam
from pdecay.penalty import Lp
from pdecay.pruning import GradualMagnitudePruning, MagnitudePruning
from pdecay.schedules import LamSchedule, PSchedule
from pdecay.sparsity import prune_, sparsity

__all__ = [
    "PSGD",
    "Every",
    "GradualMagnitudePruning",
    "Instant",
    "LamSchedule",
    "Lp",
    "MagnitudePruning",
    "PAdam",
    "PSchedule",
    "Slow",
    "SparsityTarget",
    "attach",
    "doctor",
    "find_lam",
    "freeze_zeros",
    "param_groups",
    "prox",
    "prune_",
    "sparsity",
]
__version__ = "0.1.0"
