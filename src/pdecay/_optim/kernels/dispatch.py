"""Which way a step goes: the C kernel, torch.compile, or torch's own operations.

The first two do the update and the decay in one pass over memory, with a power that is off by less
than 1e-5; the last is exact to the bit, and there for everything. Where one cannot be had the next
takes over, and one warning says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Literal

from torch import Tensor, strided
from torch.compiler import is_compiling

from pdecay._optim.kernels import native
from pdecay._optim.kernels.layout import PLAIN

Path = Literal["native", "compiled"]

_only: Path | None = None
_said: set[str] = set()


def path_for(tensor: Tensor, fused: bool | None) -> ModuleType | None:
    """The module whose `adam_`, `sgd_` and `shrink_` can take this weight; None for torch's own.

    Args:
        tensor: the weight.
        fused: True asks for one of the two, False for none. None takes the C kernel where it
            works; it leaves torch.compile, which takes seconds to start, to those who ask for it.
    """
    if fused is False or is_compiling():
        return None
    no_compiler = None
    if _only != "compiled":
        reason = native.why_not(tensor)
        if reason is None:
            no_compiler = native.available()
            if no_compiler is None:
                return native
            _say(f"the fused C kernel cannot be built ({no_compiler})")
        elif fused and tensor.device.type == "cpu":
            _say(f"the fused C kernel cannot take a tensor that is {reason}")
    if fused and _only != "native":
        from pdecay._optim.kernels import compiled

        reason = compiled.why_not(tensor) or compiled.available(tensor.device)
        if reason is None:
            return compiled
        _say(f"torch.compile cannot take the fused step ({reason})")
    return None


def paths_for(tensors: Sequence[Tensor], fused: bool | None) -> list[ModuleType | None]:
    """`path_for` each of the tensors; those that are alike are looked at once."""
    known: dict[object, ModuleType | None] = {}
    paths = []
    for tensor in tensors:
        if type(tensor) in PLAIN and tensor.layout is strided and tensor.is_contiguous():
            kind = (tensor.dtype, tensor.device)
            if kind not in known:
                known[kind] = path_for(tensor, fused)
            paths.append(known[kind])
        else:
            paths.append(path_for(tensor, fused))
    return paths


@contextmanager
def only(path: Path | None) -> Iterator[None]:
    """Within this context the other fused path is not taken; None takes both back in."""
    global _only
    before, _only = _only, path
    try:
        yield
    finally:
        _only = before


def _say(what: str) -> None:
    if what not in _said:
        _said.add(what)
        warnings.warn(f"{what}; a slower path takes over", RuntimeWarning, stacklevel=2)
