"""The training methods that the experiments compare, by name."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from pdecay._utils.imports import import_object
from pdecay.lab.methods.base import Method, Run, adamw, decayed_weights
from pdecay.lab.methods.decay import AdamWMethod, ElasticMethod, L1Method, PAdamMethod, TargetMethod
from pdecay.lab.methods.factorized import DWFMethod
from pdecay.lab.methods.magnitude import GMPMethod, MPMethod
from pdecay.lab.methods.oto import OTOMethod
from pdecay.lab.methods.variations import (
    DecayedGMPMethod,
    DecayedMPMethod,
    EveryMethod,
    FreezeMethod,
    ProxMethod,
    PScheduleMethod,
    SlowMethod,
)

__all__ = ["METHODS", "Method", "Run", "adamw", "decayed_weights", "find", "options_of"]

METHODS: dict[str, type[Method]] = {
    "adamw": AdamWMethod,
    "padam": PAdamMethod,
    "elastic": ElasticMethod,
    "target": TargetMethod,
    "mp": MPMethod,
    "gmp": GMPMethod,
    "oto": OTOMethod,
    "dwf": DWFMethod,
    "l1": L1Method,
    "every": EveryMethod,
    "slow": SlowMethod,
    "pschedule": PScheduleMethod,
    "prox": ProxMethod,
    "freeze": FreezeMethod,
    "padam-mp": DecayedMPMethod,
    "padam-gmp": DecayedGMPMethod,
}


def find(name: str) -> type[Method]:
    """Return the method with a name from `METHODS`, or import ``"module:Class"``.

    Raises:
        ValueError: the name is unknown, or the class is not a method.
    """
    if name in METHODS:
        return METHODS[name]
    if not all(name.partition(":")):
        raise ValueError(
            f"there is no method {name!r}; choose from {', '.join(METHODS)}, or your own as "
            "my_module:MyMethod"
        )
    try:
        found = import_object(name)
    except ValueError as error:
        raise ValueError(f"method {name!r}: {error}") from error
    if is_dataclass(found) and isinstance(found, type) and issubclass(found, Method):
        return found
    raise ValueError(
        f"method {name!r} must be a dataclass that inherits from pdecay.lab.methods.Method"
    )


def options_of(method: type[Method]) -> list[str]:
    """Return the names of a method's options."""
    return [field.name for field in fields(method)]  # type: ignore[arg-type]
