"""What a sweep runs: cells that are known beforehand (a grid) or asked of a sampler (a search)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import Trial

from pdecay.lab import methods
from pdecay.lab.train.records import Record
from pdecay.lab.train.training import Settings

# What a study maximises, in the names of a record's results.
OBJECTIVES = {
    "pareto": ("accuracy", "sparsity"),
    "tradeoff": ("tradeoff",),
    "accuracy": ("accuracy",),
}
SHARED = ("method", "lr", "seed", "steps")  # what every run has; all else are methods' options

Axes = Mapping[str, Sequence[Any]]
Ask = Callable[[BaseSampler], Trial]


class PlanError(ValueError):
    """A plan that cannot be run; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """What to run, and what to look for.

    Args:
        task, scale: what is trained.
        objective: one of `OBJECTIVES`.
    """

    task: str
    scale: str = "cpu"
    objective: str = "pareto"

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise PlanError(
                f"there is no objective {self.objective!r}; there are {', '.join(OBJECTIVES)}"
            )

    @property
    @abstractmethod
    def keys(self) -> Sequence[str]:
        """The names of the cells, in the order in which they are to be run."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Plain data that are equal for plans that may share a study."""

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """The plan as the user gave it, in plain data: to say what differs from another."""

    @abstractmethod
    def parameters(self, key: str) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """What Optuna is told of a cell that nobody has run yet: values and where they are from."""

    @abstractmethod
    def settings(self, key: str, ask: Ask) -> Settings:
        """The run of a cell; `ask` gives its Optuna trial, for a sampler."""

    @abstractmethod
    def name(self, key: str) -> str:
        """What to call a cell."""

    @property
    def directions(self) -> list[StudyDirection]:
        """The objective as Optuna has it."""
        return [StudyDirection.MAXIMIZE for _ in OBJECTIVES[self.objective]]

    def values(self, record: Record) -> list[float]:
        """What a finished run is worth. One that diverged is worth nothing, zeros or not."""
        result = record["result"] if record["status"] == "ok" else {}
        return [float(result.get(name) or 0.0) for name in OBJECTIVES[self.objective]]


def check_axes(axes: Axes) -> None:
    """That there is a method, that each axis has values, and that each option has its method.

    Raises:
        PlanError: not so.
    """
    if not axes.get("method"):
        raise PlanError("name at least one method")
    try:
        known = {name: methods.options_of(methods.find(name)) for name in axes["method"]}
    except ValueError as error:
        raise PlanError(str(error)) from None
    for name, values in axes.items():
        if not values:
            raise PlanError(f"{name} has no values")
        if name not in SHARED and not any(name in options for options in known.values()):
            has = "; ".join(f"{one} has {', '.join(known[one]) or 'none'}" for one in known)
            raise PlanError(f"no chosen method has an option {name!r}: {has}")


def axes_of(method: str, axes: Axes) -> dict[str, Sequence[Any]]:
    """The axes that a method has a use for."""
    options = methods.options_of(methods.find(method))
    return {
        name: values
        for name, values in axes.items()
        if name != "method" and (name in SHARED or name in options)
    }


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What of a plan's description has changed, in words."""
    before, after = dict(_flat(old)), dict(_flat(new))
    changes = [
        f"{name} was {_shown(before.get(name))} and is now {_shown(after.get(name))}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    return "; ".join(changes) or "options that it left to pdecay, which had other defaults then"


def _flat(description: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in description.items():
        if isinstance(value, Mapping):
            yield from _flat(value, prefix)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for place, part in enumerate(value, start=1):
                yield from _flat(part, f"grid {place}'s " if len(value) > 1 else "")
        else:
            yield prefix + name, value


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
