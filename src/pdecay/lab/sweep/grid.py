"""Grids: every value of each option with every value of the others."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from pdecay.lab.sweep.plan import (
    Ask,
    Axes,
    Plan,
    PlanError,
    axes_of,
    check_axes,
)
from pdecay.lab.sweep.view import label
from pdecay.lab.train.training import Settings


@dataclass(frozen=True, kw_only=True)
class Grid(Plan):
    """The cells of one or more grids, each once.

    A method takes the options that it has: AdamW is not repeated for each p.

    Args:
        grids: of each grid, the values of each name: ``method``, ``lr``, ``seed``, ``steps`` and
            the methods' options. What is not named is as the task and the method have it.

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
            raise PlanError("there is no grid to run")

    @functools.cached_property
    def cells(self) -> dict[str, Settings]:
        """All runs by their ids, in the order in which they are named."""
        cells = (settings for axes in self.grids for settings in self._expand(axes))
        return {settings.id: settings for settings in cells}

    @property
    def keys(self) -> Sequence[str]:
        return list(self.cells)

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "grid", "objective": self.objective, "cells": sorted(self.cells)}

    @property
    def description(self) -> dict[str, Any]:
        return {
            "kind": "grid",
            "task": self.task,
            "scale": self.scale,
            "objective": self.objective,
            "grids": [{name: list(values) for name, values in axes.items()} for axes in self.grids],
        }

    def parameters(self, key: str) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """All that varies over the cells, so that Optuna's own plots of the study say something."""
        params = {
            name: value
            for name, value in _parameters(self.cells[key]).items()
            if name in self._distributions
        }
        return params, {name: self._distributions[name] for name in params}

    def settings(self, key: str, ask: Ask) -> Settings:
        return self.cells[key]

    def name(self, key: str) -> str:
        return label(self.cells[key].to_dict())

    def _expand(self, axes: Axes) -> Iterator[Settings]:
        check_axes(axes)
        for method in axes["method"]:
            own = axes_of(method, axes)
            for values in itertools.product(*own.values()):
                chosen = dict(zip(own, values, strict=True))
                try:
                    yield Settings.of(self.task, method, scale=self.scale, **chosen)
                except (TypeError, ValueError) as error:
                    raise PlanError(str(error)) from None

    @functools.cached_property
    def _distributions(self) -> dict[str, BaseDistribution]:
        seen: dict[str, set[Any]] = {}
        for settings in self.cells.values():
            for name, value in _parameters(settings).items():
                seen.setdefault(name, set()).add(value)
        return {name: _distribution(values) for name, values in seen.items() if len(values) > 1}


def _parameters(settings: Settings) -> dict[str, Any]:
    plain = settings.to_dict()
    return {
        "method": plain["method"],
        "lr": plain["lr"],
        "seed": plain["seed"],
        "steps": plain["steps"],
        **plain["options"],
    }


def _distribution(values: Iterable[Any]) -> BaseDistribution:
    kinds = {type(value) for value in values}
    if kinds == {float}:
        low, high = min(values), max(values)
        return FloatDistribution(low, high, log=low > 0 and high >= 10 * low)
    if kinds == {int}:
        return IntDistribution(min(values), max(values))
    return CategoricalDistribution(sorted(values, key=lambda value: (str(type(value)), value)))
