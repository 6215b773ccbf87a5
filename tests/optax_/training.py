"""A small training that the tests of pdecay.optax share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS = 200
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.05, 20, STEPS)


def first_params(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    kernel, bias = rng.normal(size=(30, 20)) * 0.3, rng.normal(size=20) * 0.1
    return {"bias": jnp.asarray(bias, dtype), "kernel": jnp.asarray(kernel, dtype)}


def gradient(params: Any, step: Any) -> Any:
    """Return the noisy gradient of a quadratic whose minimum is sparse."""
    key = jax.random.fold_in(jax.random.key(1), step)

    def one(w: jax.Array) -> jax.Array:
        minimum = jax.random.normal(jax.random.key(2), w.shape)
        sparse = minimum * (jnp.abs(minimum) > 1)
        return (w - sparse + 0.3 * jax.random.normal(key, w.shape)).astype(w.dtype)

    return jax.tree.map(one, params)


def train(tx: Any, steps: int = STEPS, params: Any = None, repeat: int = 1) -> Any:
    """Train in one jitted loop and return the weights; call tx `repeat` times per gradient."""
    params = first_params() if params is None else params

    def step(t: Any, carry: Any) -> Any:
        params, state = carry
        updates, state = tx.update(gradient(params, t // repeat), state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(lambda carry: jax.lax.fori_loop(0, steps * repeat, step, carry))(
        (params, tx.init(params))
    )[0]


def zeros(params: Any) -> float:
    return float(jnp.mean(jnp.abs(params["kernel"].astype(jnp.float32)) < 1e-13))
