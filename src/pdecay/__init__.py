"""Sparse neural networks by p-norm weight decay."""

from pdecay.attach import attach
from pdecay.groups import param_groups
from pdecay.optim import PSGD, PAdam
from pdecay.penalty import Lp

__all__ = ["PSGD", "Lp", "PAdam", "attach", "param_groups"]
__version__ = "0.1.0"
