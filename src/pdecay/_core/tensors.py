"""torch's side of ``arrays.py``: an array API namespace for tensors and for lists of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import (
    DispatchKey,
    _dispatch_tls_is_dispatch_key_included,
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling


def is_tracing() -> bool:
    """Check whether operations are recorded or transformed instead of computed on real memory.

    This is the case under torch.compile and export, in any ``__torch_dispatch__`` mode (make_fx,
    FakeTensorMode, a user's logger), in ``torch.func`` transforms (vmap, grad) and in
    torch.jit.trace. Values must then not be read, and kernels outside torch must not be called.
    """
    # Sparse layers call this at each forward, so that the names are imported, not looked up.
    return (
        is_compiling()
        or _len_torch_dispatch_stack() > 0
        or peek_interpreter_stack() is not None
        or _dispatch_tls_is_dispatch_key_included(DispatchKey.PreDispatch)
        or _is_tracing()
    )


class TorchNamespace:
    """The array API functions that ``penalty.py`` and ``prox.py`` use, for torch tensors."""

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

    @staticmethod
    def flush(x: Tensor) -> Tensor:
        """Set subnormal numbers to 0 in place, if possible in one pass and without a mask."""
        info = torch.finfo(x.dtype)
        if type(x) is not Tensor or is_tracing():
            x *= x >= info.smallest_normal
            return x
        return torch.threshold_(x, info.smallest_normal * (1 - info.eps), 0.0)


class TensorList:
    """Tensors of one device and dtype that behave as one array.

    Its operators call torch's multi-tensor functions (``torch._foreach_*``). The equation in
    ``penalty.py`` then runs as a few calls for all tensors together, instead of a few kernel
    launches for each tensor.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def __array_namespace__(self) -> type[_ListNamespace]:
        return _ListNamespace

    def __pow__(self, exponent: float) -> TensorList:
        return TensorList(list(torch._foreach_pow(self.tensors, exponent)))

    def __ipow__(self, exponent: float) -> TensorList:
        if exponent == -1:  # faster, with the same result
            torch._foreach_reciprocal_(self.tensors)
        else:
            torch._foreach_pow_(self.tensors, exponent)
        return self

    def __iadd__(self, other: float | TensorList) -> TensorList:
        torch._foreach_add_(self.tensors, _operand(other))
        return self

    def __imul__(self, other: float | Tensor | TensorList) -> TensorList:
        torch._foreach_mul_(self.tensors, _operand(other))
        return self


def _operand(other: Any) -> Any:
    return other.tensors if isinstance(other, TensorList) else other


class _ListNamespace(TorchNamespace):
    """The array API functions for a :class:`TensorList`.

    mypy reports that they take other arguments than those of the base class, which take tensors.
    """

    @staticmethod
    def abs(x: TensorList) -> TensorList:  # type: ignore[override]
        return TensorList(list(torch._foreach_abs(x.tensors)))

    @staticmethod
    def astype(x: TensorList, dtype: torch.dtype) -> TensorList:  # type: ignore[override]
        return TensorList([tensor.to(dtype) for tensor in x.tensors])

    @staticmethod
    def flush(x: TensorList) -> TensorList:  # type: ignore[override]
        for tensor in x.tensors:
            TorchNamespace.flush(tensor)
        return x

    @staticmethod
    def ones_like(x: TensorList) -> TensorList:  # type: ignore[override]
        return TensorList([torch.ones_like(tensor) for tensor in x.tensors])

    @staticmethod
    def where(condition: Tensor, x: TensorList, otherwise: float) -> TensorList:  # type: ignore[override]
        return TensorList([torch.where(condition, tensor, otherwise) for tensor in x.tensors])
