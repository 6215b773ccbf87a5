"""A parameter group's decay as plain numbers: how it is written, read, checked and restored.

Hyper-parameters live in ``optimizer.param_groups``, where schedulers, checkpoints and people look
for them, and as plain numbers, so that ``torch.load(weights_only=True)`` takes them:

    group["decay"]        [[p, lam], ...]; [] is no decay
    group["decay_scale"]  what every lam is multiplied by (schedules and targets move it)
    group["decay_1d"]     whether tensors with fewer than two dimensions decay too. False where the
                          group was given no decay of its own: a bare list of parameters holds
                          biases and norms, which must be spared
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from pdecay.penalty import Penalty, as_penalty, check_number

Group = dict[str, Any]
KEYS = ("decay", "decay_scale", "decay_1d")


def write(group: Group, default: Penalty | None) -> None:
    """Bring a group's settings into their plain form; `default` where it has no own decay."""
    own = "decay" in group
    penalty = as_penalty(group["decay"]) if own else default
    scale = check_number("decay_scale", group.get("decay_scale", 1.0))
    group["decay"] = penalty.pairs() if penalty is not None else []
    group["decay_scale"] = scale
    group.setdefault("decay_1d", own)


def with_settings(params: Iterable[Any], default: Penalty | None) -> list[Group]:
    """Parameters in any form that a torch optimizer takes, as groups with their settings."""
    given = list(params)
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = [{**group, "params": _listed(group["params"])} for group in given]
    if not any(group["params"] for group in groups):
        raise ValueError("there is nothing to optimize: the parameter list is empty")
    for group in groups:
        write(group, default)
    return groups


def penalty_of(group: Group) -> Penalty | None:
    """The penalty that a group's plain numbers stand for; None where nothing is to be done."""
    return as_penalty(group["decay"]) if group["decay_scale"] else None


def decays(param: Tensor, group: Group) -> bool:
    """Whether the group's decay acts on this parameter."""
    if not group["decay"]:
        return False
    return bool(group["decay_1d"]) or is_lazy(param) or param.ndim >= 2


def completed(state_dict: dict[str, Any], groups: list[Group]) -> dict[str, Any]:
    """A checkpoint with the settings that it lacks taken from `groups`, and checked.

    A checkpoint of plain AdamW, or from before ``attach``, knows nothing of a decay. Nothing is
    changed in place, so that an error leaves both the checkpoint and the optimizer as they were.
    """
    if len(state_dict["param_groups"]) != len(groups):
        return state_dict  # torch has the clear error for this
    filled = []
    for index, (saved, current) in enumerate(zip(state_dict["param_groups"], groups, strict=True)):
        merged = {**{key: current[key] for key in KEYS if key in current}, **saved}
        try:
            write(merged, None)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"the checkpoint's decay for parameter group {index} does not fit: {error}"
            ) from None
        filled.append(merged)
    return {**state_dict, "param_groups": filled}


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)
