"""Decay settings of a parameter group as plain numbers: write, read, check, restore.

Hyper-parameters live in ``optimizer.param_groups``, where schedulers and checkpoints find them, as
plain numbers, so that ``torch.load(weights_only=True)`` accepts them:

    group["decay"]            [[p, lam], ...]; [] for no decay
    group["decay_scale"]      multiplier of every lam, set by schedules and targets: one number, or
                              a list with one number for each parameter
    group["decay_lr"]         learning rate of the decay; None uses group["lr"]. In both cases, a
                              step with group["lr"] = 0 decays nothing
    group["decay_1d"]         whether tensors with fewer than two dimensions decay. False unless the
                              user gave the group its own decay: a plain list of parameters
                              contains biases and norms, which must not decay
    group["decay_auxiliary"]  [n, rate, start], the update rule of s (see auxiliary.py); [] for
                              Instant
    group["metric"]           PAdam only: "magnitude", or "adaptive" for the decay in Adam's metric
    group["metric_mean"]      PAdam only: the mean of Adam's denominators (see adam_metric.py); 0.0
                              if it is not known yet
    group["decay_split"]      groups of ``param_groups`` only: one letter for each parameter of the
                              model, d if it decays, n if not, f if it is frozen
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # no stub

from pdecay._core.auxiliary import as_plain
from pdecay._core.penalty import Penalty, as_penalty
from pdecay._core.tensors import is_tracing
from pdecay._core.validation import check_flag, check_number

Group = dict[str, Any]
Metric = Literal["magnitude", "adaptive"]
_WITH_SHAPE = {Tensor, Parameter}
# The decay_scale that keeps zeros at zero: too small to change a nonzero weight, and large enough
# to stay above 0 in single precision.
HOLD = 1e-30
DECAY_KEYS = ("decay", "decay_scale", "decay_lr", "decay_1d", "decay_auxiliary")


@dataclass(frozen=True)
class Defaults:
    """Settings for groups without their own."""

    penalty: Penalty | None
    auxiliary: list[float] = field(default_factory=list)
    metric: str | None = None  # None for optimizers other than PAdam
    # Whether a wrapper such as ZeroRedundancyOptimizer may have copied them into the groups.
    may_be_in_groups: bool = True


def write_settings(group: Group, defaults: Defaults) -> None:
    """Convert a group's settings to plain numbers; use `defaults` for missing ones.

    Raises:
        TypeError, ValueError: if a setting is invalid; the group is then unchanged.
    """
    penalty = as_penalty(group["decay"]) if "decay" in group else defaults.penalty
    own = "decay" in group and not _is_default(group["decay"], defaults)
    if penalty is not None:
        check_not_flattened(group.get("params", ()))
    scale = group.get("decay_scale", 1.0)
    lr = group.get("decay_lr")
    one_d = group.get("decay_1d", own)
    check_not_differentiable(group)
    check_flag("decay_1d", one_d)
    _check_keeps_zeros(penalty, scale)
    plain: Group = {
        "decay": penalty.pairs() if penalty is not None else [],
        "decay_scale": _checked_scale(scale, group.get("params", ())),
        "decay_lr": None if lr is None else check_number("decay_lr", lr),
        "decay_1d": one_d,
        "decay_auxiliary": as_plain(group.get("decay_auxiliary", defaults.auxiliary)),
    }
    metric = group.get("metric", defaults.metric)
    if defaults.metric is not None:
        check_metric(metric, plain["decay_auxiliary"])
        mean = check_number("metric_mean", group.get("metric_mean", 0.0))
        plain |= {"metric": metric, "metric_mean": mean}
    group.update(plain)


def groups_with_settings(params: Iterable[Any], defaults: Defaults) -> list[Group]:
    """Convert parameters, in any form that torch optimizers accept, to groups with settings."""
    if isinstance(params, Module):
        raise TypeError(
            f"params must be parameters or groups, got the model itself ({type(params).__name__}); "
            "pass model.parameters() or pdecay.param_groups(model)"
        )
    if isinstance(params, Tensor):
        raise TypeError("params must be a list of tensors or of groups, got one tensor")
    given = list(params)
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    if not given:
        raise ValueError("there is nothing to optimize: the parameter list is empty")
    return [group_with_settings(group, defaults) for group in given]


def group_with_settings(group: Group, defaults: Defaults) -> Group:
    """Return a copy of a user's group with its settings."""
    group = {**group, "params": _listed(group["params"])}
    write_settings(group, defaults)
    return group


