"""Searches: an Optuna sampler chooses each run from the results of the runs before it."""

from __future__ import annotations

import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import Trial

from pdecay.lab import methods
from pdecay.lab.data.streams import derive
from pdecay.lab.sweep.plan import (
    SHARED,
    Axes,
    Plan,
    Sample,
    SweepError,
    axes_of,
    check_axes,
    describe_axes,
)
from pdecay.lab.train.records import run_id
from pdecay.lab.train.training import Settings


@dataclass(frozen=True)
class Range:
    """The numbers between two ends, on a logarithmic scale if the ends are a factor 10 apart."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise SweepError(f"a range must be LOW:HIGH with LOW < HIGH, got {self}")

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"

    @property
    def log(self) -> bool:
        """Whether the scale is logarithmic."""
        return self.low > 0 and self.high >= 10 * self.low

    def ends(self, *, whole: bool) -> list[Any]:
        """Return both ends, as integers where `whole` is set and they are integers."""
        ends = [self.low, self.high]
        return [int(end) if whole and float(end).is_integer() else end for end in ends]


def _tpe(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        # Constant liar: running trials count as bad, so that workers spread out.
        return TPESampler(seed=seed, constant_liar=True)


SAMPLERS: Mapping[str, Callable[[int], BaseSampler]] = {
    "tpe": _tpe,
    "nsga2": lambda seed: NSGAIISampler(seed=seed),
    "random": lambda seed: RandomSampler(seed=seed),
}


@dataclass(frozen=True, kw_only=True)
class Search(Plan):
    """A number of runs, each chosen by a sampler when a worker starts it.

    Args:
        axes: for each name, several values or one :class:`Range`.
        sampler: a name from `SAMPLERS`.
        trials: the number of runs. A search may be resumed with more.
        sampler_seed: the seed of the sampler.
    """

    axes: Axes
    sampler: str
    trials: int
    sampler_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampler not in SAMPLERS:
            raise SweepError(
                f"there is no sampler {self.sampler!r}; choose from {', '.join(SAMPLERS)}"
            )
        if self.trials < 1:
            raise SweepError(f"trials must be at least 1, got {self.trials}")
        check_axes(self.axes)
        for name, values in self.axes.items():
            if len(values) > 1 and any(isinstance(value, Range) for value in values):
                raise SweepError(f"{name} takes one range or several values, not both")
        for method in self.axes["method"]:
            self._check_values(method)

    @property
    def keys(self) -> Sequence[str]:
        return [f"run {number}" for number in range(1, self.trials + 1)]

    @property
    def identity(self) -> str:
        return run_id(self.description)

    @property
    def description(self) -> dict[str, str]:
        names = ("task", "scale", "objective", "sampler", "sampler_seed")
        return {name: str(getattr(self, name)) for name in names} | describe_axes(self.axes)

    def settings(self, key: str, sample: Sample) -> Settings:
        # One sampler per cell: a random search does not depend on the order of the workers.
        seed = derive(self.sampler_seed, int(key.split()[1])) % 2**32
        trial = sample(SAMPLERS[self.sampler](seed))
        method = _suggest(trial, "method", self.axes["method"])
        chosen = {}
        for name, values in axes_of(method, self.axes).items():
            # With several methods, each has its own parameter: their lam are unrelated.
            own = len(self.axes["method"]) > 1 and name not in SHARED
            parameter = f"{method} {name}" if own else name
            chosen[name] = _suggest(trial, parameter, values, whole=_is_whole(method, name))
        return self.make_settings(method, chosen)

    def _check_values(self, method: str) -> None:
        """Check each value and each end of a range with the method, before any run starts."""
        tried = {
            name: values[0].ends(whole=_is_whole(method, name))
            if isinstance(values[0], Range)
            else list(values)
            for name, values in axes_of(method, self.axes).items()
        }
        first = {name: values[0] for name, values in tried.items()}
        for name, values in tried.items():
            for value in values:
                self.make_settings(method, {**first, name: value})


def _suggest(trial: Trial, name: str, values: Sequence[Any], *, whole: bool = False) -> Any:
    first = values[0]
    if not isinstance(first, Range):
        return first if len(values) == 1 else trial.suggest_categorical(name, list(values))
    if whole:
        low, high = first.ends(whole=True)
        return trial.suggest_int(name, low, high, log=first.log)
    return trial.suggest_float(name, first.low, first.high, log=first.log)


def _is_whole(method: str, name: str) -> bool:
    if name in SHARED:
        return name in ("seed", "steps")
    return typing.get_type_hints(methods.find(method))[name] is int
