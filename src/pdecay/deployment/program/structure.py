"""Nested inputs and outputs as flat lists of tensors.

A structure is plain data: ``{"tensor": 0}`` is the first tensor of the list, ``{"dict": ...}``,
``{"list": ...}`` and ``{"tuple": ...}`` are containers, and ``{"value": ...}`` is a constant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

Structure = dict[str, Any]
_CONSTANTS = (bool, int, float, str)


def describe(value: object, tensors: list[Tensor], where: str) -> Structure:
    """Return the structure of a value, and append its tensors to a list.

    Args:
        value: tensors and constants in dicts, lists, tuples and dataclasses. Dataclasses and
            subclasses of dict become dicts.
        tensors: the list to extend.
        where: the place of the value, for error messages.

    Raises:
        TypeError: if the value contains another object.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            "dict": {key: describe(one, tensors, f"{where}[{key!r}]") for key, one in value.items()}
        }
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [describe(one, tensors, f"{where}[{i}]") for i, one in enumerate(value)]}
    if value is None or type(value) in _CONSTANTS:
        return {"value": value}
    raise TypeError(
        f"{where} is a {type(value).__name__}: a program has only tensors, numbers and strings in "
        "dicts, lists and tuples (for transformers: use_cache=False)"
    )


def check_structure(structure: object, count: int, *, exact: bool = False) -> None:
    """Raise ValueError unless plain data from a file are a structure.

    Args:
        structure: the data.
        count: the length of the list of tensors.
        exact: whether each tensor of the list must appear, and only once.
    """
    indices = list(_indices(structure))
    if any(type(index) is not int or not 0 <= index < count for index in indices) or (
        exact and sorted(indices) != list(range(count))
    ):
        raise ValueError(f"the program is damaged: it has {count} tensors, but uses {indices[:20]}")


def _indices(structure: object) -> Iterator[Any]:
    """Yield the indices of the tensors of a structure from a file."""
    match structure:
        case {"tensor": index}:
            yield index
        case {"dict": dict(parts)}:
            for one in parts.values():
                yield from _indices(one)
        case {"list": list(parts)} | {"tuple": list(parts)}:
            for one in parts:
                yield from _indices(one)
        case {"value": None | bool() | int() | float() | str()}:
            pass
        case _:
            raise ValueError(f"the program is damaged: structure {str(structure)[:100]}")


def assemble(structure: Structure, tensors: Sequence[Tensor]) -> Any:
    """Return the value of a structure."""
    match structure:
        case {"tensor": index}:
            return tensors[index]
        case {"dict": parts}:
            return {key: assemble(one, tensors) for key, one in parts.items()}
        case {"list": parts}:
            return [assemble(one, tensors) for one in parts]
        case {"tuple": parts}:
            return tuple(assemble(one, tensors) for one in parts)
        case _:
            return structure["value"]


def flatten(structure: Structure, value: object, tensors: dict[int, Tensor], where: str) -> None:
    """Collect the tensors of a value that has a structure, by their indices.

    Raises:
        TypeError: if the value has another structure.
    """
    match structure:
        case {"tensor": index} if isinstance(value, Tensor):
            tensors[index] = value
        case {"dict": parts} if isinstance(value, Mapping) and value.keys() == parts.keys():
            for key, one in parts.items():
                flatten(one, value[key], tensors, f"{where}[{key!r}]")
        case {"list": parts} | {"tuple": parts} if isinstance(value, list | tuple) and len(
            value
        ) == len(parts):
            for i, one in enumerate(parts):
                flatten(one, value[i], tensors, f"{where}[{i}]")
        case {"value": constant} if not isinstance(value, Tensor) and value == constant:
            pass
        case _:
            raise TypeError(
                f"{where} must be {_text(structure)}, as in the example of the saved model, "
                f"got {_kind(value)}"
            )


def _text(structure: Structure) -> str:
    match structure:
        case {"tensor": _}:
            return "a tensor"
        case {"dict": parts}:
            return f"a dict with the keys {', '.join(map(repr, parts)) or '(none)'}"
        case {"list": parts} | {"tuple": parts}:
            return f"a sequence of length {len(parts)}"
        case _:
            return repr(structure["value"])


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return f"the keys {', '.join(map(repr, value)) or '(none)'}"
    if isinstance(value, list | tuple):
        return f"length {len(value)}"
    return "a tensor" if isinstance(value, Tensor) else repr(value)