def check_changes(group: Group) -> None:
    """Raise TypeError or ValueError if a setting was changed to an invalid value between steps.

    "decay" is checked by :func:`penalty_of`, learning rates in the step.
    """
    check_not_differentiable(group)
    scale = _checked_scale(group["decay_scale"], group["params"])
    if scale == HOLD or isinstance(scale, list):
        _check_keeps_zeros(penalty_of(group), scale)
    if group["decay_auxiliary"] != []:
        group["decay_auxiliary"] = as_plain(group["decay_auxiliary"])


def check_not_differentiable(group: Group) -> None:
    """Raise a ValueError if the group asks for steps that autograd can differentiate."""
    if group.get("differentiable"):
        raise ValueError(
            "p-norm weight decay is applied without gradients and does not support "
            "differentiable=True: set it to False, or detach the decay"
        )


def check_not_flattened(params: Iterable[Any]) -> None:
    """Raise a ValueError for parameters of FSDP1, which have lost their shape."""
    tensors = [param[1] if isinstance(param, tuple) else param for param in params]
    if any(getattr(tensor, "_fsdp_flattened", False) for tensor in tensors):
        raise ValueError(
            "FullyShardedDataParallel (FSDP1) flattens all weights to vectors and cuts these into "
            "shards, so matrices cannot be told from biases and nothing would decay; use "
            "torch.distributed.fsdp.fully_shard (FSDP2), which keeps the shape of each weight"
        )


def penalty_of(group: Group) -> Penalty | None:
    """Return the penalty of a group; None if it does not decay."""
    if is_tracing():  # torch.compile does not trace caches
        return as_penalty(group["decay"])
    try:
        return _penalty_of_pairs(tuple(map(tuple, group["decay"])))
    except TypeError:  # not a list of pairs of numbers
        return as_penalty(group["decay"])


@functools.lru_cache(maxsize=1024)
def _penalty_of_pairs(pairs: tuple[tuple[float, ...], ...]) -> Penalty | None:
    """Return the penalty, from a cache: its checks take longer than the step of a small model."""
    return as_penalty(pairs)


def decays(param: Tensor, group: Group) -> bool:
    """Return whether the group's decay applies to a parameter, regardless of the scale."""
    return bool(group["decay"]) and (group["decay_1d"] or _is_matrix(param))


def _is_matrix(param: Tensor) -> bool:
    """Check for two or more dimensions; the weights of lazy modules do not have theirs yet."""
    return isinstance(param, UninitializedTensorMixin) or param.ndim >= 2


def scale_of(param: Tensor, index: int, group: Group) -> float:
    """Return the multiplier of lam for the parameter at this index; 0 if it does not decay."""
    if not decays(param, group):
        return 0.0
    scale = group["decay_scale"]
    return float(scale[index] if isinstance(scale, list) else scale)


def scales_of(params: Sequence[Tensor], group: Group) -> list[float]:
    """Return `scale_of` for a subset of the group's parameters, such as those with a gradient."""
    scale = group["decay_scale"]
    if not isinstance(scale, list):  # the index does not matter
        scale = float(scale)
        if not group["decay"] or group["decay_1d"]:
            return [scale if group["decay"] else 0.0] * len(params)
        if {*map(type, params)} <= _WITH_SHAPE:
            return [scale if param.ndim >= 2 else 0.0 for param in params]
        return [scale if _is_matrix(param) else 0.0 for param in params]
    if len(params) == len(group["params"]):
        return [scale_of(param, i, group) for i, param in enumerate(params)]
    places = {param: i for i, param in enumerate(group["params"])}
    return [scale_of(param, places[param], group) for param in params]


def decayed_params(group: Group) -> list[Tensor]:
    """Return the parameters that the group decays, regardless of the current scale."""
    return [param for param in group["params"] if decays(param, group)]


