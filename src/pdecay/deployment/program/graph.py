"""The JSON form of a graph of torch operators.

A graph is a list of calls ``[operator, arguments, keyword arguments]``. ``{"n": 3}`` in an argument
is the fourth value: values are the graph's inputs, then the results of its calls. Operators are
those of ATen, the operator of sparse layers, and a few functions of numbers. A file can name no
other function, so that a graph from an untrusted file runs no Python code.
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
# Constants of torch that appear as arguments, by their type.
_TORCH_CONSTANTS = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_OPERATOR = re.compile(r"aten\.([A-Za-z]\w*|_[A-Za-z]\w*)\.(\w+)")
# Operators that trust their arguments: with wrong ones, they crash or access foreign memory. No
# model in eval mode calls them.
_UNCHECKED = re.compile(r"backward|sparse|nested|mkldnn|cudnn|miopen|fbgemm|quantized|resize|^set_")
# Private operators check less than public ones. These are the ones that torch.export records.
_PRIVATE = frozenset(
    (
        *("_to_copy", "_assert_scalar", "_assert_tensor_metadata", "_assert_async", "_conj"),
        *("_neg_view", "_unsafe_view", "_unsafe_index", "_local_scalar_dense", "_weight_norm"),
        *("_softmax", "_log_softmax", "_safe_softmax", "_shape_as_tensor", "_trilinear"),
        *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_cdist_forward", "_embedding_bag"),
        *("_pack_padded_sequence", "_pad_packed_sequence", "_native_multi_head_attention"),
        *("_transformer_encoder_layer_fwd", "_euclidean_dist", "_is_all_true", "_is_any_true"),
    )
)


def operator_name(target: object) -> str:
    """Return the name of a node's function; raise TypeError if programs do not allow it."""
    if isinstance(target, OpOverload):
        name: str = str(target)
        if name == SPARSE_LAYER or _find(name) is target:
            return name
    if target not in _NAMES:
        raise TypeError(f"the operator {target} cannot be stored in a program")
    return _NAMES[target]


def find_operator(name: str) -> Callable[..., Any]:
    """Return the function of a name; raise ValueError if programs do not allow it."""
    found = _FUNCTIONS.get(name) or _find(name)
    if found is None:
        raise ValueError(f"a program must not call {name[:100]!r}")
    return found


def _find(name: str) -> OpOverload | None:
    match = _OPERATOR.fullmatch(name)
    packet = getattr(torch.ops.aten, match[1], None) if match else None
    found = getattr(packet, match[2], None) if match else None
    if not isinstance(found, OpOverload):
        return None
    name = found.overloadpacket.__name__
    if _UNCHECKED.search(name) or (name.startswith("_") and name not in _PRIVATE):
        return None
    # Operators such as from_file access files.
    arguments = found._schema.arguments
    return None if any(one.name == "filename" or one.is_out for one in arguments) else found


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
