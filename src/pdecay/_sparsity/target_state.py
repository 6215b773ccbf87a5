"""The state of a sparsity target, in the optimizer's parameter groups.

The state is plain numbers. The first four are equal in all groups: a group that joins later copies
them from another.

    group["target_sparsity"]   the target; tells the states of different targets apart
    group["target_step"]       the number of optimizer steps
    group["target_update"]     the running size of the optimizer's update of one weight
    group["target_magnitude"]  the mean magnitude of the nonzero weights
    group["target_stepped"]    1 if this optimizer took the current step, and others did not yet
    group["target_initial"]    for each parameter, its zeros when it joined the ramp; -1 before
    group["target_means"]      for each parameter, the mean of |w|^update_power; 0 if unknown
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from pdecay._core.group_settings import HOLD, Group, decays
from pdecay._sparsity.pools import Trained, steered
from pdecay._sparsity.ranking import count_zeros
from pdecay._utils.user_warnings import warn_user

_SHARED = ("target_step", "target_update", "target_magnitude")
_KEYS = ("target_sparsity", *_SHARED, "target_stepped", "target_initial", "target_means")


def complete_state(groups: list[Group], target: float, end: int) -> None:
    """Copy the state of complete groups to groups without one; create it if there is none.

    Groups lack it at first and after ``add_param_group``. The groups of a checkpoint lack it if
    the checkpoint was written without this target. `end` is the last step of the ramp.
    """
    complete = [group for group in groups if group.get("target_sparsity") == target]
    for group in complete:
        size, initial = len(group["params"]), group["target_initial"]
        if len(initial) != size:  # parameters were appended to the group, or removed from it
            group["target_initial"] = [*initial[:size], *[-1] * (size - len(initial))]
            group["target_means"] = [0.0] * size
            if isinstance(group["decay_scale"], list):  # the next stage sets it again
                group["decay_scale"] = HOLD
    if len(complete) == len(groups):
        return
    state: Group = dict.fromkeys(_SHARED, 0.0) | {"target_step": 0}
    if complete:
        state = {key: complete[0][key] for key in _SHARED}
    elif any("target_sparsity" in group for group in groups):
        warn_user(
            f"the optimizer has the state of another target, "
            f"{groups[0].get('target_sparsity')}; the ramp to {target:g} starts over"
        )
    if state["target_step"] >= end:
        warn_user(
            "a parameter group was added after the end of the SparsityTarget's ramp; it is "
            "neither decayed nor pruned"
        )
    for group in groups:
        if group.get("target_sparsity") != target:
            initial = [-1] * len(group["params"])
            group.update(state, target_sparsity=target, target_initial=initial)
            group["target_means"] = [0.0] * len(group["params"])
            group["target_stepped"] = 0
            if group.get("decay_scale") != HOLD:  # else freeze_zeros was called: zeros stay zero
                group["decay_scale"] = 0.0


def check_not_released(groups: Iterable[Group], *, ended: bool) -> None:
    """Raise ValueError if the decay of weights that took part in a ramp was turned off.

    Before the end of the ramp, the target itself sets the scale.
    """
    for group in groups:
        turned_off = ended and 0 in _scales(group)
        if max(group["target_initial"], default=-1) >= 0 and (turned_off or not group["decay"]):
            setting = "decay_scale" if turned_off else "decay"
            raise ValueError(
                f"{setting} was set to {group[setting]} under a SparsityTarget, and only the decay "
                "keeps zeros at zero; leave it, or detach() the target"
            )


def count_initial_zeros(groups: Iterable[Group], trained: Trained) -> None:
    """Count the zeros of the parameters that take part for the first time."""
    for group in groups:
        initial = list(group["target_initial"])  # a copy: state_dict() shares the list
        for i, param in steered(group, trained):
            if initial[i] < 0:
                initial[i] = count_zeros([param])
        group["target_initial"] = initial


def update_means(
    groups: list[Group], squared_changes: float, nonzeros: float, magnitudes: float
) -> None:
    """Update the running means from sums over the nonzero weights that were measured."""
    if not nonzeros:
        return
    update = math.sqrt(squared_changes / nonzeros)
    last = groups[0]["target_update"]
    save_in(
        groups,
        target_update=0.9 * last + 0.1 * update if last else update,
        target_magnitude=magnitudes / nonzeros,
    )


def save_in(groups: Iterable[Group], **state: float) -> None:
    """Set keys of the state in all groups."""
    for group in groups:
        group.update(state)


def result_of_ramp(
    groups: Iterable[Group], target: float, targets: Mapping[Tensor, float]
) -> tuple[int, float, int]:
    """Return three counts for the weights in the ramp: zeros, zeros asked for, and all weights.

    Parameters that joined after the end do not count. `targets` has the targets of parameters with
    one of their own.
    """
    params = [
        param
        for group in groups
        for param, initial in zip(group["params"], group["target_initial"], strict=False)
        if initial >= 0 and decays(param, group)
    ]
    asked = sum(targets.get(param, target) * param.numel() for param in params)
    return count_zeros(params), asked, sum(param.numel() for param in params)


def remove_state(groups: Iterable[Group]) -> None:
    """Remove all keys of a target."""
    for group in groups:
        for key in _KEYS:
            group.pop(key, None)


def _scales(group: Group) -> list[float]:
    scale = group["decay_scale"]
    return scale if isinstance(scale, list) else [scale]
