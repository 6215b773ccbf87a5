"""Conditions on the free sizes of a program.

The code of a model may branch on a size, such as ``if length % 3 == 0``. torch.export records the
branch of the example, and the condition under which the code takes it. As plain data, a condition
is a list of an operation and its operands: ``["!=", ["%", "n0", 3], 0]``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Mapping
from typing import Any

Condition = list[Any]

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "//": operator.floordiv,
    "%": operator.mod,
    "+": lambda *values: sum(values),
    "*": lambda *values: math.prod(values),
    "max": max,
    "min": min,
    "and": lambda *values: all(values),
    "or": lambda *values: any(values),
    "not": operator.not_,
}
# Names of the classes of sympy and torch.
_OPERATIONS = {
    "Equality": "==",
    "Unequality": "!=",
    "StrictLessThan": "<",
    "LessThan": "<=",
    "StrictGreaterThan": ">",
    "GreaterThan": ">=",
    "FloorDiv": "//",
    "Mod": "%",
    "PythonMod": "%",
    "Add": "+",
    "Mul": "*",
    "Max": "max",
    "Min": "min",
    "And": "and",
    "Or": "or",
    "Not": "not",
}
_MAX_POWER = 8


def encode(expression: Any, names: Mapping[Any, str]) -> Any:
    """Return an expression of sympy as plain data; raise TypeError if that is not possible."""
    if expression.is_Symbol and expression in names:
        return names[expression]
    if expression.is_Integer:
        return int(expression)
    kind, operands = type(expression).__name__, expression.args
    if kind in ("Pow", "PowByNatural") and operands[1].is_Integer:
        base, power = operands[0], int(operands[1])
        if 0 < power <= _MAX_POWER:
            return ["*", *[encode(base, names)] * power]
    if kind not in _OPERATIONS:
        raise TypeError(f"its code has a condition on sizes that cannot be stored: {expression}")
    return [_OPERATIONS[kind], *(encode(one, names) for one in operands)]


def is_condition(data: Any, names: Container[str]) -> bool:
    """Return whether plain data from a file is a condition or a part of one."""
    match data:
        case [str(operation), *operands]:
            return operation in _FUNCTIONS and all(is_condition(one, names) for one in operands)
        case str():
            return data in names
    return type(data) is int


def holds(condition: Condition, sizes: Mapping[str, int]) -> bool:
    """Return whether sizes satisfy a condition."""
    try:
        return bool(_value(condition, sizes))
    except (ArithmeticError, TypeError, ValueError):  # division by zero, or a damaged file
        return False


def text(condition: Any) -> str:
    """Return a condition as text.

    Example:
        >>> text(["!=", ["%", "n0", 3], 0])
        '(n0 % 3) != 0'
    """
    if not isinstance(condition, list):
        return str(condition)
    operation, *operands = condition
    parts = [f"({text(one)})" if isinstance(one, list) else text(one) for one in operands]
    if operation in ("max", "min", "not"):
        return f"{operation}({', '.join(parts)})"
    return f" {operation} ".join(parts)


def _value(part: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(part, list):
        return _FUNCTIONS[part[0]](*(_value(one, sizes) for one in part[1:]))
    return sizes[part] if isinstance(part, str) else part
