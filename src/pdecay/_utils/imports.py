"""Objects of the user's modules, by name."""

from __future__ import annotations

import importlib
import os
import sys
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
