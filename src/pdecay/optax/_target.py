"""Pruning to an exact share of zeros, along a ramp.

The decay makes weights small in the order of their importance, but a fixed lam leaves the final
share of zeros open. :func:`sparsity_target` closes the gap: along a cubic ramp it sets the smallest
weights of all tensors together to zero and keeps them there. It sees only the final update, so it
ranks by magnitude. :func:`with_sparsity_target` goes around an optimizer, sees the gradients too,
and ranks by the length of a weight in Adam's metric.

The threshold is the k-th smallest score. Non-negative floating-point numbers are ordered as
their bit patterns, so it is found bit by bit, by counting how many weights are below a candidate.
That needs sums only: no sorted copy of the weights, and sharded arrays stay where they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pdecay._core.ramp import check_ramp, check_target, cubic_ramp, ramp_steps
from pdecay._core.validation import check_count
from pdecay.optax._decay import (
    Mask,
    Tree,
    check_order,
    check_params,
    has_nonzero,
    masked_to_weights,
)

_MOST = 2**31 - 1  # counts are 32-bit integers
_BETA = 0.999  # of the running mean of squared gradients, as in pdecay.SparsityTarget
_SMALLEST_SQUARE = 1e-36


class SparsityTargetState(NamedTuple):
    """The state of :func:`sparsity_target` and a part of that of :func:`with_sparsity_target`."""

    count: jax.Array  # type: ignore[assignment]  # the number of steps
    takes_part: Tree  # for each weight tensor, False if it was all zero at first
    squares: Tree  # for each weight tensor, the running mean of squared gradients; () if not needed


def sparsity_target(
    target: float,
    total_steps: int,
    *,
    start: float = 0.1,
    end: float = 0.85,
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that prunes to a share of zeros; the last member of a chain.

    After t steps, the share ``target * (1 - (1 - x)^3)`` of the weights is zero, where x rises from
    0 to 1 between `start` and `end`. All tensors are ranked together by the magnitudes of their
    weights after the update. Once the ramp has begun, zeros stay zero. At its end their number is
    exact, unless the decay has made more. Put it after the decay::

        optax.chain(padam(1e-3, decay=Lp(0.8, 1e-2)), sparsity_target(0.9, total_steps=1000))

    It does not change lam. To train the remaining weights without decay after the ramp, schedule
    lam: ``[(0.8, lambda t: jnp.where(t < 850, 1e-2, 0))]``.

    Args:
        target, total_steps, start, end: as in :class:`pdecay.SparsityTarget`.
        mask: the tensors that take part, as in :func:`p_norm_decay`. The others are neither
            pruned nor counted.
    """
    tx = _pruning(target, total_steps, start, end, is_adaptive=False)
    return masked_to_weights(tx, mask)


