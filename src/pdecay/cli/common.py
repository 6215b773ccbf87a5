"""Code that the commands share: errors, argument types and checks."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdecay._utils.errors import UserError, with_location
from pdecay._utils.files import check_owner
from pdecay._utils.imports import import_object


class UsageError(UserError):
    """Invalid arguments of a command."""


def number(
    kind: type, least: float, noun: str = "", limit: float = math.inf
) -> Callable[[str], Any]:
    """Return an argparse type for a finite number with a lower bound.

    Args:
        kind: int or float.
        least: the lower bound.
        noun: the name of the number in error messages.
        limit: the number must be less than this.
    """
    noun = noun or ("whole number" if kind is int else "number")

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < limit:
            bound = f"< {limit}" if value >= limit < math.inf else f">= {least}"
            raise argparse.ArgumentTypeError(f"must be a {noun} {bound}, got {text!r}")
        return value

    return parse


natural_number = number(int, 0)
count = number(int, 1, limit=2**31)  # torch's limit of threads
seconds = number(float, 0, "number of seconds")


_METAVARS = {str: "NAME", Path: "FILE", int: "N", natural_number: "N", count: "N"}
_METAVARS |= {seconds: "SECONDS"}


def flag(name: str) -> str:
    """Return the command-line option of a Python name.

    Example:
        >>> flag("weight_decay")
        '--weight-decay'
    """
    return f"--{name.replace('_', '-')}"


def add(
    parser: Any,
    name: str,
    text: str,
    kind: Callable[[str], Any] = str,
    default: Any = None,
    **options: Any,
) -> None:
    """Add an argument; its type decides its placeholder in the help.

    Args:
        parser: the parser or a group of it.
        name: the argument, such as ``--seed``.
        text: the help; the default is appended.
        kind: converts and checks the text; bool for a switch without a value.
        default: the default value.
        options: more options of ``add_argument``.
    """
    if kind is bool:
        parser.add_argument(name, action="store_true", help=text)
        return
    options.setdefault("metavar", _METAVARS.get(kind, "X"))
    if default is not None:
        text += f" (default: {default})"
    parser.add_argument(name, type=kind, default=default, help=text, **options)


def option(text: str) -> tuple[str, Any]:
    """Split NAME=VALUE; the value is JSON or a plain string."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UsageError(f"--option must be NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def check_writable(directory: Path) -> None:
    """Create a folder and check, before any work, that files can be written to it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        check_owner(directory)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(f"cannot write to {str(directory)!r}: {error.strerror}") from None


def call(target: str) -> Any:
    """Import ``module:function`` and call it; report errors of the user's code in one line."""
    if not all(target.partition(":")):
        raise UsageError(
            f"expected MODULE:FUNCTION, such as my_project.training:build, got {target!r}"
        )
    try:
        found = import_object(target)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not callable(found):
        raise UsageError(f"{target} must be a function, got {kind(found)}")
    try:
        return found()
    except Exception as error:
        raise UsageError(f"{target} failed: {with_location(error)}") from None


def kind(value: object) -> str:
    """Return the name of a value's type, for an error message."""
    return type(value).__name__
