"""Searches: one of Optuna's samplers chooses each run by the results of those before it."""

from __future__ import annotations

import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import Trial

from pdecay.lab import methods
from pdecay.lab.data.streams import derive
from pdecay.lab.sweep.plan import (
    SHARED,
    Ask,
    Axes,
    Plan,
    PlanError,
    axes_of,
    check_axes,
)
from pdecay.lab.train.training import Settings


@dataclass(frozen=True)
class Range:
    """All numbers between two ends; evenly by their logarithm where these are 10 times apart."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise PlanError(f"a range goes from a number up to a greater one, got {self}")

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"

    @property
    def log(self) -> bool:
        """Whether the logarithm is what is even."""
        return self.low > 0 and self.high >= 10 * self.low


def _tpe(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        # What others are at counts as bad, so that the workers do not all go to one place.
        return TPESampler(seed=seed, constant_liar=True)


SAMPLERS: Mapping[str, Callable[[int], BaseSampler]] = {
    "tpe": _tpe,
    "nsga2": lambda seed: NSGAIISampler(seed=seed),
    "random": lambda seed: RandomSampler(seed=seed),
}


@dataclass(frozen=True, kw_only=True)
class Search(Plan):
    """A number of runs, each chosen by a sampler when a worker is free for it.

    Args:
        axes: of each name, what to choose from: several values, or one :class:`Range`.
        sampler: one of `SAMPLERS`.
        trials: how many runs. A search may be resumed with more.
        sampler_seed: decides what the sampler draws, given what it knows.
    """

    axes: Axes
    sampler: str
    trials: int
    sampler_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampler not in SAMPLERS:
            raise PlanError(
                f"there is no sampler {self.sampler!r}; there are {', '.join(SAMPLERS)}"
            )
        if self.trials < 1:
            raise PlanError(f"trials must be at least 1, got {self.trials}")
        check_axes(self.axes)
        for name, values in self.axes.items():
            if len(values) > 1 and any(isinstance(value, Range) for value in values):
                raise PlanError(f"{name} takes one range or several values, not both")
        for method in self.axes["method"]:
            self._check(method)

    @property
    def keys(self) -> Sequence[str]:
        return [f"run {number}" for number in range(1, self.trials + 1)]

    @property
    def identity(self) -> dict[str, Any]:
        return self.description

    @property
    def description(self) -> dict[str, Any]:
        return {
            "kind": "search",
            "task": self.task,
            "scale": self.scale,
            "objective": self.objective,
            "sampler": self.sampler,
            "sampler_seed": self.sampler_seed,
            "axes": {
                name: [str(value) if isinstance(value, Range) else value for value in values]
                for name, values in self.axes.items()
            },
        }

    def parameters(self, key: str) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        return {}, {}  # the sampler's to decide

    def settings(self, key: str, ask: Ask) -> Settings:
        # A sampler for each cell: what a random search draws does not depend on who draws it.
        seed = derive(self.sampler_seed, int(key.split()[1])) % 2**32
        trial = ask(SAMPLERS[self.sampler](seed))
        method = _choose(trial, "method", self.axes["method"])
        several = len(self.axes["method"]) > 1
        chosen = {}
        for name, values in axes_of(method, self.axes).items():
            # One method's lam has nothing to do with another's.
            place = f"{method} {name}" if several and name not in SHARED else name
            chosen[name] = _choose(trial, place, values, whole=_is_whole(method, name))
        return self._make(method, chosen)

    def name(self, key: str) -> str:
        return key

    def _make(self, method: str, chosen: Mapping[str, Any]) -> Settings:
        try:
            return Settings.of(self.task, method, scale=self.scale, **chosen)
        except (TypeError, ValueError) as error:
            raise PlanError(str(error)) from None

    def _check(self, method: str) -> None:
        """That each value and each end of a range is good for the method, before any is run."""
        tried = {
            name: _ends(values[0], _is_whole(method, name))
            if isinstance(values[0], Range)
            else list(values)
            for name, values in axes_of(method, self.axes).items()
        }
        first = {name: values[0] for name, values in tried.items()}
        for name, values in tried.items():
            for value in values:
                self._make(method, {**first, name: value})


def _choose(trial: Trial, name: str, values: Sequence[Any], *, whole: bool = False) -> Any:
    first = values[0]
    if not isinstance(first, Range):
        return first if len(values) == 1 else trial.suggest_categorical(name, list(values))
    if whole:
        low, high = _ends(first, whole)
        return trial.suggest_int(name, low, high, log=first.log)
    return trial.suggest_float(name, first.low, first.high, log=first.log)


def _ends(limits: Range, whole: bool) -> list[Any]:
    ends = [limits.low, limits.high]
    return [int(end) if whole and float(end).is_integer() else end for end in ends]


def _is_whole(method: str, name: str) -> bool:
    if name in SHARED:
        return name in ("seed", "steps")
    return typing.get_type_hints(methods.find(method))[name] is int