def complete_checkpoint(state_dict: dict[str, Any], groups: list[Group]) -> dict[str, Any]:
    """Return a checkpoint with missing settings taken from `groups`, after checking them.

    A checkpoint of plain AdamW, or from before ``attach``, has no decay settings. Nothing is
    changed in place, so that an error leaves the checkpoint and the optimizer unchanged.
    """
    if len(state_dict["param_groups"]) != len(groups):
        return state_dict  # torch raises a clear error for this
    sizes = [
        [len(group["params"]) for group in some] for some in (groups, state_dict["param_groups"])
    ]
    if sizes[0] != sizes[1] and sum(sizes[0]) == sum(sizes[1]):
        raise ValueError(
            f"the optimizer's groups have {sizes[0]} parameters, those of the checkpoint have "
            f"{sizes[1]}. pdecay.param_groups puts tensors that are all zero into the group "
            "without decay: create the optimizer before the weights are loaded, or name tensors "
            "that became zero, or were zero at the start, with include= or exclude="
        )
    # torch.distributed.checkpoint matches parameters by name. If one changed its group, it fills
    # that group from the checkpoint and another one from the new optimizer.
    steps = [g["target_step"] for g in state_dict["param_groups"] if "target_step" in g]
    if len({*map(int, steps)}) > 1:
        raise ValueError(
            f"the groups of the checkpoint have targets at different steps: {steps}. If parameters "
            "changed their group, as tensors that became zero do with pdecay.param_groups, create "
            "the optimizer before the weights are loaded, or use include= or exclude="
        )
    for saved, current in zip(state_dict["param_groups"], groups, strict=True):
        _check_split(saved.get("decay_split"), current.get("decay_split"))
    filled = []
    for index, (saved, current) in enumerate(zip(state_dict["param_groups"], groups, strict=True)):
        keys = [key for key in (*DECAY_KEYS, "metric") if key in current]
        merged = {**{key: current[key] for key in keys}, **saved}
        try:
            write_settings(merged, Defaults(None, metric=current.get("metric")))
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"the checkpoint has an invalid decay setting in parameter group {index}: {error}"
            ) from None
        if "decay_split" in current:
            merged["decay_split"] = current["decay_split"]  # other tensors may be frozen now
        filled.append(merged)
    return {**state_dict, "param_groups": filled}


def _check_split(saved: object, current: object) -> None:
    """Raise ValueError if a tensor that decays now did not in the checkpoint, or vice versa.

    Loading by name (torch.distributed.checkpoint) adapts the lists of parameters to the groups of
    the new optimizer, so that their lengths tell nothing. Other lengths are those of other models,
    such as another number of pipeline stages.
    """
    if not (isinstance(saved, str) and isinstance(current, str) and len(saved) == len(current)):
        return
    pairs = enumerate(zip(saved, current, strict=True))
    if moved := [i for i, pair in pairs if pair[0] != pair[1] and "f" not in pair]:
        raise ValueError(
            f"pdecay.param_groups made other groups for the checkpoint than for this optimizer: "
            f"parameters {moved} of the model (in the order of model.parameters(), from 0) decay "
            "in one of them only. It leaves out tensors that are all zero: create the optimizer "
            "before the weights are loaded, or name tensors that became zero, or were zero at the "
            "start, with include= or exclude="
        )


def check_metric(metric: object, auxiliary: Sequence[float] = ()) -> None:
    """Raise ValueError unless this is the name of a metric that the auxiliary variable supports."""
    if metric not in get_args(Metric):
        names = " or ".join(f'"{name}"' for name in get_args(Metric))
        raise ValueError(f"metric must be {names}, got {metric!r}")
    if metric == "adaptive" and auxiliary:
        raise ValueError(
            'metric="adaptive" supports no slow auxiliary variable: auxiliary must be Instant() or '
            f"None, got [n, rate, start] = {list(auxiliary)}"
        )


def _check_keeps_zeros(penalty: Penalty | None, scale: object) -> None:
    """Raise ValueError if zeros that must stay zero would move, because the decay was changed."""
    held = HOLD in scale if isinstance(scale, list) else scale == HOLD
    if held and (penalty is None or not penalty.absorbs):
        raise ValueError(
            f"decay_scale = {HOLD:g} keeps zeros at zero (freeze_zeros, SparsityTarget), but the "
            f"decay was changed to {penalty}, which does not: keep some p < 2 with lam > 0. It "
            "changes no other weight. To release the zeros, set decay_scale to 1"
        )


def _is_default(decay: object, defaults: Defaults) -> bool:
    if not defaults.may_be_in_groups:
        return False
    if isinstance(decay, Penalty):
        return decay is defaults.penalty
    return isinstance(decay, list) and bool(decay) and as_penalty(decay) == defaults.penalty


def _checked_scale(scale: object, params: Sequence[Any]) -> float | list[float]:
    if not isinstance(scale, list):
        return check_number("decay_scale", scale)
    if len(scale) != len(params):
        raise ValueError(
            f"decay_scale must have one number for each of the group's {len(params)} parameters, "
            f"got {len(scale)}"
        )
    return [check_number("decay_scale", number) for number in scale]


def _listed(params: Any) -> list[Any]:
    if isinstance(params, set):
        raise TypeError("params must be ordered, got a set; pass a list: checkpoints use the order")
    return [params] if isinstance(params, Tensor) else list(params)
