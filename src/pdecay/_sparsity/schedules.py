"""Schedules of p and lam with the interface of torch's learning-rate schedulers.

    schedule = pdecay.PSchedule(optimizer, [(0, 2.0), (1000, 0.8)])
    for batch in batches:
        ...
        optimizer.step()
        schedule.step()

The value is linear between milestones and constant after the last. It is written to
``optimizer.param_groups``, so schedules of different settings can be combined.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from pdecay._core.group_settings import HOLD, Group, penalty_of
from pdecay._core.validation import check_count, check_number
from pdecay._sparsity.freezing import decaying
from pdecay._sparsity.target import target_of
from pdecay._utils.user_warnings import warn_user

Milestones = Sequence[tuple[int, float | Sequence[float]]]


class _Schedule:
    """A piecewise linear function of the step, with optional restarts."""

    def __init__(
        self, optimizer: Optimizer, milestones: Milestones, restart_every: int | None
    ) -> None:
        self.optimizer = decaying(optimizer, type(self).__name__)
        if restart_every is not None:
            check_count("restart_every", restart_every)
        self.restart_every = restart_every
        self._times, self._values = _check_milestones(milestones)
        self.last_step = 0

    def step(self) -> None:
        """Advance by one step; call this after ``optimizer.step()``."""
        self.last_step += 1
        self._write()

    def value(self, step: int) -> list[float]:
        """Return the scheduled value at a step: one number, or one for each term."""
        time = step % self.restart_every if self.restart_every else step
        after = bisect.bisect_right(self._times, time)
        if after == 0:
            return self._values[0]
        if after == len(self._times):
            return self._values[-1]
        start, end = self._times[after - 1], self._times[after]
        share = (time - start) / (end - start)
        return [
            (1 - share) * a + share * b
            for a, b in zip(self._values[after - 1], self._values[after], strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the last step."""
        return {"last_step": self.last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the step of a checkpoint, with the milestones of this schedule."""
        self.last_step = check_count("last_step", state_dict["last_step"], 0)
        self._write()

    def __repr__(self) -> str:
        points = [
            (time, value[0] if len(value) == 1 else tuple(value))
            for time, value in zip(self._times, self._values, strict=True)
        ]
        restart = f", restart_every={self.restart_every}" if self.restart_every else ""
        return f"{type(self).__name__}({points}{restart}, last_step={self.last_step})"

    def _decaying(self) -> list[Group]:
        optimizer = decaying(self.optimizer, type(self).__name__)  # attach may be undone by now
        return [group for group in optimizer.param_groups if group["decay"]]

    def _write(self) -> None:
        raise NotImplementedError


class PSchedule(_Schedule):
    """A piecewise linear schedule of p for every group with a decay (section 6 of the paper).

    At p = 2 zero is not a fixed point. Starting there and lowering p lets the weights find their
    size before small ones are pulled to zero. Restarts let zero weights leave zero again.

    Args:
        optimizer: a PAdam, a PSGD, or any optimizer that ``pdecay.attach`` was called on.
        milestones: pairs (step, p). p is a number for all terms of a sum, or a sequence with one
            number for each term, e.g. ``[(0, (2, 2)), (1000, (0.8, 2))]``.
        restart_every: the number of steps after which the schedule starts again.
    """

    def __init__(
        self, optimizer: Optimizer, milestones: Milestones, restart_every: int | None = None
    ) -> None:
        super().__init__(optimizer, milestones, restart_every)
        for group in self._decaying():
            self._powers_for(group, self._values[0])
        self._write()

    def get_last_p(self) -> list[list[float]]:
        """Return the current p of each term of each group with a decay."""
        return [[p for p, _ in group["decay"]] for group in self._decaying()]

    def _write(self) -> None:
        powers = self.value(self.last_step)
        for group in self._decaying():
            group["decay"] = [
                [p, lam]
                for p, (_, lam) in zip(self._powers_for(group, powers), group["decay"], strict=True)
            ]

    @staticmethod
    def _powers_for(group: Group, powers: list[float]) -> list[float]:
        terms = len(group["decay"])
        if len(powers) == 1:
            return powers * terms
        if len(powers) != terms:
            raise ValueError(
                f"a milestone has {len(powers)} values of p for a decay of {terms} terms; give "
                "one number, or one for each term"
            )
        return powers


class LamSchedule(_Schedule):
    """A piecewise linear multiplier of every lam, written to ``group["decay_scale"]``.

    Args:
        optimizer, restart_every: as in :class:`PSchedule`.
        milestones: pairs (step, multiplier).

    The decay follows the learning rate and its schedule, as in AdamW. To schedule it
    independently, set the group's ``"decay_lr"`` and schedule the multiplier. A
    :class:`SparsityTarget` sets the multiplier itself, so the two cannot be combined. A multiplier
    of 0 lets zeros move again. To end the decay and keep the zeros, stop the schedule and call
    :func:`freeze_zeros`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Sequence[tuple[int, float]],
        restart_every: int | None = None,
    ) -> None:
        super().__init__(optimizer, milestones, restart_every)
        if any(len(value) != 1 for value in self._values):
            raise ValueError("a milestone of LamSchedule is a step and one number")
        self._write()
        self._warn_of_release()

    def step(self) -> None:
        """Advance by one step; call this after ``optimizer.step()``."""
        if self._is_frozen() and target_of(self.optimizer) is None:
            raise ValueError(
                "LamSchedule would let the weights decay again after freeze_zeros: do not step it "
                "any more, or set decay_scale to 1 first"
            )
        super().step()

    def _is_frozen(self) -> bool:
        return any(group["decay_scale"] == HOLD for group in self._decaying())

    def _warn_of_release(self) -> None:
        scales = [scale for (scale,) in self._values]
        falls = any(scales[i] > 0 and scales[i + 1] == 0 for i in range(len(scales) - 1))
        penalties = map(penalty_of, self._decaying())
        if falls and any(penalty and penalty.absorbs for penalty in penalties):
            warn_user(
                "LamSchedule: at a multiplier of 0 nothing decays, and weights that are zero move "
                "again. To keep them, end at a tiny multiplier such as 1e-20, or call freeze_zeros"
            )

    def _write(self) -> None:
        if target_of(self.optimizer) is not None:
            raise ValueError(
                "LamSchedule and SparsityTarget both set decay_scale, and a scale of 0 would "
                "release the target's zeros: use one of them, or detach() the target first"
            )
        (scale,) = self.value(self.last_step)
        for group in self._decaying():
            # Else freeze_zeros ended the schedule, perhaps before a checkpoint.
            if group["decay_scale"] != HOLD:
                group["decay_scale"] = scale


def _check_milestones(milestones: Milestones) -> tuple[list[int], list[list[float]]]:
    times: list[int] = []
    values: list[list[float]] = []
    for milestone in milestones:
        if not isinstance(milestone, Sequence) or len(milestone) != 2:
            raise TypeError(f"a milestone must be a pair (step, value), got {milestone!r}")
        time, value = milestone
        time = check_count("a milestone's step", time, 0)
        if times and time <= times[-1]:
            raise ValueError(f"milestones must be in order of time, got {times[-1]} before {time}")
        listed = list(value) if isinstance(value, Sequence) else [value]
        times.append(time)
        values.append([check_number("a milestone's value", number) for number in listed])
    if not times:
        raise ValueError("a schedule needs at least one milestone, got none")
    if len({len(value) for value in values}) > 1:
        raise ValueError("all milestones must have the same number of values")
    return times, values
