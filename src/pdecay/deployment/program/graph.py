"""The JSON form of a graph of torch operators.

A graph is a list of calls ``[operator, arguments, keyword arguments]``. ``{"n": 3}`` in an argument
is the fourth value: values are the graph's inputs, then the results of its calls. Operators are
those of ATen in `operators`, the operator of sparse layers, and a few functions of numbers. A file
can name no other function, so that a graph runs no Python code of a file.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from pdecay.deployment.program.operators import checked, is_allowed

SPARSE_LAYER = "pdecay.sparse_layer.default"

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        f"operator.{one.__name__}": one
        for one in (
            *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv),
            *(operator.mod, operator.neg, operator.pow, operator.getitem, operator.and_),
            *(operator.or_, operator.eq, operator.ne, operator.lt, operator.le, operator.gt),
            operator.ge,
        )
    },
    **{f"math.{one.__name__}": one for one in (math.ceil, math.floor, math.trunc)},
    **{f"torch.{name}": getattr(torch, name) for name in ("sym_max", "sym_min", "sym_not")},
    **{f"torch.{name}": getattr(torch, name) for name in ("sym_float", "sym_int", "sym_ite")},
}
_NAMES: dict[object, str] = {function: name for name, function in _FUNCTIONS.items()}
# Python's &, | and ^ on tensors are private names of public operators.
_PUBLIC: dict[object, OpOverload] = {
    getattr(getattr(torch.ops.aten, f"__{prefix}{name}__"), overload): getattr(
        getattr(torch.ops.aten, f"bitwise_{name}{'_' if prefix else ''}"), overload
    )
    for name in ("and", "or", "xor")
    for prefix in ("", "i")  # "i": in place
    for overload in ("Tensor", "Scalar")
}
# Constants of torch that appear as arguments, by their type.
_TORCH_CONSTANTS = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_OPERATOR = re.compile(r"aten\.([A-Za-z]\w*|_[A-Za-z]\w*)\.(\w+)")


def operator_name(target: object) -> str:
    """Return the name of a node's function; raise TypeError if programs do not allow it."""
    target = _PUBLIC.get(target, target)
    if isinstance(target, OpOverload):
        name: str = str(target)
        if name == SPARSE_LAYER or _find(name) is target:
            return name
    if target not in _NAMES:
        raise TypeError(f"the operator {target} cannot be stored in a program")
    return _NAMES[target]


def find_operator(name: str) -> Callable[..., Any]:
    """Return the function of a name; raise ValueError if programs do not allow it."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    found = _find(name)
    if found is None:
        raise ValueError(f"a program must not call {name[:100]!r}")
    return checked(found)


def _find(name: str) -> OpOverload | None:
    match = _OPERATOR.fullmatch(name)
    packet = getattr(torch.ops.aten, match[1], None) if match else None
    found = getattr(packet, match[2], None) if match else None
    return found if isinstance(found, OpOverload) and is_allowed(found) else None


def encode(value: object, numbers: Mapping[fx.Node, int]) -> Any:
    """Return an argument as plain data; `numbers` are the values' numbers in the graph."""
    if isinstance(value, fx.Node):
        return {"n": numbers[value]}
    if isinstance(value, list | tuple):
        return [encode(one, numbers) for one in value]
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for key, kind in _TORCH_CONSTANTS.items():
        if isinstance(value, kind):
            return {key: str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"an argument of type {type(value).__name__} cannot be stored in a program")


def decode(data: Any, values: list[fx.Node]) -> Any:
    """Return the argument that :func:`encode` returned as plain data."""
    match data:
        case {"n": int(number)} if 0 <= number < len(values):
            return values[number]
        case {"device": str(name)}:
            return torch.device(name)
        case {"float": str(text)}:
            return float(text)
        case dict() if len(data) == 1:
            ((key, name),) = data.items()
            found = getattr(torch, name, None) if isinstance(name, str) else None
            if key in _TORCH_CONSTANTS and isinstance(found, _TORCH_CONSTANTS[key]):
                return found
        case list():
            return [decode(one, values) for one in data]
        case None | bool() | int() | float() | str():
            return data
    raise ValueError(f"a program has an invalid argument: {str(data)[:100]}")
