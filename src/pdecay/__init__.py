"""Sparse neural networks by p-norm weight decay."""

from typing import TYPE_CHECKING, Any

from pdecay import prox
from pdecay._core.auxiliary import Every, Instant, Slow
from pdecay._core.parameters import param_groups
from pdecay._core.penalty import Lp
from pdecay._optim.attachment import attach
from pdecay._optim.optimizers import PSGD, PAdam
from pdecay._sparsity.counting import prune_, sparsity
from pdecay._sparsity.doctor import doctor
from pdecay._sparsity.find_lam import find_lam
from pdecay._sparsity.pruning import GradualMagnitudePruning, MagnitudePruning
from pdecay._sparsity.schedules import LamSchedule, PSchedule
from pdecay._sparsity.target import SparsityTarget, freeze_zeros

if TYPE_CHECKING:
    from pdecay.deployment.compact import compact
    from pdecay.deployment.files import load, save
    from pdecay.deployment.runtime.deploying import deploy

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
    "deploy": "pdecay.deployment.runtime.deploying",
    "load": "pdecay.deployment.files",
    "save": "pdecay.deployment.files",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'pdecay' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
