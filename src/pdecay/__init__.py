"""Sparse neural networks by p-norm weight decay.

Train: `PAdam` and `PSGD` are Adam and SGD with the decay in their step. `attach` adds the decay to
any other ``torch.optim.Optimizer``. The penalty is an `Lp` or a sum of them. `param_groups` chooses
the weights that decay.

Choose a sparsity: `SparsityTarget` sets weights to zero along a ramp until the given share of them
is zero. `freeze_zeros` keeps zeros at zero. `MagnitudePruning` and `GradualMagnitudePruning` are
baselines.

Inspect: `sparsity` counts zeros and dead units, `prune_` makes tiny weights exactly zero, `doctor`
reports mistakes in a setup.

Deploy: `compact` removes dead units, `deploy` replaces layers by sparse ones where that is faster,
`save` and `load` use a sparse file format, `export_onnx` writes an ONNX file.

The command line ``pdecay --help`` runs a demo, experiments, reports and benchmarks.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdecay import functional as functional
    from pdecay import prox as prox
    from pdecay._core.auxiliary import Every as Every
    from pdecay._core.auxiliary import Instant as Instant
    from pdecay._core.auxiliary import Slow as Slow
    from pdecay._core.parameters import param_groups as param_groups
    from pdecay._core.penalty import Lp as Lp
    from pdecay._core.penalty import Penalty as Penalty
    from pdecay._native.build import KernelUnavailable as KernelUnavailable
    from pdecay._optim.attachment import Attachment as Attachment
    from pdecay._optim.attachment import attach as attach
    from pdecay._optim.optimizers import PSGD as PSGD
    from pdecay._optim.optimizers import PAdam as PAdam
    from pdecay._sparsity.averaging import EMA as EMA
    from pdecay._sparsity.averaging import SWA as SWA
    from pdecay._sparsity.counting import LayerSparsity as LayerSparsity
    from pdecay._sparsity.counting import SparsityReport as SparsityReport
    from pdecay._sparsity.counting import prune_ as prune_
    from pdecay._sparsity.counting import sparsity as sparsity
    from pdecay._sparsity.doctor import Finding as Finding
    from pdecay._sparsity.doctor import doctor as doctor
    from pdecay._sparsity.find_lam import find_lam as find_lam
    from pdecay._sparsity.freezing import freeze_zeros as freeze_zeros
    from pdecay._sparsity.pruning import GradualMagnitudePruning as GradualMagnitudePruning
    from pdecay._sparsity.pruning import MagnitudePruning as MagnitudePruning
    from pdecay._sparsity.schedules import LamSchedule as LamSchedule
    from pdecay._sparsity.schedules import PSchedule as PSchedule
    from pdecay._sparsity.target import SparsityTarget as SparsityTarget
    from pdecay.deployment.compact import CompactError as CompactError
    from pdecay.deployment.compact import CompactReport as CompactReport
    from pdecay.deployment.compact import compact as compact
    from pdecay.deployment.export import export_onnx as export_onnx
    from pdecay.deployment.files import FileFormatError as FileFormatError
    from pdecay.deployment.files import SaveReport as SaveReport
    from pdecay.deployment.files import load as load
    from pdecay.deployment.files import save as save
    from pdecay.deployment.layers.modules import SparseConv2d as SparseConv2d
    from pdecay.deployment.layers.modules import SparseLinear as SparseLinear
    from pdecay.deployment.model.errors import DeploymentError as DeploymentError
    from pdecay.deployment.model.errors import ExportError as ExportError
    from pdecay.deployment.runtime.pipeline import DeployReport as DeployReport
    from pdecay.deployment.runtime.pipeline import deploy as deploy

__version__ = "0.1.0"

# The home of each public name. Names are imported at first use: `import pdecay` is fast, and `Lp`
# works where torch is not installed. The imports above say the same to type checkers.
_HOME = {
    "Every": "_core.auxiliary",
    "Instant": "_core.auxiliary",
    "Slow": "_core.auxiliary",
    "param_groups": "_core.parameters",
    "Lp": "_core.penalty",
    "Penalty": "_core.penalty",
    "KernelUnavailable": "_native.build",
    "Attachment": "_optim.attachment",
    "attach": "_optim.attachment",
    "PSGD": "_optim.optimizers",
    "PAdam": "_optim.optimizers",
    "EMA": "_sparsity.averaging",
    "SWA": "_sparsity.averaging",
    "LayerSparsity": "_sparsity.counting",
    "SparsityReport": "_sparsity.counting",
    "prune_": "_sparsity.counting",
    "sparsity": "_sparsity.counting",
    "Finding": "_sparsity.doctor",
    "doctor": "_sparsity.doctor",
    "find_lam": "_sparsity.find_lam",
    "freeze_zeros": "_sparsity.freezing",
    "GradualMagnitudePruning": "_sparsity.pruning",
    "MagnitudePruning": "_sparsity.pruning",
    "LamSchedule": "_sparsity.schedules",
    "PSchedule": "_sparsity.schedules",
    "SparsityTarget": "_sparsity.target",
    "CompactError": "deployment.compact",
    "CompactReport": "deployment.compact",
    "compact": "deployment.compact",
    "export_onnx": "deployment.export",
    "FileFormatError": "deployment.files",
    "SaveReport": "deployment.files",
    "load": "deployment.files",
    "save": "deployment.files",
    "SparseConv2d": "deployment.layers.modules",
    "SparseLinear": "deployment.layers.modules",
    "DeploymentError": "deployment.model.errors",
    "ExportError": "deployment.model.errors",
    "DeployReport": "deployment.runtime.pipeline",
    "deploy": "deployment.runtime.pipeline",
}
_SUBMODULES = ("functional", "prox")

__all__ = [
    *_HOME,
    *_SUBMODULES,
]


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _SUBMODULES:
        module = sys.modules[__name__]  # for "Did you mean ...?"
        raise AttributeError(f"module 'pdecay' has no attribute {name!r}", name=name, obj=module)
    try:
        module = import_module(f"pdecay.{_HOME.get(name, name)}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = f"pdecay.{name} needs PyTorch: pip install 'pdecay[torch]'"
        raise ModuleNotFoundError(message, name="torch") from error
    if name in _SUBMODULES:
        return module
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
