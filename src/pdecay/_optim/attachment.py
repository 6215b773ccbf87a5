"""The decay step on any torch optimizer, through the optimizer's own hooks.

    pdecay.attach(optimizer, Lp(0.8, 1e-3))

Before the optimizer's update the weights that decay are copied; after it they are multiplied by
the factor that their old values give. Nothing else of the optimizer is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from pdecay._core.auxiliary import Auxiliary, as_plain, decay_at_anchor_
from pdecay._core.group_settings import (
    DECAY_KEYS,
    Defaults,
    Group,
    complete_checkpoint,
    scale_of,
    write_settings,
)
from pdecay._core.parameters import warn_of_frozen
from pdecay._core.penalty import Penalty, as_penalty
from pdecay._core.validation import check_number
from pdecay._optim.hooks import StepHooks, check_takes_hooks, find_hooks, unwrap
from pdecay._optim.kernels.dispatch import path_for
from pdecay._optim.step import decay_rate
from pdecay.prox import penalty_prox

Step = Literal["decay", "prox"]
LearningRate = float | Callable[[Group], float | Tensor] | None


def attach(
    optimizer: Optimizer,
    decay: Penalty | None,
    *,
    auxiliary: Auxiliary | None = None,
    lr: LearningRate = None,
    fused: bool | None = None,
    step: Step = "decay",
) -> Attachment:
    """Add p-norm weight decay to an optimizer.

    Args:
        optimizer: any ``torch.optim.Optimizer``. Wrappers that hold the real one as
            ``.optimizer`` are unwrapped.
        decay: the penalty for groups that have no ``"decay"`` of their own: an :class:`Lp`, a sum
            of them, or None. In such a group, tensors with fewer than two dimensions are spared.
        auxiliary: how s follows the weights: ``Instant()`` (the default), ``Every(n)``,
            ``Slow(rate)``. The last two keep an anchor for each weight and copy nothing.
        lr: the learning rate of the decay where it is not ``group["lr"]``: a number, or a
            function of the group for optimizers that find their own step size, for instance
            ``lambda group: group["d"] * group["lr"]`` for Prodigy. It is asked after the update.
        fused: whether the factor is computed and multiplied in one pass, with a power that is off
            by less than 1e-5. False does it by torch's own operations, exactly as
            ``w.mul_(penalty.factor(w_old, lr))``. None takes the fused C kernel on the CPU.
        step: "decay" is the paper's; "prox" is the exact proximal step of the penalty instead,
            which for p <= 1 cuts weights off at a threshold. It copies no weights, and costs more.

    Returns:
        A handle; its ``detach()`` takes the decay off again.

    Note:
        ``copy.deepcopy`` and ``pickle`` drop the hooks of any torch optimizer: attach to the copy
        again, or use :class:`PAdam` or :class:`PSGD`, which survive both.
    """
    optimizer = unwrap(optimizer)
    check_takes_hooks(optimizer, "attach")
    if is_decaying(optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} decays already; "
            "detach() the first handle, or change group['decay']"
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError("there is nothing to decay: the optimizer has no parameters")
    if lr is not None and not callable(lr):
        check_number("lr", lr)
    if step not in ("decay", "prox"):
        raise ValueError(f'step must be "decay" or "prox", got {step!r}')
    defaults = Defaults(as_penalty(decay), as_plain(auxiliary))
    if step == "prox" and defaults.auxiliary:
        raise ValueError("the proximal step has no s: auxiliary must be Instant() or None")
    for group in optimizer.param_groups:
        write_settings({**group}, defaults)  # on a copy: all are checked before one changes
        if lr is None and "lr" not in group:
            raise ValueError(
                f"{type(optimizer).__name__} has no group['lr']: pass lr=, a number or a function "
                "of the group"
            )
    return Attachment(optimizer, defaults, lr, fused, step)


def attachment_of(optimizer: Optimizer) -> Attachment | None:
    """The handle that :func:`attach` returned for this optimizer, as long as it is attached."""
    return find_hooks(optimizer, Attachment)


def is_decaying(optimizer: Optimizer) -> bool:
    """Whether p-norm weight decay acts in this optimizer's step."""
    return getattr(optimizer, "_decays", False) or attachment_of(optimizer) is not None


