"""Sparse neural networks by p-norm weight decay."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from pdecay.deployment.compact import compact
    from pdecay.deployment.runtime import deploy
    from pdecay.deployment.store import load, save

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
    "compact",
    "deploy",
    "doctor",
    "find_lam",
    "freeze_zeros",
    "load",
    "param_groups",
    "prox",
    "prune_",
    "save",
    "sparsity",
]
__version__ = "0.1.0"

# What is needed after training is imported when it is asked for: training does not wait for it.
_LATER = {
    "compact": "pdecay.deployment.compact",
    "deploy": "pdecay.deployment.runtime",
    "load": "pdecay.deployment.store",
    "save": "pdecay.deployment.store",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'pdecay' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
