"""The decay step for any torch optimizer, through the optimizer's own hooks.

    pdecay.attach(optimizer, Lp(0.8, 1e-3))

Before the optimizer's update, the weights that decay are copied. After it, they are multiplied by
the factor computed from the copies. Nothing else in the optimizer changes. The memory of the copies
is kept between steps: allocating it anew takes longer than copying.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from pdecay._core.auxiliary import Auxiliary, as_plain
from pdecay._core.group_settings import (
    DECAY_KEYS,
    Defaults,
    Group,
    complete_checkpoint,
    decayed_params,
    penalty_of,
    scales_of,
    write_settings,
)
from pdecay._core.parameters import warn_of_frozen
from pdecay._core.penalty import Decay, as_penalty
from pdecay._core.validation import check_flag, check_number
from pdecay._optim.engine import Copies, decay_rate, make_batches
from pdecay._optim.hooks import StepHooks, check_takes_hooks, find_hooks, local_optimizer, unwrap
from pdecay._optim.kernels.old_weights import OldWeights
from pdecay._optim.kernels.selection import may_use_c
from pdecay.prox import penalty_prox

Step = Literal["decay", "prox"]
_CHECKED_KEYS = (*DECAY_KEYS, "differentiable")
_Running = tuple[list[Tensor], "OldWeights | list[Tensor]"]  # weights, and their values before
LearningRate = float | Callable[[Group], float | Tensor] | None


def attach(
    optimizer: Optimizer,
    decay: Decay,
    *,
    auxiliary: Auxiliary | None = None,
    lr: LearningRate = None,
    fused: bool | None = None,
    step: Step = "decay",
) -> Attachment:
    """Add p-norm weight decay to an optimizer.

    Args:
        optimizer: any ``torch.optim.Optimizer``. Wrappers that hold the real one as
            ``.optimizer`` or, as SAM does, ``.base_optimizer`` are unwrapped.
        decay: the penalty for groups that have no ``"decay"`` of their own; see `params` and
            `decay` of :class:`PAdam`.
        auxiliary: the update rule of s, as in :class:`PAdam`. ``Every`` and ``Slow`` store one
            number for each weight and copy no weights.
        lr: the learning rate of the decay if it is not ``group["lr"]``: a number, or a function of
            the group for optimizers that adapt their step size, for instance
            ``lambda group: group["d"] * group["lr"]`` for Prodigy. It is called after the update.
        fused: True computes the factor and multiplies in one pass, with the relative error of
            :class:`PAdam`. False uses torch's own operations, exactly as
            ``w.mul_(penalty.factor(w_old, lr))``. None uses the fused C kernel on the CPU and
            ``torch.compile`` on CUDA, where they are available.
        step: "decay" is the paper's step. "prox" is the exact proximal step of the penalty, which
            for p <= 1 sets weights below a threshold to zero. It copies no weights, and is slower.

    Returns:
        A handle; its ``detach()`` removes the decay.

    Note:
        ``copy.deepcopy`` and ``pickle`` drop the hooks of any torch optimizer: attach to the copy
        again, or use :class:`PAdam` or :class:`PSGD`, which survive both.
    """
    optimizer = unwrap(optimizer)
    check_takes_hooks(optimizer, "attach")
    if is_decaying(optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} already has p-norm weight decay; "
            "detach() the first handle, or change group['decay']"
        )
    if lr is not None and not callable(lr):
        check_number("lr", lr)
    check_flag("fused", fused, optional=True)
    if step not in ("decay", "prox"):
        raise ValueError(f'step must be "decay" or "prox", got {step!r}')
    defaults = Defaults(as_penalty(decay), as_plain(auxiliary), may_be_in_groups=False)
    if step == "prox" and defaults.auxiliary:
        raise ValueError(
            'step="prox" uses no auxiliary variable: auxiliary must be Instant() or None, '
            f"got {auxiliary!r}"
        )
    for group in optimizer.param_groups:
        write_settings({**group}, defaults)  # on a copy: check all groups before changing any
        if lr is None and "lr" not in group:
            raise ValueError(
                f"{type(optimizer).__name__} has no group['lr']: pass lr=, a number or a function "
                "of the group"
            )
    return Attachment(optimizer, defaults, lr, fused, step)


def attachment_of(optimizer: Optimizer) -> Attachment | None:
    """Return the handle of :func:`attach` for this optimizer; None if nothing is attached."""
    return find_hooks(optimizer, Attachment)


def complete_groups(optimizer: Optimizer) -> None:
    """Write the decay settings to groups that were added since the last step.

    PAdam and PSGD do so by themselves, but not if a ZeroRedundancyOptimizer adds a group.
    """
    attachment, local = attachment_of(optimizer), local_optimizer(optimizer)
    if attachment is not None:
        attachment._write_settings()
    elif local is not optimizer and getattr(local, "_decays", False):
        for group in optimizer.param_groups:
            if "decay_1d" not in group:
                write_settings(group, local._defaults())  # type: ignore[attr-defined]  # a _Decaying


def is_decaying(optimizer: Optimizer) -> bool:
    """Return whether this optimizer's step applies p-norm weight decay."""
    inner = local_optimizer(optimizer)
    return getattr(inner, "_decays", False) or any(map(attachment_of, (optimizer, inner)))