@dataclass(frozen=True)
class _Remembered:
    """A weight before the step: itself, its old values, and what its decay takes."""

    param: Tensor
    old: Tensor
    scale: float
    group: Group


class Attachment(StepHooks):
    """The decay on one optimizer, as returned by :func:`attach`."""

    def __init__(
        self,
        optimizer: Optimizer,
        defaults: Defaults,
        lr: LearningRate,
        fused: bool | None,
        step: Step,
    ) -> None:
        super().__init__(optimizer)
        self.fused = fused
        self.step = step
        self._defaults = defaults
        self._lr = lr
        self._own_settings: dict[int, Group] = {}  # settings of each group before attach
        self._remembered: list[_Remembered] = []
        self._write_settings()
        self.register()
        warn_of_frozen(optimizer)

    def copy_to(self, optimizer: Optimizer) -> Attachment:
        """Attach the same decay to another optimizer, such as a copy, which has lost its hooks."""
        return Attachment(optimizer, self._defaults, self._lr, self.fused, self.step)

    def detach(self) -> None:
        """Remove the decay and restore the groups' settings. A second call does nothing."""
        if self._handles:
            super().detach()
            for index, group in enumerate(self.optimizer.param_groups):
                for key in DECAY_KEYS if index in self._own_settings else ():
                    group.pop(key, None)
                group.update(self._own_settings.get(index, {}))

    def rate(self, group: Group) -> float | Tensor:
        """Return the learning rate of the decay in this group."""
        lr = self._lr(group) if callable(self._lr) else self._lr
        if lr is None and self._lr is not None:
            raise TypeError("lr must be a number, got None from the function that was given as lr")
        return decay_rate(group, self.optimizer, lr)

    def before_state_dict(self) -> None:
        self._write_settings()

    def before_load_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._write_settings()
        return complete_checkpoint(state_dict, self.optimizer.param_groups)

    def before_step(self, *, has_closure: bool) -> None:
        self._write_settings()
        groups = self.optimizer.param_groups
        for group in groups:
            self.rate(group)  # raise for a bad learning rate before any weight changes
        self._remembered = []
        for group in groups:
            for i, param in enumerate(group["params"]):
                scale = scale_of(param, i, group)
                if scale and (has_closure or param.grad is not None):
                    # Neither an anchor's decay nor the proximal step needs the old weights.
                    copied = self.step == "decay" and not group["decay_auxiliary"]
                    old = param.detach().clone() if copied else param
                    self._remembered.append(_Remembered(param, old, scale, group))

    def after_step(self) -> None:
        moved = [one for one in self._remembered if one.param.grad is not None]
        self._remembered = []
        fused: dict[tuple[ModuleType, int, float], list[_Remembered]] = {}
        for one in moved:
            path = path_for(one.param, self.fused) if one.old is not one.param else None
            if path is None:
                self._decay_(one)
            else:
                fused.setdefault((path, id(one.group), one.scale), []).append(one)
        for (path, _, scale), alike in fused.items():
            group = alike[0].group
            params, olds = [one.param for one in alike], [one.old for one in alike]
            path.shrink_(params, olds, terms=group["decay"], lr=self.rate(group) * scale)

    def _write_settings(self) -> None:
        """Write the settings of all groups, including groups added since the last call."""
        for index, group in enumerate(self.optimizer.param_groups):
            own = {key: group[key] for key in DECAY_KEYS if key in group}
            self._own_settings.setdefault(index, own)
            write_settings(group, self._defaults)

    def _decay_(self, one: _Remembered) -> None:
        """By torch's own operations, on one weight."""
        penalty = as_penalty(one.group["decay"])
        rate = self.rate(one.group) * one.scale
        if penalty is None:
            return
        if self.step == "prox":
            one.param.copy_(penalty_prox(penalty, one.param, rate))
        elif one.group["decay_auxiliary"]:
            state = self.optimizer.state[one.param]
            decay_at_anchor_(one.param, state, one.group["decay_auxiliary"], penalty, rate)
        else:
            one.param.mul_(penalty.factor(one.old, rate))
