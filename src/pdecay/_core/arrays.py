"""The array functions that ``penalty.py`` needs, for the framework that an array belongs to.

numpy and JAX arrays provide their namespace through the array API standard. torch tensors do not;
``tensors.py`` has one for them. This module imports without torch.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def namespace(x: Any) -> Any:
    """Return the array API namespace of x's framework; numpy for numbers and lists."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        from pdecay._core.tensors import TorchNamespace

        return TorchNamespace
    return x.__array_namespace__() if hasattr(x, "__array_namespace__") else np
