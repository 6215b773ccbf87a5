"""A file of grids, for a sweep that one command line cannot say.

seed = [0, 1]                   # for all grids

[[grid]]
method = "adamw"
lr = [3e-3, 1e-2]

[[grid]]
method = "padam"
p = 0.8
lam = [0.01, 0.03]
lr = [3e-3, 1e-2]
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdecay.lab.sweep.plan import PlanError


def read_cells(path: Path) -> list[dict[str, list[Any]]]:
    """The grids of a TOML file: what stands above them holds for each that does not say otherwise.

    Raises:
        PlanError: the file cannot be read, or has something else in it.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is not TOML: {error}") from None
    grids = content.pop("grid", None)
    if not isinstance(grids, list) or not all(isinstance(grid, Mapping) for grid in grids):
        raise PlanError(f"{path} has no grids: write each under a line [[grid]]")
    return [
        {name: _values(path, name, value) for name, value in {**content, **grid}.items()}
        for grid in grids
    ]


def _values(path: Path, name: str, value: object) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | bool | int | float) for one in values):
        raise PlanError(f"{path}: {name} must be a number, a word or a list of them, got {value!r}")
    return values