def with_sparsity_target(
    tx: optax.GradientTransformation,
    target: float,
    total_steps: int,
    *,
    start: float = 0.1,
    end: float = 0.85,
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that ends at a share of zeros, ranked as :class:`pdecay.SparsityTarget`.

    As :func:`sparsity_target` after `tx`, but weights are ranked by ``|w| * v^(1/4)``, their length
    in Adam's metric. v is the running mean of the squared gradients that `tx` gets; it costs one
    more array for each weight. Small weights that matter to the loss are then kept longer.

    Args:
        tx: an optimizer, with or without decay. Wrappers that skip or delay steps, such as
            ``optax.MultiSteps``, belong around the result. ``optax.lookahead`` around it undoes
            the zeros, because it averages the weights of different steps.
        target, total_steps, start, end, mask: as in :func:`sparsity_target`. Weights that `tx`
            leaves unchanged are pruned, too: exclude frozen tensors by the mask.

    Raises:
        ValueError: from ``init``, if `tx` skips or delays steps, or contains
            ``optax.contrib.schedule_free``.

    Example:
        >>> tx = with_sparsity_target(optax.adam(1e-3), 0.9, total_steps=1000)
    """
    # init rejects MultiSteps and says where it belongs
    if not isinstance(tx, optax.GradientTransformation | optax.MultiSteps):
        raise TypeError(
            f"tx must be an optax.GradientTransformation such as optax.adam(1e-3), got {tx!r}"
        )
    inner = optax.with_extra_args_support(tx)
    pruning = masked_to_weights(_pruning(target, total_steps, start, end, is_adaptive=True), mask)

    def init(params: Tree) -> tuple[Any, Any]:
        state = inner.init(params)
        check_order(state, "with_sparsity_target")
        return state, pruning.init(params)

    def update(
        updates: Tree, state: tuple[Any, Any], params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, tuple[Any, Any]]:
        new, inner_state = inner.update(updates, state[0], params, **extra)
        new, own_state = pruning.update(new, state[1], params, gradients=updates)
        return new, (inner_state, own_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _pruning(
    target: float, total_steps: int, start: float, end: float, is_adaptive: bool
) -> optax.GradientTransformationExtraArgs:
    check_target("target", target)
    check_count("total_steps", total_steps)
    check_ramp(start, end)
    first, last, every = ramp_steps(start, end, total_steps)
    steps = [*range(first, last, every), last]
    shares = [target * cubic_ramp(step, first, last) for step in steps]

    def init(params: Tree) -> SparsityTargetState:
        size = sum(w.size for w in jax.tree.leaves(params))
        if size > _MOST:
            raise ValueError(
                f"sparsity_target ranks at most {_MOST} weights together, got {size}; use one for "
                "each part of the parameters, with optax.masked"
            )
        squares: Tree = ()
        if is_adaptive:
            squares = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), params)
        takes_part = jax.tree.map(has_nonzero, params)
        return SparsityTargetState(jnp.zeros((), jnp.int32), takes_part, squares)

    def update(
        updates: Tree,
        state: SparsityTargetState,
        params: Tree | None = None,
        *,
        gradients: Tree = None,
        **_: Any,
    ) -> tuple[Tree, SparsityTargetState]:
        check_params(params, "sparsity_target")
        result: tuple[Tree, SparsityTargetState] = pruned(updates, state, params, gradients)
        return result

    @jax.jit  # for callers without jit, for whom JAX would compile `cond` at each step
    def pruned(
        updates: Tree, state: SparsityTargetState, params: Tree, gradients: Tree
    ) -> tuple[Tree, SparsityTargetState]:
        step = optax.safe_increment(state.count)
        stage = jnp.minimum(jnp.searchsorted(jnp.array(steps), step), len(steps) - 1)
        weights, structure = jax.tree.flatten(params)
        # wrappers that choose between states by arithmetic turn bool into int, and ~1 is not False
        takes_part = [part != 0 for part in jax.tree.leaves(state.takes_part)]
        moves = [
            u.astype(jnp.promote_types(u.dtype, w.dtype))
            for u, w in zip(jax.tree.leaves(updates), weights, strict=True)
        ]
        began = state.count >= first
        held = [began & part & (w == 0) for w, part in zip(weights, takes_part, strict=True)]
        squares = jax.tree.map(_mean_square, state.squares, gradients) if is_adaptive else ()

        def prune() -> list[jax.Array]:
            ranked = takes_part
            if is_adaptive:
                v = jax.tree.leaves(squares)
                ranked = _with_gradients(takes_part, v, is_last=stage == len(steps) - 1)
            asked = _count_at(shares, stage, weights, ranked)
            moved = [w + u for w, u in zip(weights, moves, strict=True)]
            zeros = [
                zero | (new.astype(w.dtype) == 0)
                for zero, new, w in zip(held, moved, weights, strict=True)
            ]
            scores = [jnp.abs(new) for new in moved]
            if is_adaptive:
                scores = [_length(x, square) for x, square in zip(scores, v, strict=True)]
            return _smallest(scores, zeros, ranked, asked)

        def keep() -> list[jax.Array]:
            return [jnp.zeros(w.shape, bool) for w in weights]

        lowest = jax.lax.cond(step == jnp.array(steps)[stage], prune, keep)
        new = [
            jnp.where(chosen | zero, -w.astype(u.dtype), u)
            for chosen, zero, w, u in zip(lowest, held, weights, moves, strict=True)
        ]
        state = SparsityTargetState(step, state.takes_part, squares)
        return jax.tree.unflatten(structure, new), state

    return optax.GradientTransformationExtraArgs(init, update)


def _count_at(
    shares: list[float], stage: jax.Array, weights: list[jax.Array], ranked: list[jax.Array]
) -> jax.Array:
    """Return the number of zeros at a stage: its share of the weights in ranked tensors."""
    size = sum(w.size for w in weights)
    counts = [round(share * size) for share in shares]
    rests = [share * size - count for share, count in zip(shares, counts, strict=True)]
    spared = sum(w.size * ~part for w, part in zip(weights, ranked, strict=True))
    # The whole numbers are exact; the small rest makes it one rounding, not two.
    fewer = jnp.round(jnp.array(shares)[stage] * spared - jnp.array(rests)[stage])
    return jnp.array(counts, jnp.int32)[stage] - fewer.astype(jnp.int32)


def _mean_square(mean: jax.Array, gradient: jax.Array) -> jax.Array:
    square = jnp.square(jnp.abs(gradient).astype(jnp.float32))
    # one infinite gradient would make the mean infinite for good
    return jnp.where(jnp.isfinite(square).all(), _BETA * mean + (1 - _BETA) * square, mean)


def _with_gradients(
    takes_part: list[jax.Array], squares: list[jax.Array], *, is_last: jax.Array
) -> list[jax.Array]:
    """Return for each tensor whether it is ranked: not before its first gradient.

    Its weights would come first, and a head whose loss is added later would be removed before its
    training starts. At the last stage, all tensors are ranked: the target is met in any case.
    """
    had = [part & jnp.any(square > 0) for part, square in zip(takes_part, squares, strict=True)]
    every = is_last | ~jnp.any(jnp.array(had))
    return [part & (every | one) for part, one in zip(takes_part, had, strict=True)]


def _length(magnitude: jax.Array, square: jax.Array) -> jax.Array:
    """Return ``|w| * v^(1/4)``; weights without any gradient rank first, by magnitude."""
    return magnitude.astype(jnp.float32) * jnp.maximum(square, _SMALLEST_SQUARE) ** 0.25


def _smallest(
    scores: list[jax.Array],
    zeros: list[jax.Array],
    takes_part: list[jax.Array],
    count: jax.Array,
) -> list[jax.Array]:
    """Return masks of the weights with the smallest scores, `count` in total.

    Weights that are zero in any case come before all others, whatever their scores: a zero that
    is held has the score of the update that it does not make, and the score of a tiny weight may
    be rounded to 0. Of equal scores at the threshold, the first in memory are taken.
    """
    patterns = [
        jnp.where(zero, -1, jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32))
        for x, zero in zip(scores, zeros, strict=True)
    ]
    patterns = [
        jnp.where(part, bits, _MOST) for bits, part in zip(patterns, takes_part, strict=True)
    ]

    def below(threshold: Any) -> Any:
        return sum(jnp.sum(bits < threshold, dtype=jnp.int32) for bits in patterns)

    def add_bit(i: Any, threshold: jax.Array) -> jax.Array:
        higher = threshold | (jnp.int32(1) << jnp.int32(30 - i))
        return jnp.where(below(higher) < count, higher, threshold)

    threshold = jax.lax.fori_loop(0, 31, add_bit, jnp.zeros((), jnp.int32))
    missing = count - below(threshold)
    masks = []
    for bits in patterns:
        equal = bits == threshold
        rank = jnp.cumsum(equal.ravel(), dtype=jnp.int32).reshape(equal.shape)
        masks.append((bits < threshold) | (equal & (rank <= missing)))
        missing = missing - jnp.sum(equal, dtype=jnp.int32)
    return masks
