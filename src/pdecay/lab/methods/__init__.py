"""The training methods that the experiments compare, by name."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import fields, is_dataclass
from typing import TypeGuard

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
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise ValueError(
            f"there is no method {name!r}; choose from {', '.join(METHODS)}, or your own as "
            "my_module:MyMethod"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; installed scripts do not
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"method {name!r}: cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ValueError(f"method {name!r}: {module_name!r} has no {class_name!r}")
    if _is_method(found):
        return found
    raise ValueError(
        f"method {name!r} must be a dataclass that inherits from pdecay.lab.methods.Method"
    )


def _is_method(found: object) -> TypeGuard[type[Method]]:
    return isinstance(found, type) and issubclass(found, Method) and is_dataclass(found)


def options_of(method: type[Method]) -> list[str]:
    """Return the names of a method's options."""
    return [field.name for field in fields(method)]  # type: ignore[arg-type]
