"""The functions that ``penalty.py`` needs, for the framework that an array belongs to.

numpy and JAX arrays name their own namespace, by the array API standard; torch tensors do not, so
theirs stands here. Everything else is taken to numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def namespace(x: Any) -> Any:
    """The array API's functions for x's framework."""
    if isinstance(x, Tensor):
        return _Torch
    return x.__array_namespace__() if hasattr(x, "__array_namespace__") else np


class _Torch:
    """The array API's functions on a torch tensor, where torch spells them in another way."""

    float32, float64 = torch.float32, torch.float64
    finfo = staticmethod(torch.finfo)
    abs = staticmethod(torch.abs)
    clip = staticmethod(torch.clip)
    where = staticmethod(torch.where)
    ones_like = staticmethod(torch.ones_like)

    @staticmethod
    def isdtype(dtype: torch.dtype, kind: str) -> bool:
        return kind == "real floating" and dtype.is_floating_point

    @staticmethod
    def astype(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)


class TensorList:
    """Tensors of one device and dtype that act as one array, by torch's multi-tensor operations.

    The equation is written once, with the operators that all arrays share. With those operators
    on a list, the same lines run as a handful of ``torch._foreach_*`` calls, so that an
    accelerator is not asked to start five kernels for each tensor.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def __array_namespace__(self) -> type[_Foreach]:
        return _Foreach

    def __pow__(self, exponent: float) -> TensorList:
        return TensorList(list(torch._foreach_pow(self.tensors, exponent)))

    def __ipow__(self, exponent: float) -> TensorList:
        torch._foreach_pow_(self.tensors, exponent)
        return self

    def __iadd__(self, other: float | TensorList) -> TensorList:
        torch._foreach_add_(self.tensors, _operand(other))
        return self

    def __imul__(self, other: float | Tensor | TensorList) -> TensorList:
        torch._foreach_mul_(self.tensors, _operand(other))
        return self

    def __ge__(self, other: float) -> TensorList:
        return TensorList([tensor >= other for tensor in self.tensors])


def _operand(other: Any) -> Any:
    return other.tensors if isinstance(other, TensorList) else other


class _Foreach(_Torch):
    """The array API's functions on a :class:`TensorList`."""

    @staticmethod
    def abs(x: TensorList) -> TensorList:  # type: ignore[override]
        return TensorList(list(torch._foreach_abs(x.tensors)))

    @staticmethod
    def astype(x: TensorList, dtype: torch.dtype) -> TensorList:  # type: ignore[override]
        return TensorList([tensor.to(dtype) for tensor in x.tensors])

    @staticmethod
    def ones_like(x: TensorList) -> TensorList:  # type: ignore[override]
        return TensorList([torch.ones_like(tensor) for tensor in x.tensors])

    @staticmethod
    def where(condition: Tensor, x: TensorList, otherwise: float) -> TensorList:  # type: ignore[override]
        return TensorList([torch.where(condition, tensor, otherwise) for tensor in x.tensors])
