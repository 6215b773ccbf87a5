"""Objects of the user's modules, by name, and what new processes import."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pdecay._utils.errors import with_location


def import_object(target: str) -> Any:
    """Return the object ``module:name``; modules in the current folder can be imported too.

    Raises:
        ValueError: the module cannot be imported, or has no such object.
    """
    module_name, _, object_name = target.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        raise ValueError(
            f"cannot import {module_name!r}: give the module's name, such as my_project.training, "
            "not its path"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `python -m` does so, an installed script does not
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"cannot import {module_name!r}: {with_location(error)}") from error
    for name in object_name.split("."):
        if not hasattr(found, name):
            raise ValueError(f"{module_name!r} has no {object_name!r}")
        found = getattr(found, name)
    return found


@contextmanager
def safe_path() -> Iterator[None]:
    """Let Python processes that start meanwhile import from the current folder only if this does.

    Those that libraries start by ``python -c`` or ``python -m`` do so in any case. In a shared
    folder such as /tmp, another user may have put a `multiprocessing.py`.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    if before is None and not _searches_current_folder():
        os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONSAFEPATH", None)


def _searches_current_folder() -> bool:
    try:
        return not {"", os.getcwd()}.isdisjoint(sys.path)
    except FileNotFoundError:
        return False  # it was deleted
