"""Checks of arguments. Each raises an error that names it."""

from __future__ import annotations

import math
import numbers


def check_number(name: str, value: object) -> float:
    """Return the value as a float.

    Raises:
        TypeError: if it is not a real number.
        ValueError: if it is negative or not finite.
    """
    if type(value) is float and 0.0 <= value < math.inf:  # the usual case, without the slow checks
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an int or a fraction above the largest float
        number = math.inf
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be finite and >= 0, got {value!r}")
    return number


def check_share(name: str, value: object) -> float:
    """Return the value if it is at least 0 and below 1.

    Raises:
        TypeError: if it is not a real number.
        ValueError: if it is outside the range.
    """
    share = check_number(name, value)
    if share >= 1:
        raise ValueError(f"{name} must be below 1, got {value!r}{percent_hint(share)}")
    return share


def percent_hint(share: float) -> str:
    """Return the end of an error message about a share that looks like a percentage."""
    return f"; for {share:g} %, pass {share / 100:g}" if 1 < share < 100 else ""


def check_count(name: str, value: object, least: int = 1) -> int:
    """Return the value as an int.

    Raises:
        TypeError: if it is not an integer, of Python or of NumPy.
        ValueError: if it is below `least`.
    """
    message = f"{name} must be a whole number >= {least}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(message)
    if value < least:
        raise ValueError(message)
    return int(value)


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    """Raise a TypeError unless the value is True or False, or None if it is optional."""
    if not (isinstance(value, bool) or (optional and value is None)):
        expected = "True, False or None" if optional else "True or False"
        raise TypeError(f"{name} must be {expected}, got {value!r}")
