"""The sizes and dtypes of the inputs that a program takes.

A program is recorded for the sizes of its example, and its numbers may depend on them. Other sizes
must therefore be refused, except along axes that torch.export found to be free. The sizes of an
input are a list of integers for fixed sizes and of names for free ones. Axes with the same name
have the same size. Each name has a range, and there may be further conditions.

The code may also branch on a dtype: a mask of bools hides where it is True, a mask of floats is
added. Inputs must therefore have the example's kind of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from pdecay.deployment.model.program import input_dtypes, input_shapes, size_conditions
from pdecay.deployment.program import conditions

Sizes = dict[str, Any]
ASSUMED = 2  # torch.export assumes free sizes of at least 2, although 0 and 1 often work as well


def sizes_of(program: ExportedProgram) -> Sizes:
    """Return the sizes of a program's inputs; raise TypeError if they cannot be described.

    Sizes of 0 and 1 are included, but the code may take another branch for them, which is not
    among the conditions.
    """
    names: dict[Any, str] = {}
    shapes = [[_size(size, names) for size in shape] for shape in input_shapes(program)]
    ranges = {}
    for symbol, name in names.items():
        limits = program.range_constraints[symbol]
        low, high = int(limits.lower), limits.upper
        is_bound = high.is_Integer and int(high) < torch.iinfo(torch.int64).max
        ranges[name] = [low if low > ASSUMED else 0, int(high) if is_bound else None]
    found = [conditions.encode(one, names) for one in size_conditions(program)]
    dtypes = [str(dtype).removeprefix("torch.") for dtype in input_dtypes(program)]
    return {"shapes": shapes, "ranges": ranges, "conditions": found, "dtypes": dtypes}


def takes_any_size(program: ExportedProgram) -> bool:
    """Return whether the free sizes of a program are not restricted in any way."""
    try:
        sizes = sizes_of(program)
    except TypeError:
        return False
    ranges = sizes["ranges"].values()
    return not sizes["conditions"] and all(limits == [0, None] for limits in ranges)


def check_form(sizes: Any) -> None:
    """Raise ValueError unless plain data from a file are sizes."""
    match sizes:
        case {"shapes": list(shapes), "ranges": dict(ranges)}:
            flat = [size for shape in shapes for size in shape if size not in ranges]
            limits = [pair for pair in ranges.values() if not _is_range(pair)]
            more = sizes.get("conditions", [])  # files of older versions have none
            fits = isinstance(more, list) and all(
                conditions.is_condition(one, ranges) for one in more
            )
            dtypes = sizes.get("dtypes")  # older files have none of these, either
            known = dtypes is None or (
                isinstance(dtypes, list)
                and len(dtypes) == len(shapes)
                and all(isinstance(_dtype(one), torch.dtype) for one in dtypes)
            )
            if known and fits and not limits and all(type(size) is int for size in flat):
                return
    raise ValueError(f"the program is damaged: sizes {str(sizes)[:100]}")


def check_sizes(sizes: Sizes, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError unless a program takes these inputs."""
    for number, (tensor, name) in enumerate(zip(tensors, sizes.get("dtypes", ()), strict=False)):
        if _kind(tensor.dtype) != _kind(_dtype(name)):
            raise ValueError(
                f"the program takes a tensor of dtype {name} as tensor {number}, got "
                f"{str(tensor.dtype).removeprefix('torch.')}: convert it, or save the model with "
                "such an example"
            )
    found: dict[str, int] = {}
    for number, (tensor, expected) in enumerate(zip(tensors, sizes["shapes"], strict=True)):
        given = tensor.shape
        fits = len(given) == len(expected)
        for size, wanted in zip(given, expected, strict=False):
            if isinstance(wanted, int):
                fits = fits and size == wanted
            else:
                low, high = sizes["ranges"][wanted]
                in_range = low <= size and (high is None or size <= high)
                fits = fits and in_range and found.setdefault(wanted, size) == size
        if not fits:
            free = dict.fromkeys(name for name in expected if isinstance(name, str))
            limits = "".join(f", {name} {_text(*sizes['ranges'][name])}" for name in free)
            raise ValueError(
                f"the program takes tensors of shape [{', '.join(map(str, expected))}]{limits}, "
                f"got {list(given)} as tensor {number}: save the model with an example of the "
                "size that you need"
            )
    for condition in sizes.get("conditions", []):
        if not conditions.holds(condition, found):
            shapes = ", ".join(f"[{', '.join(map(str, shape))}]" for shape in sizes["shapes"])
            raise ValueError(
                f"the program takes tensors of shape {shapes} with {conditions.text(condition)}, "
                f"got {', '.join(f'{name} = {size}' for name, size in found.items())}: save the "
                "model with an example of the size that you need"
            )


def _size(size: int | torch.SymInt, names: dict[Any, str]) -> int | str:
    """Return a size as plain data. `names` are the names of the free sizes so far."""
    if isinstance(size, int):
        return size
    symbol = size.node.expr
    if not symbol.is_Symbol:
        raise TypeError(f"a size of an input depends on another: {size}")
    return names.setdefault(symbol, f"n{len(names)}")


def _dtype(name: Any) -> Any:
    return getattr(torch, name, None) if isinstance(name, str) else None


def _kind(dtype: torch.dtype) -> str:
    """Return the kind of numbers. Code seldom branches on the precision of floats and integers."""
    if dtype.is_floating_point or dtype.is_complex:
        return "float" if dtype.is_floating_point else "complex"
    return str(dtype) if dtype in (torch.bool, torch.uint8) else "integer"


def _is_range(pair: Any) -> bool:
    match pair:
        case [int(), int() | None]:
            return True
    return False


def _text(low: int, high: int | None) -> str:
    return f"at least {low}" if high is None else f"from {low} to {high}"
