"""The settings of a run: task, scale, method, seed, learning rate, steps and method options."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdecay._core.validation import check_count, check_number
from pdecay.lab import methods
from pdecay.lab.methods import Method
from pdecay.lab.tasks import get_task
from pdecay.lab.train import records


@dataclass(frozen=True)
class Settings:
    """Everything that determines the result of a run. Invalid settings raise an error.

    Options of the method that are not given are filled in with the method's defaults, so that
    equal runs have equal settings. :meth:`of` also fills in the task's defaults.
    """

    task: str
    scale: str
    method: str
    seed: int
    lr: float
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        get_task(self.task, self.scale)  # raises for unknown names
        lr = check_number("lr", self.lr)
        if not lr:
            raise ValueError(f"lr must be above 0, got {self.lr!r}")
        # Plain types: a checkpoint with the integers or strings of NumPy could not be loaded.
        object.__setattr__(self, "seed", check_count("seed", self.seed, least=0))
        object.__setattr__(self, "steps", check_count("steps", self.steps))
        object.__setattr__(self, "lr", lr)
        for name in ("task", "scale", "method"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        object.__setattr__(self, "options", _full_options(self.method, self.options))

    @classmethod
    def of(
        cls,
        task: str,
        method: str,
        *,
        scale: str = "cpu",
        seed: int = 0,
        lr: float | None = None,
        steps: int | None = None,
        **options: Any,
    ) -> Settings:
        """Return settings with the task's learning rate and steps as defaults.

        Example:
            >>> settings = Settings.of("digits", "padam", lam=0.02)
            >>> settings.lr, settings.steps, settings.options
            (0.003, 3000, {'p': 0.8, 'lam': 0.02, 'metric': 'magnitude'})
        """
        recipe = get_task(task, scale)
        lr = recipe.lr if lr is None else lr
        steps = recipe.steps if steps is None else steps
        return cls(task, scale, method, seed, lr, steps, options)

    @property
    def id(self) -> str:
        """The id of the run's record."""
        return records.run_id(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a record has them.

        An option whose field has the metadata ``unrecorded_default`` is left out at its default. It
        was added after runs were recorded, and must not change their ids.
        """
        plain = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        options = dict(self.options)
        for one in dataclasses.fields(methods.find(self.method)):  # type: ignore[arg-type]
            if "unrecorded_default" in one.metadata and options[one.name] == one.default:
                del options[one.name]
        return {**plain, "options": options}

    def build(self) -> Method:
        """Return the method with its options."""
        return methods.find(self.method)(**self.options)


def _full_options(method_name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check options, convert them to the declared types and add the method's defaults."""
    method = methods.find(method_name)
    known = methods.options_of(method)
    unknown = [name for name in given if name not in known]
    if unknown:
        has = f"it has {', '.join(known)}" if known else "it has none"
        name = unknown[0]
        owners = [one for one, kind in methods.METHODS.items() if name in methods.options_of(kind)]
        hint = f"; methods with it: {', '.join(owners)}" if owners else ""
        raise ValueError(f"{method_name} has no option {name!r}; {has}{hint}")
    kinds = typing.get_type_hints(method)
    typed = {name: _as_declared(name, value, kinds[name]) for name, value in given.items()}
    try:
        made = method(**typed)
    except (TypeError, ValueError) as error:
        raise type(error)(f"method {method_name}: {error}") from None
    return {name: getattr(made, name) for name in known}


def _as_declared(name: str, value: object, kind: object) -> object:
    """Convert integers to declared floats, because 1 and 1.0 are the same setting."""
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, str | bool | int | float | None):
        raise TypeError(f"option {name} must be a number or a string, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"option {name} must be finite, got {value!r}")
    return _plain(value)


def _plain(value: object) -> object:
    """Convert strings and numbers of subclasses, such as NumPy's, to Python's own types."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return value
