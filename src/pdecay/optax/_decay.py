"""The decay step as a gradient transformation.

An optax transformation returns an update u that is added to the weights, so the decay step

    w  <-  (w + u) / (1 + lr * sum_k lam_k * |w|^(p_k - 2))

is the update ``(w + u) * factor - w``. It needs the final u, learning rate included, hence the
place at the end of a chain. Where the factor is 0, the update is -w and the weight exactly 0.

A sum of floating-point numbers has the resolution of its larger term: a weight that shrinks by a
factor of k in one step has a relative error of up to k * 6e-8 in single precision, and is exactly
zero if k is above 2^24.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pdecay._core.auxiliary import Auxiliary, as_plain, first_anchor
from pdecay._core.names import EXCLUDED_NAMES
from pdecay._core.penalty import Penalty, as_penalty, factor_of
from pdecay._core.validation import check_number

Tree = Any  # a tree of arrays, as of the parameters
Mask = Any  # a tree of bool, or a function from the parameters to one
Setting = float | jax.Array | Callable[[Any], Any]  # a number, an array, or a schedule
Decay = Penalty | Sequence[tuple[Setting, Setting]] | None


class PNormDecayState(NamedTuple):
    """The state of :func:`p_norm_decay`."""

    # named as in optax's states, although tuples have a method `count`
    count: jax.Array  # type: ignore[assignment]  # the number of steps, for schedules
    decays: Tree  # for each weight tensor, False if it was all zero at first
    anchors: Tree  # for each weight tensor, the magnitude that s corresponds to; () for Instant
    anchor_steps: jax.Array  # the number of steps with a learning rate above 0


def p_norm_decay(
    learning_rate: Setting,
    decay: Decay,
    mask: Mask | None = None,
    *,
    auxiliary: Auxiliary | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return the p-norm weight decay as the last member of a chain.

    The decay of a weight depends on its final update. Everything that changes the update, above
    all ``scale_by_learning_rate``, must come before. Wrappers that skip or delay steps
    (``optax.MultiSteps``, ``optax.apply_if_finite``) must go around the whole chain.
    :func:`with_p_norm_decay` builds the chain and rejects these mistakes.

    Args:
        learning_rate: the learning rate of the rest of the chain: a number, an array, or the same
            schedule. Steps are counted here as optax counts them, from 0.
        decay: an :class:`pdecay.Lp`, a sum of them, or a sequence of pairs (p, lam). In a pair, p
            and lam can also be arrays, traced ones included, or schedules: functions of the step.
            None means no decay.
        mask: a tree of bool with the structure of the parameters, or a function that returns it;
            True decays. By default, tensors with fewer than two dimensions do not decay, nor do
            those that are named as biases and parameters of norms: bias, scale, offset, beta and
            gamma. Tensors that are all zero when the state is initialised never decay, because
            zero is a fixed point for p < 2.
        auxiliary: the update rule of s, as in :class:`pdecay.PAdam`.

    Half-precision weights are computed in single precision. Their updates are single precision
    too: do not cast them back before ``optax.apply_updates``, which casts the sum.

    Example:
        >>> from pdecay import Lp
        >>> schedule = optax.cosine_decay_schedule(1e-3, 1000)
        >>> tx = optax.chain(
        ...     optax.scale_by_lion(),
        ...     optax.scale_by_learning_rate(schedule),
        ...     p_norm_decay(schedule, Lp(0.8, 1e-2)),
        ... )

    References:
        Outmezguine and Levi, Decoupled Weight Decay for Any p Norm, 2024.
    """
    pairs = check_pairs(decay)
    plain = as_plain(auxiliary)
    lr = check_setting("learning_rate", learning_rate)
    if not pairs:
        return optax.with_extra_args_support(optax.identity())

    def init(params: Tree) -> PNormDecayState:
        anchors: Tree = ()
        if plain:
            anchors = jax.tree.map(lambda w: _first_anchor(w, pairs, plain[2]), params)
        # two arrays: jit cannot donate one buffer twice
        count, steps = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return PNormDecayState(count, jax.tree.map(has_nonzero, params), anchors, steps)

    def update(
        updates: Tree, state: PNormDecayState, params: Tree | None = None
    ) -> tuple[Tree, PNormDecayState]:
        check_params(params, "p_norm_decay")
        rate = setting_at(lr, state.count)
        now = [(setting_at(p, state.count), setting_at(lam, state.count)) for p, lam in pairs]
        anchors = state.anchors if plain else params

        def decayed(u: jax.Array, w: jax.Array, decays: jax.Array, anchor: jax.Array) -> jax.Array:
            w = at_least_single(w)
            new = (w + u.astype(w.dtype)) * _factor(anchor, now, rate)
            return jnp.where(decays, new - w, u.astype(w.dtype))

        new = jax.tree.map(decayed, updates, params, state.decays, anchors)
        steps = state.anchor_steps
        if plain:
            # a step with a learning rate of 0 changes nothing, the anchor included
            steps = jnp.where(rate > 0, optax.safe_increment(steps), steps)
            follows = (rate > 0) & (steps % plain[0] == 0)
            anchors = jax.tree.map(
                lambda a, w, u: jnp.where(follows, _follow(a, w, u, plain), a), anchors, params, new
            )
        count = optax.safe_increment(state.count)
        return new, PNormDecayState(count, state.decays, anchors if plain else (), steps)

    return masked_to_weights(optax.GradientTransformation(init, update), mask)


