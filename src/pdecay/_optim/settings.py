"""Checks of the settings of PAdam and PSGD, at construction and before each step.

A step checks all groups before it changes any weight: an error in the second group would otherwise
leave the first one a step ahead.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pdecay._core.group_settings import Group, check_changes, check_metric, penalty_of
from pdecay._core.penalty import Penalty
from pdecay._core.tensors import is_tracing
from pdecay._core.validation import check_flag, check_number
from pdecay._optim.engine import check_scalar
from pdecay._optim.hooks import is_local

_FLAGS = (
    *("amsgrad", "maximize", "nesterov", "capturable", "differentiable", "stochastic_rounding"),
    *("foreach", "fused", "decay_1d"),
)
_NUMBERS = ("eps", "weight_decay", "momentum", "dampening", "metric_mean")
_SETTINGS = (*_FLAGS, *_NUMBERS, "betas", "metric")


def check_settings(group: Group, optimizer: Optimizer) -> None:
    """Raise an error for a setting that was changed to an invalid value since the last step."""
    check_changes(group)
    if is_tracing():  # torch.compile does not trace all of the rest
        return
    penalty_of(group)
    if group.get("metric") == "adaptive":
        check_metric("adaptive", group["decay_auxiliary"])
        if group["decay"] and not group.get("metric_mean"):
            _check_whole(optimizer)
    # These checks take a few percent of a step of a small model: skip them while all settings are
    # the objects that passed. Tensors and lists may change in place, and are checked each time.
    values = [*map(group.get, _SETTINGS)]
    passed: dict[int, list[Any]] = vars(optimizer).setdefault("_passed_settings", {})
    known = passed.get(id(group))
    if known is not None and all(map(operator.is_, known, values)):
        return
    check_flags(group)
    for name in _NUMBERS:
        if name in group:
            check_scalar(name, group[name])
    if "betas" in group:
        check_betas(group["betas"])
    if "metric" in group:
        check_metric(group["metric"])
    if all(map(_is_immutable, values)):
        passed[id(group)] = values


def check_flags(settings: Mapping[str, Any]) -> None:
    """Raise a TypeError for a flag, among an optimizer's or a group's settings, that is no bool."""
    for name in _FLAGS:
        if name in settings:
            check_flag(name, settings[name], optional=name in ("foreach", "fused"))


def check_betas(betas: object) -> tuple[float, float]:
    """Return Adam's coefficients, two numbers or tensors from 0 to 1, or raise an error."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers, such as (0.9, 0.999), got {betas!r}")
    for i, beta in enumerate(betas):
        if not isinstance(beta, Tensor) and check_number(f"betas[{i}]", beta) >= 1:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta!r}, must be below 1")
    return betas[0], betas[1]


def check_weight_decay(weight_decay: Any) -> float | Tensor:
    """Return the L2 decay, a number or a tensor of one element, or raise an error."""
    if isinstance(weight_decay, Penalty):
        raise TypeError(
            f"weight_decay is the L2 decay, a number; pass the penalty as decay={weight_decay!r}"
        )
    checked: float | Tensor = check_scalar("weight_decay", weight_decay)
    return checked


def check_not_scaled(optimizer: Optimizer) -> None:
    """Raise for gradients that the step itself would have to unscale, or to skip."""
    for name in ("grad_scale", "found_inf"):
        if getattr(optimizer, name, None) is not None:
            raise RuntimeError(
                f"optimizer.{name} is set, and {type(optimizer).__name__} unscales no gradients; "
                "call GradScaler.step, which unscales them and skips steps, and set no attribute"
            )


def _is_immutable(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_immutable, value))
    return value is None or type(value) in (bool, int, float, str)


def _check_whole(optimizer: Optimizer) -> None:
    """Raise a ValueError if Adam's metric would be normalised by a part of the weights only."""
    if is_local(optimizer):
        raise ValueError(
            'metric="adaptive" needs the mean over all decayed weights of a group, and in a '
            "ZeroRedundancyOptimizer each rank has a share of them; use "
            'metric="magnitude", or torch.distributed.fsdp.fully_shard'
        )