class Attachment(StepHooks):
    """The handle that :func:`attach` returns: the decay of one optimizer."""

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
        self._written: dict[int, str] = {}  # settings of each group as they were last checked
        self._running: list[_Running] = []  # for each group, while the optimizer steps
        self._old: dict[int, OldWeights] = {}  # for each group
        self._has_closure = False  # the running step got a closure, which computes the gradients
        self._copies = Copies()  # where C cannot copy
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
            self._old, self._copies = {}, Copies()  # frees their memory
            for index, group in enumerate(self.optimizer.param_groups):
                for key in DECAY_KEYS if index in self._own_settings else ():
                    group.pop(key, None)
                group.update(self._own_settings.get(index, {}))

    def __repr__(self) -> str:
        optimizer = self._optimizer()
        name = "deleted optimizer" if optimizer is None else type(optimizer).__name__
        state = "" if self._handles else ", detached"
        return f"Attachment({name}, decay={self._defaults.penalty!r}, step={self.step!r}{state})"

    @property
    def lr(self) -> LearningRate:
        """The learning rate that was passed to :func:`attach`."""
        return self._lr

    def rate(self, group: Group) -> float | Tensor:
        """Return the learning rate of the decay in this group."""
        lr = self._lr(group) if callable(self._lr) else self._lr
        if lr is None and self._lr is not None:
            raise TypeError("the function passed as lr must return a number, got None")
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
        self._has_closure = has_closure
        self._running = [self._start(i, group, has_closure) for i, group in enumerate(groups)]

    def after_step(self) -> None:
        running, self._running = self._running, []
        for group, (params, old) in zip(self.optimizer.param_groups, running, strict=False):
            self._decay_group(params, old, group)

    def _start(self, index: int, group: Group, has_closure: bool) -> _Running:
        """Return the group's weights that may decay, and copies of them if they are needed."""
        if group["decay_auxiliary"]:  # at a scale of 0, too, weights get their anchors
            chosen = decayed_params(group)
        else:
            scales = scales_of(group["params"], group)
            chosen = [p for p, scale in zip(group["params"], scales, strict=True) if scale]
        params = [param for param in chosen if has_closure or param.grad is not None]
        # Neither the proximal step nor a slow auxiliary variable needs the old weights.
        if not params or not self._needs_old(group):
            return params, params
        old = self._old.get(index)
        if old is None:
            old = self._old[index] = OldWeights()
        return params, old if may_use_c(None) and old.copy(params) else self._copies.of(params)

    def _decay_group(
        self, params: list[Tensor], old: OldWeights | list[Tensor], group: Group
    ) -> None:
        # Only a closure decides late which weights move. Some steps clear the gradients.
        moved = [i for i, p in enumerate(params) if not self._has_closure or p.grad is not None]
        if not moved:
            return
        rate, all_moved = self.rate(group), len(moved) == len(params)
        if isinstance(old, OldWeights):
            if all_moved and may_use_c(self.fused):
                penalty, scale = penalty_of(group), group["decay_scale"]
                terms = [] if penalty is None else penalty.pairs()
                # A list has numbers for all parameters of the group. Those of `params` all decay.
                several = scales_of(params, group) if isinstance(scale, list) else None
                if old.decay_(terms, float(rate), several or [float(scale)] * len(params)):
                    return
            old = old.tensors()
        if not all_moved:
            params, old = [params[i] for i in moved], [old[i] for i in moved]
        fused = self.fused if self._needs_old(group) else False
        for batch in make_batches([params, old], group, rate, fused):
            if self.step == "decay":
                batch.decay_(batch.select(old), self.optimizer.state)
            elif batch.penalty is not None:
                for param in batch.params:
                    param.copy_(penalty_prox(batch.penalty, param, batch.rate))

    def _needs_old(self, group: Group) -> bool:
        return self.step == "decay" and not group["decay_auxiliary"]

    def _write_settings(self) -> None:
        """Write the settings of all groups, including groups added since the last call."""
        for index, group in enumerate(self.optimizer.param_groups):
            if self._written.get(index) == _settings_of(group):
                continue  # checked already
            own = {key: group[key] for key in DECAY_KEYS if key in group}
            self._own_settings.setdefault(index, own)
            write_settings(group, self._defaults)
            self._written[index] = _settings_of(group)


def _settings_of(group: Group) -> str:
    """Return a text that differs whenever a setting was changed, also in place: True == 1.0."""
    return repr([len(group["params"]), *map(group.get, _CHECKED_KEYS)])