def masked_to_weights(
    tx: optax.GradientTransformation, mask: Mask | None
) -> optax.GradientTransformationExtraArgs:
    """Restrict a transformation to a mask, by default to matrices that are not biases or norms."""

    def matrices(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, w: jnp.ndim(w) >= 2 and _name(path) not in EXCLUDED_NAMES, params
        )

    if isinstance(mask, int | float | str) and mask not in (True, False):
        raise TypeError(f"mask must be a tree of bool or a function that returns one, got {mask!r}")
    chosen = matrices if mask is None else mask
    return optax.masked(tx, chosen, mask_compatible_extra_args=True)


def check_pairs(decay: Any) -> list[tuple[Setting, Setting]]:
    """Return a decay as pairs (p, lam).

    Raises:
        TypeError: if it is not a decay.
        ValueError: if a number in it is negative or not finite.
    """
    if isinstance(decay, Sequence) and not isinstance(decay, str):
        pairs = list(decay)
        if all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
            return [(check_setting("p", p), check_setting("lam", lam)) for p, lam in pairs]
    penalty = as_penalty(decay)
    return [(p, lam) for p, lam in penalty.pairs()] if penalty else []


def check_setting(name: str, value: Any) -> Setting:
    """Check a number and return it as a float; return a schedule or an array unchanged."""
    is_array = hasattr(value, "dtype") and not isinstance(value, numbers.Real)
    return value if callable(value) or is_array else check_number(name, value)


def setting_at(setting: Setting, count: Any) -> Any:
    """Return the value of a setting at a step."""
    return setting(count) if callable(setting) else setting


def check_params(params: Tree | None, name: str) -> None:
    """Raise an error if the caller of ``update`` left out the parameters."""
    if params is None:
        raise ValueError(
            f"{name} needs the weights: call tx.update(gradients, state, params), got params=None"
        )


def check_order(state: Any, caller: str) -> None:
    """Raise an error if a transformation with this state skips steps or evaluates averages."""
    wrappers = {optax.MultiStepsState: "MultiSteps", optax.ApplyIfFiniteState: "apply_if_finite"}
    for node in nodes_of(state, tuple(wrappers)):
        name = f"optax.{wrappers[type(node)]}"
        raise ValueError(
            f"the given tx contains {name}, which skips steps, but {caller} would act at every "
            f"call. Put {name} around {caller}(...)."
        )
    if nodes_of(state, (optax.contrib.ScheduleFreeState,)):
        raise ValueError(
            "the given tx contains optax.contrib.schedule_free, whose weights for evaluation are "
            f"averages that are not zero where {caller} makes the trained weights zero. Use the "
            "optimizer with a schedule instead."
        )


def nodes_of(state: Any, types: tuple[type, ...]) -> list[Any]:
    """Return the parts of a state that have one of the types."""
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, types))
    return [leaf for leaf in leaves if isinstance(leaf, types)]


def has_nonzero(w: jax.Array) -> jax.Array:
    """Return whether a tensor has an element that is not zero, as an array that jit can trace."""
    return jnp.any(w != 0)


def at_least_single(w: jax.Array) -> jax.Array:
    """Convert half-precision weights to single precision; return others unchanged."""
    return w.astype(jnp.promote_types(w.dtype, jnp.float32))


def _name(path: Sequence[Any]) -> str:
    """Return the name of a parameter at a path in a tree, without those of its modules."""
    *_, last = path or ("",)
    if isinstance(last, jax.tree_util.GetAttrKey) and last.name == "value" and len(path) > 1:
        last = path[-2]  # flax keeps the array in an attribute of a variable
    name = getattr(last, "key", getattr(last, "name", ""))
    if isinstance(name, tuple) and name:  # of flax.traverse_util.flatten_dict
        name = name[-1]
    return re.split("[/.]", str(name))[-1]


def _factor(w_old: jax.Array, pairs: list[tuple[Any, Any]], rate: Any) -> jax.Array:
    if all(isinstance(value, float) for pair in pairs for value in pair):
        penalty = as_penalty(pairs)
        assert penalty is not None
        return penalty.factor(w_old, rate)  # type: ignore[no-any-return]
    return factor_of(w_old, pairs, rate)  # type: ignore[no-any-return]


def _first_anchor(w: jax.Array, pairs: list[tuple[Any, Any]], start: float) -> jax.Array:
    dtype = jnp.abs(at_least_single(w)).dtype
    with jax.ensure_compile_time_eval():  # schedules of p have a value, also under jit
        first = [(float(setting_at(p, 0)), 0.0) for p, _ in pairs]
    return jnp.full_like(w, first_anchor(start, first, jnp.finfo(dtype)), dtype)


def _follow(
    anchor: jax.Array, w: jax.Array, update: jax.Array, plain: Sequence[float]
) -> jax.Array:
    magnitude = jnp.abs(at_least_single(w) + update)
    return jnp.hypot(math.sqrt(1 - plain[1]) * anchor, math.sqrt(plain[1]) * magnitude)
