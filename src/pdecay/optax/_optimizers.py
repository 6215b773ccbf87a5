"""Optimizers with the decay in the right place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from pdecay._core.auxiliary import Auxiliary
from pdecay._core.penalty import Lp
from pdecay.optax._decay import (
    Decay,
    Mask,
    Setting,
    Tree,
    check_order,
    nodes_of,
    p_norm_decay,
)

_DEFAULT_DECAY = Lp(1, 1e-2)
# The states of transformations that find their learning rate while they run. Older versions of
# optax have fewer.
_NAMES = (
    "COCOBState",
    "DAdaptAdamWState",
    "DoGState",
    "DoWGState",
    "MechanicState",
    "MomoAdamState",
    "MomoState",
    "ProdigyState",
    "ReduceLROnPlateauState",
)
_OWN_RATES = tuple(vars(optax.contrib)[name] for name in _NAMES if hasattr(optax.contrib, name))


def with_p_norm_decay(
    tx: optax.GradientTransformation | Callable[[Any], optax.GradientTransformation],
    decay: Decay,
    learning_rate: Setting,
    mask: Mask | None = None,
    *,
    auxiliary: Auxiliary | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer followed by p-norm weight decay.

    The order is fixed: first the whole update of `tx`, then the decay. Wrappers that skip or delay
    steps, such as ``optax.MultiSteps``, belong around the result.

    Args:
        tx: an optimizer that includes its learning rate, or a function of the learning rate that
            returns one, such as ``optax.lion``. With a function, the update and the decay always
            have the same learning rate.
        decay, learning_rate, mask, auxiliary: as in :func:`p_norm_decay`.

    Raises:
        ValueError: from ``init``, if `tx` skips or delays steps, contains
            ``optax.contrib.schedule_free``, or has a schedule or a rule of its own for the
            learning rate and `learning_rate` is a constant.

    Example:
        >>> schedule = optax.cosine_decay_schedule(1e-4, 1000)
        >>> tx = with_p_norm_decay(optax.lion, Lp(0.8, 1e-2), schedule)
        >>> accumulated = optax.MultiSteps(tx, every_k_schedule=4)
    """
    inner = tx(learning_rate) if callable(tx) else tx
    if not isinstance(inner, optax.GradientTransformation):
        advice = " (wrap with_p_norm_decay in it instead)" if _is_multi_steps(inner) else ""
        raise TypeError(
            "tx must be an optax.GradientTransformation or a function of the learning rate that "
            f"returns one, got {inner!r}{advice}"
        )
    chain = optax.chain(inner, p_norm_decay(learning_rate, decay, mask, auxiliary=auxiliary))

    def init(params: Tree) -> Any:
        state = chain.init(params)
        check_order(state[0], "with_p_norm_decay")
        if not callable(learning_rate):
            _check_constant_rate(state[0])
        return state

    return optax.GradientTransformationExtraArgs(init, chain.update)


def padam(
    learning_rate: Setting,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    decay: Decay = _DEFAULT_DECAY,
    mask: Mask | None = None,
    *,
    auxiliary: Auxiliary | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return Adam with p-norm weight decay, the counterpart of :class:`pdecay.PAdam`.

    Args:
        learning_rate: a number, an array, or a schedule.
        b1, b2, eps: as in ``optax.adam``.
        decay, mask, auxiliary: as in :func:`p_norm_decay`.
    """
    tx = optax.adam(learning_rate, b1, b2, eps)
    return with_p_norm_decay(tx, decay, learning_rate, mask, auxiliary=auxiliary)


def psgd(
    learning_rate: Setting,
    momentum: float | None = None,
    nesterov: bool = False,
    decay: Decay = _DEFAULT_DECAY,
    mask: Mask | None = None,
    *,
    auxiliary: Auxiliary | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return SGD with p-norm weight decay, the counterpart of :class:`pdecay.PSGD`.

    Args:
        learning_rate: a number, an array, or a schedule.
        momentum, nesterov: as in ``optax.sgd``.
        decay, mask, auxiliary: as in :func:`p_norm_decay`.
    """
    tx = optax.sgd(learning_rate, momentum, nesterov)
    return with_p_norm_decay(tx, decay, learning_rate, mask, auxiliary=auxiliary)


def _check_constant_rate(state: Any) -> None:
    """Raise an error if a transformation with this state has a scheduled learning rate."""
    injected = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
    if any("learning_rate" in node.hyperparams for node in nodes_of(state, injected)):
        raise ValueError(
            "the given tx holds its learning rate in inject_hyperparams, where the decay cannot "
            "see it. Put inject_hyperparams around: optax.inject_hyperparams(padam)(...)."
        )
    for node in nodes_of(state, _OWN_RATES):
        raise ValueError(
            f"the given tx changes its learning rate by its own rule ({type(node).__name__}), and "
            "the decay cannot see it. Use a schedule, or inject_hyperparams around the result; for "
            "a constant on purpose, pass a function of the step that returns it."
        )
    if nodes_of(state, (optax.ScaleByScheduleState,)):
        raise ValueError(
            "the given tx has a schedule, but learning_rate is a constant. Pass the schedule; for "
            "a constant on purpose, pass a function of the step that returns it."
        )


def _is_multi_steps(tx: object) -> bool:
    return isinstance(tx, optax.MultiSteps)
