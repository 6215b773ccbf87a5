"""Grids: every combination of the values of each setting."""

from __future__ import annotations

import functools
import itertools
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from pdecay.lab.sweep.plan import (
    Axes,
    Plan,
    Sample,
    SweepError,
    axes_of,
    check_axes,
    describe_axes,
    label,
)
from pdecay.lab.train.records import run_id
from pdecay.lab.train.training import Settings


@dataclass(frozen=True, kw_only=True)
class Grid(Plan):
    """The cells of one or more grids, without duplicates.

    A method takes only the options that it has: AdamW is not repeated for each p.

    Args:
        grids: for each grid, the values of ``method``, ``lr``, ``seed``, ``steps`` and the
            methods' options. Missing names take the defaults of the task and the method.

    Example:
        >>> axes = {"method": ["adamw", "padam"], "p": [0.5, 0.8], "seed": [0, 1]}
        >>> cells = Grid(task="digits", scale="quick", grids=[axes]).cells.values()
        >>> [(cell.method, cell.options.get("p"), cell.seed) for cell in cells]
        [('adamw', None, 0), ('adamw', None, 1), ('padam', 0.5, 0), ('padam', 0.5, 1),
         ('padam', 0.8, 0), ('padam', 0.8, 1)]
    """

    grids: Sequence[Axes]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cells:
            raise SweepError("there is no grid to run")

    @functools.cached_property
    def cells(self) -> dict[str, Settings]:
        """The settings of all cells by run id."""
        return {settings.id: settings for axes in self.grids for settings in self._expand(axes)}

    @property
    def keys(self) -> Sequence[str]:
        return list(self.cells)

    @property
    def identity(self) -> str:
        return run_id({"objective": self.objective, "cells": sorted(self.cells)})

    @property
    def description(self) -> dict[str, str]:
        about = {"task": self.task, "scale": self.scale, "objective": self.objective}
        for number, axes in enumerate(self.grids, start=1):
            about |= describe_axes(axes, f"grid {number}'s " if len(self.grids) > 1 else "")
        return about

    def settings(self, key: str, sample: Sample) -> Settings:
        return self.cells[key]

    def label(self, key: str) -> str:
        return label(self.cells[key].to_dict())

    def is_result_of(self, key: str, record: Any) -> bool:
        return super().is_result_of(key, record) and record["id"] == key

    def params(self, key: str) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """Return the settings that vary over the grid, which Optuna's plots show."""
        params = {
            name: value
            for name, value in _flat(self.cells[key]).items()
            if name in self._distributions
        }
        return params, {name: self._distributions[name] for name in params}

    def _expand(self, axes: Axes) -> Iterator[Settings]:
        check_axes(axes)
        for method in axes["method"]:
            own = axes_of(method, axes)
            for values in itertools.product(*own.values()):
                yield self.make_settings(method, dict(zip(own, values, strict=True)))

    @functools.cached_property
    def _distributions(self) -> dict[str, BaseDistribution]:
        seen: dict[str, set[Any]] = {}
        for settings in self.cells.values():
            for name, value in _flat(settings).items():
                seen.setdefault(name, set()).add(value)
        return {name: _distribution(values) for name, values in seen.items() if len(values) > 1}


def _flat(settings: Settings) -> dict[str, Any]:
    shared = {name: getattr(settings, name) for name in ("method", "lr", "seed", "steps")}
    return {**shared, **settings.options}


def _distribution(values: Collection[Any]) -> BaseDistribution:
    if all(type(value) in (int, float) for value in values):
        low, high = min(values), max(values)
        return FloatDistribution(low, high, log=low > 0 and high >= 10 * low)
    return CategoricalDistribution(sorted(values, key=lambda value: (str(type(value)), value)))


def read_grids(path: Path) -> list[dict[str, list[Any]]]:
    """Read grids from a TOML file; values above the first grid apply to all grids.

    .. code-block:: toml

        seed = [0, 1]

        [[grid]]
        method = "adamw"
        lr = [3e-3, 1e-2]

        [[grid]]
        method = "padam"
        lam = [0.01, 0.03]

    Raises:
        SweepError: the file cannot be read, or is not such a file.
    """
    if path.exists() and not path.is_file():  # a device may have no end
        raise SweepError(f"{path} is not a regular file")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SweepError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SweepError(f"{path} is not TOML: {error}") from None
    grids = content.pop("grid", None)
    if not isinstance(grids, list) or not all(isinstance(grid, Mapping) for grid in grids):
        raise SweepError(f"{path} has no grids: start each grid with a line [[grid]]")
    return [
        {name: _values(path, name, value) for name, value in {**content, **grid}.items()}
        for grid in grids
    ]


def _values(path: Path, name: str, value: object) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | bool | int | float) for one in values):
        raise SweepError(
            f"{path}: {name} must be a number, a string or a list of them, got {value!r}"
        )
    return values
