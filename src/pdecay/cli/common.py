"""What the commands share: what a command is, and the checks of their arguments."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """Something that the user can put right, told in one line."""


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Args:
        name, summary, example: for the help.
        arguments: declares the arguments on the command's parser.
        run: does the work, from the parsed arguments; returns the exit code.
    """

    name: str
    summary: str
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def natural_number(text: str) -> int:
    """For argparse: a whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, got {text!r}")
    return int(text)


def option(text: str) -> tuple[str, Any]:
    """The name and the value of NAME=VALUE, where the value is JSON or a plain word."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UsageError(f"--option must be NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def check_writable(directory: Path) -> None:
    """Before the work, not after it: that the results can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(f"cannot write to {str(directory)!r}: {error.strerror}") from None


def call(target: str) -> Any:
    """Import ``module:function`` and call it; the user's own errors are told in one line."""
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"expected MODULE:FUNCTION, such as my_project.training:build: {target!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; an installed script does not
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(f"cannot import {module_name!r}: {_told(error)}") from None
    for name in function_name.split("."):
        if not hasattr(found, name):
            raise UsageError(f"{module_name!r} has no {function_name!r}")
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(f"{target} must be a function, got {kind(found)}")
    try:
        return found()
    except Exception as error:
        raise UsageError(f"{target} failed: {_told(error)}") from None


def _told(error: Exception) -> str:
    """An error of someone else's code in one line, with the place that raised it."""
    message = " ".join(str(error).split())
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if frame.filename.startswith("<") else f" ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {message}{place}"


def kind(value: object) -> str:
    """A value's type, for an error message."""
    return f"a {type(value).__name__}"
