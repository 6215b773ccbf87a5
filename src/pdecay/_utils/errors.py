"""The base class of errors that users can correct, and error messages in one line."""

from __future__ import annotations

import traceback


class UserError(Exception):
    """An error that the user can correct; the command line prints its message."""


def one_line(error: object) -> str:
    """Return an error's message with all white space collapsed to single spaces.

    Example:
        >>> one_line(ValueError("first line\\n  second line"))
        'first line second line'
    """
    return " ".join(str(error).split())


def root_cause(error: BaseException) -> str:
    """Return the first line of the innermost cause, such as a database driver's message."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def with_location(error: BaseException) -> str:
    """Return an error's type and message in one line, with the file and line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if frame.filename.startswith("<") else f" ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {one_line(error)}{place}"
