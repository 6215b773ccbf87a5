"""Pruning by magnitude to an exact share of zeros, along a ramp.

The decay makes weights small in the order of their importance, but a fixed lam leaves the final
share of zeros open. :func:`sparsity_target` closes the gap: along a cubic ramp it sets the smallest
weights of all tensors together to zero and keeps them there.

The threshold is the k-th smallest magnitude. Non-negative floating-point numbers are ordered as
their bit patterns, so it is found bit by bit, by counting how many weights are below a candidate.
That needs sums only: no sorted copy of the weights, and sharded arrays stay where they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pdecay._core.ramp import cubic_ramp
from pdecay._core.validation import check_count, check_number
from pdecay.optax._decay import Mask, Tree, check_params, has_nonzero, masked_to_weights

_STAGES = 200  # prunings along the ramp: ranking all weights at each step would be slow
_MOST = 2**31 - 1  # counts are 32-bit integers


class SparsityTargetState(NamedTuple):
    """The state of :func:`sparsity_target`."""

    count: jax.Array  # type: ignore[assignment]  # the number of steps
    takes_part: Tree  # for each weight tensor, False if it was all zero at first


def sparsity_target(
    target: float,
    total_steps: int,
    *,
    start: float = 0.1,
    end: float = 0.7,
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that prunes to a share of zeros; the last member of a chain.

    After t steps, the share ``target * (1 - (1 - x)^3)`` of the weights is zero, where x rises from
    0 to 1 between `start` and `end`. All tensors are ranked together by the magnitudes of their
    weights after the update. Once the ramp has begun, zeros stay zero. At its end their number is
    exact, unless the decay has made more. Put it after the decay::

        optax.chain(padam(1e-3, decay=Lp(0.8, 1e-2)), sparsity_target(0.9, total_steps=1000))

    Unlike :class:`pdecay.SparsityTarget` it does not set lam. To train the remaining weights
    without decay after the ramp, schedule lam: ``[(0.8, lambda t: jnp.where(t < 700, 1e-2, 0))]``.

    Args:
        target: the final share of zeros, above 0 and below 1.
        total_steps: the number of steps of the training.
        start, end: the start and the end of the ramp, as shares of `total_steps`.
        mask: the tensors that take part, as in :func:`p_norm_decay`. Tensors that are all zero
            when the state is initialised are neither pruned nor counted.
    """
    if not 0 < check_number("target", target) < 1:
        raise ValueError(f"target must be above 0 and below 1, got {target!r}")
    check_count("total_steps", total_steps)
    if not 0 <= check_number("start", start) < check_number("end", end) <= 1:
        raise ValueError(f"0 <= start < end <= 1 must hold, got start={start!r}, end={end!r}")
    first = int(start * total_steps)
    last = max(first + 1, round(end * total_steps))
    every = max(1, (last - first) // _STAGES)
    steps = [*range(first, last, every), last]
    shares = [target * cubic_ramp(step, first, last) for step in steps]

    def init(params: Tree) -> SparsityTargetState:
        size = sum(w.size for w in jax.tree.leaves(params))
        if size > _MOST:
            raise ValueError(
                f"sparsity_target ranks at most {_MOST} weights together, got {size}; use one for "
                "each part of the parameters, with optax.masked"
            )
        return SparsityTargetState(jnp.zeros((), jnp.int32), jax.tree.map(has_nonzero, params))

    def update(
        updates: Tree, state: SparsityTargetState, params: Tree | None = None
    ) -> tuple[Tree, SparsityTargetState]:
        check_params(params, "sparsity_target")
        step = optax.safe_increment(state.count)
        stage = jnp.searchsorted(jnp.array(steps), step)
        is_stage = (step == jnp.array(steps)[jnp.minimum(stage, len(steps) - 1)]) & (step >= first)
        weights, structure = jax.tree.flatten(params)
        takes_part = jax.tree.leaves(state.takes_part)
        moves = [
            u.astype(jnp.promote_types(u.dtype, w.dtype))
            for u, w in zip(jax.tree.leaves(updates), weights, strict=True)
        ]

        def prune() -> list[jax.Array]:
            size = sum(w.size for w in weights)
            counts = jnp.array([round(share * size) for share in shares], jnp.int32)
            excluded = sum(w.size * ~part for w, part in zip(weights, takes_part, strict=True))
            count = counts[stage] - jnp.round(jnp.array(shares)[stage] * excluded).astype(jnp.int32)
            return _smallest(
                [w + u for w, u in zip(weights, moves, strict=True)], takes_part, count
            )

        def keep() -> list[jax.Array]:
            return [jnp.zeros(w.shape, bool) for w in weights]

        pruned = jax.lax.cond(is_stage, prune, keep)
        began = state.count >= first
        new = [
            jnp.where(zero | (began & part & (w == 0)), -w.astype(u.dtype), u)
            for zero, part, w, u in zip(pruned, takes_part, weights, moves, strict=True)
        ]
        return jax.tree.unflatten(structure, new), SparsityTargetState(step, state.takes_part)

    return masked_to_weights(optax.GradientTransformation(init, update), mask)


def _smallest(
    weights: list[jax.Array], takes_part: list[jax.Array], count: jax.Array
) -> list[jax.Array]:
    """Return masks of the weights with the smallest magnitudes, `count` in total.

    Of equal magnitudes at the threshold, the first in memory are taken.
    """
    patterns = [
        jnp.where(
            part, jax.lax.bitcast_convert_type(jnp.abs(w).astype(jnp.float32), jnp.int32), _MOST
        )
        for w, part in zip(weights, takes_part, strict=True)
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
