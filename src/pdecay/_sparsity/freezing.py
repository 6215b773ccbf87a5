"""Keeping zeros at zero: :func:`freeze_zeros`, and the checks that an optimizer can do it.

For some p < 2 with lam > 0, zero is a fixed point of the decay for any positive scale, however
small. A scale of `HOLD` multiplies zeros by 0 and every other weight by 1, so the zeros themselves
act as the mask and no mask is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from pdecay._core.group_settings import HOLD, Group, decayed_params, penalty_of
from pdecay._core.parameters import released_in
from pdecay._optim.attachment import attachment_of, complete_groups, is_decaying
from pdecay._optim.hooks import check_not_local, unwrap, unwrapping
from pdecay._utils.user_warnings import warn_user


def freeze_zeros(optimizer: Optimizer | Sequence[Optimizer]) -> None:
    """Keep zeros at zero from now on, and train all other weights without decay.

    This sets ``group["decay_scale"]`` to a tiny positive number. Set it to 1 to decay again. Only
    zeros of decayed tensors are kept: :func:`param_groups` leaves out tensors that are all zero.

    Args:
        optimizer: as in :class:`SparsityTarget`.
    """
    optimizers = decaying_list(optimizer, "freeze_zeros")
    for one in optimizers:
        check_not_local(one, "freeze_zeros")
    if not any(group.get("decay") for one in optimizers for group in one.param_groups):
        raise ValueError(
            "freeze_zeros: no parameter group decays (decay=None), and only the decay keeps zeros "
            "at zero; give the optimizer a decay, such as Lp(1, 1e-2)"
        )
    hold_zeros(optimizers, "freeze_zeros")
    if released := [name for one in optimizers for name in released_in(one)]:
        warn_user(
            f"freeze_zeros: these tensors are all zero, but do not decay, so they do not stay "
            f"zero: {', '.join(released)}. pdecay.param_groups leaves out tensors that are all "
            "zero. To keep them, call requires_grad_(False) on them"
        )


def hold_zeros(optimizers: Sequence[Optimizer], caller: str) -> None:
    """Keep zeros at zero in optimizers that were checked before."""
    for one in optimizers:
        for group in zero_keeping_groups(one, caller):
            group["decay_scale"] = HOLD


def decaying(optimizer: object, caller: str) -> Optimizer:
    """Return the unwrapped optimizer, or raise TypeError if it has no p-norm weight decay."""
    inner = unwrap(optimizer)
    if not isinstance(inner, Optimizer) or not is_decaying(inner):
        raise TypeError(
            f"{caller} needs an optimizer that decays (PAdam, PSGD, or one that pdecay.attach was "
            f"called on), got {type(inner).__name__}"
        )
    complete_groups(inner)
    return inner


def decaying_list(optimizer: object, caller: str) -> list[Optimizer]:
    """Return one or several optimizers as a list of unwrapped, decaying optimizers."""
    given = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    optimizers = [decaying(one, caller) for one in given]
    for wrapper in (wrapper for one in given for wrapper in unwrapping(one)):
        # Schedule-free optimizers have it in their groups, wrappers that make one as an attribute.
        if hasattr(wrapper, "train_mode") or any("train_mode" in g for g in wrapper.param_groups):
            raise ValueError(
                f"{caller}: {type(wrapper).__name__} evaluates the model with averages of the "
                "weights, which are not zero where the weights are; use an optimizer with a "
                "learning rate schedule instead of a schedule-free one"
            )
    if not optimizers:
        raise ValueError(f"{caller}: the list of optimizers is empty")
    if len({*map(id, optimizers)}) < len(optimizers):
        raise ValueError(f"{caller}: the list has an optimizer twice")
    return optimizers


def zero_keeping_groups(optimizer: Optimizer, caller: str) -> list[Group]:
    """Return the groups with decayed weights, or raise ValueError if their zeros could move."""
    attachment = attachment_of(optimizer)
    if attachment is not None and attachment.step == "prox":
        raise ValueError(
            f'{caller} needs zeros that stay zero, and with step="prox" weights leave zero again; '
            'attach with step="decay"'
        )
    _check_rates(optimizer, caller)
    groups = [
        group
        for group in optimizer.param_groups
        if group.get("decay") and decayed_params(group)  # attach completes new groups later
    ]
    for group in groups:
        penalty = penalty_of(group)
        if penalty is None or not penalty.absorbs:
            raise ValueError(
                f"{caller}: zero is a fixed point only for some p < 2 with lam > 0, "
                f"got {group['decay']}"
            )
        if group["decay_auxiliary"]:
            raise ValueError(
                f"{caller} needs zeros that stay zero, and with auxiliary=Every(n) or Slow(rate) "
                "weights can leave zero; use Instant()"
            )
    return groups


def _check_rates(optimizer: Optimizer, caller: str) -> None:
    """Raise ValueError if the decay has its own learning rate and this is 0.

    A step at ``group["lr"]`` = 0 is no problem: it moves no weight.
    """
    attachment = attachment_of(optimizer)
    for group in optimizer.param_groups:
        rate = group.get("decay_lr")
        if rate is None and attachment is not None:
            rate = attachment.lr
            if callable(rate):
                rate = rate(group) if group.get("lr", 1) else None
        if rate is not None and rate == 0 and group.get("decay"):
            raise ValueError(
                f"{caller}: the decay's own learning rate (decay_lr, or lr of attach) is 0, and "
                "only the decay keeps zeros at zero; use None, or a number above 0"
            )
