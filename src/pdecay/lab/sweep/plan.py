"""Plans: the cells of a sweep, known in advance (`Grid`) or chosen by a sampler (`Search`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import Trial

from pdecay._utils.errors import UserError
from pdecay.lab import methods
from pdecay.lab.train.records import Record
from pdecay.lab.train.training import Settings

# The results that a study maximises, by their names in a record.
OBJECTIVES = {
    "pareto": ("accuracy", "sparsity"),
    "tradeoff": ("tradeoff",),
    "accuracy": ("accuracy",),
}
SHARED = ("method", "lr", "seed", "steps")  # settings of every run; the rest are method options

Axes = Mapping[str, Sequence[Any]]  # the values of each setting
Sample = Callable[[BaseSampler], Trial]  # returns the cell's Optuna trial, bound to a sampler


class SweepError(UserError):
    """A sweep cannot be planned, started or continued; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """The cells of a sweep and its objective.

    Args:
        task, scale: the task to train, as in :func:`pdecay.lab.tasks.task`.
        objective: a name from `OBJECTIVES`.
    """

    task: str
    scale: str = "cpu"
    objective: str = "pareto"

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise SweepError(
                f"there is no objective {self.objective!r}; choose from {', '.join(OBJECTIVES)}"
            )

    @property
    @abstractmethod
    def keys(self) -> Sequence[str]:
        """The cells' keys, in the order in which they are run."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """A digest that is equal for plans that may share a study."""

    @property
    @abstractmethod
    def description(self) -> dict[str, str]:
        """The plan as the user gave it, for error messages."""

    @abstractmethod
    def settings(self, key: str, sample: Sample) -> Settings:
        """Return the settings of a cell; a search draws them from ``sample(sampler)``."""

    def label(self, key: str) -> str:
        """Return a cell's name for messages."""
        return key

    def params(self, key: str) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """Return the parameters that a queued trial has before it runs."""
        return {}, {}

    def is_result_of(self, key: str, record: Any) -> bool:
        """Return whether a record can be the result of a cell.

        The lines of a journal may have been altered or reordered, and a trial then has the record
        of another cell.
        """
        return isinstance(record, Mapping) and "id" in record

    def values(self, record: Record) -> list[float]:
        """Return a record's objective values: zeros if the run diverged."""
        result = record["result"] if record["status"] == "ok" else {}
        return [float(result.get(name) or 0.0) for name in OBJECTIVES[self.objective]]

    def make_settings(self, method: str, chosen: Mapping[str, Any]) -> Settings:
        """Return the settings of one run, with the task's and the method's defaults.

        Raises:
            SweepError: a value is invalid.
        """
        try:
            return Settings.of(self.task, method, scale=self.scale, **chosen)
        except (TypeError, ValueError) as error:
            raise SweepError(str(error)) from None


def label(settings: Mapping[str, Any]) -> str:
    """Return a run's settings in a few words.

    Example:
        >>> label({"method": "padam", "options": {"p": 0.8, "lam": 0.01}, "lr": 0.003, "seed": 0})
        'padam p=0.8 lam=0.01 lr=0.003 seed=0'
    """
    named = {**settings["options"], "lr": settings["lr"], "seed": settings["seed"]}
    shown = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in named.items()}
    return " ".join([settings["method"], *(f"{name}={text}" for name, text in shown.items())])


def check_axes(axes: Axes) -> None:
    """Check that there is a method, that each axis has values, and that a method has each option.

    Raises:
        SweepError: a check failed.
    """
    if not axes.get("method"):
        raise SweepError("name at least one method")
    try:
        known = {name: methods.options_of(methods.find(str(name))) for name in axes["method"]}
    except ValueError as error:
        raise SweepError(str(error)) from None
    for name, values in axes.items():
        if not values:
            raise SweepError(f"{name} has no values")
        if name not in SHARED and not any(name in options for options in known.values()):
            has = "; ".join(f"{one} has {', '.join(known[one]) or 'none'}" for one in known)
            raise SweepError(f"no chosen method has an option {name!r}: {has}")


def axes_of(method: str, axes: Axes) -> dict[str, Sequence[Any]]:
    """Select the axes that apply to a method."""
    names = (*SHARED[1:], *methods.options_of(methods.find(method)))
    return {name: values for name, values in axes.items() if name in names}


def describe_axes(axes: Axes, prefix: str = "") -> dict[str, str]:
    """Return the axes as text."""
    return {prefix + name: " ".join(map(str, values)) for name, values in axes.items()}


def difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return the differences between two plans' descriptions as text."""
    changes = [
        f"{name} was {old.get(name, 'not given')} and is now {new.get(name, 'not given')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]
    return "; ".join(changes) or "pdecay's defaults for the options that are not given changed"
