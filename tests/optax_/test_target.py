"""Pruning to a share of zeros along a ramp."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pdecay import Lp
from pdecay._core.ramp import cubic_ramp
from pdecay.optax import padam, sparsity_target

from .training import SCHEDULE, first_params, gradient, train


def history(tx, steps, params=None):
    params = first_params() if params is None else params
    state = tx.init(params)

    @jax.jit
    def step(t, state, params):
        updates, state = tx.update(gradient(params, t), state, params)
        return optax.apply_updates(params, updates), state

    for t in range(steps):
        params, state = step(t, state, params)
        yield params


def count(params):
    return int(sum(jnp.sum(w == 0) for w in jax.tree.leaves(params) if w.ndim >= 2))


def test_follows_the_cubic_ramp():
    tx = optax.chain(optax.adam(0.01), sparsity_target(0.9, 100))
    for t, params in enumerate(history(tx, 100), start=1):
        assert count(params) == round(600 * 0.9 * cubic_ramp(t, 10, 70))


@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_target_is_exact_after_the_decay(target):
    lam = lambda t: jnp.where(t < 140, 0.003, 0.0)  # noqa: E731
    tx = optax.chain(padam(SCHEDULE, decay=[(0.8, lam)]), sparsity_target(target, 200))
    assert count(train(tx)) == round(600 * target)


def test_removes_the_smallest_and_keeps_zeros():
    tx = sparsity_target(0.5, 10, start=0, end=0.1)
    params = jnp.array([[3.0, -1.0], [2.0, 0.5]])
    updates, state = tx.update(jnp.zeros_like(params), tx.init(params), params)
    params = optax.apply_updates(params, updates)
    assert params.tolist() == [[3.0, 0.0], [2.0, 0.0]]
    updates, state = tx.update(jnp.full_like(params, 0.5), state, params)
    assert optax.apply_updates(params, updates).tolist() == [[3.5, 0.0], [2.5, 0.0]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_equal_magnitudes_do_not_change_the_count(dtype):
    params = {"a": jnp.ones((10, 10), dtype), "b": -jnp.ones((5, 20), dtype)}
    tx = sparsity_target(0.55, 10, start=0, end=0.1)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert count(optax.apply_updates(params, updates)) == 110


def test_vectors_and_zero_tensors_take_no_part():
    params = {
        "bias": jnp.full(50, 1e-6),
        "zero": jnp.zeros((10, 10)),
        "kernel": first_params()["kernel"],
    }
    tx = optax.chain(optax.sgd(0.01), sparsity_target(0.7, 20))
    *_, last = history(tx, 20, params)
    assert (last["kernel"] == 0).sum() == 420
    assert (last["bias"] != 0).all()
    assert (last["zero"] != 0).all()


def test_ranking_equals_sorting_under_vmap():
    rng = np.random.default_rng(0)
    batch = jnp.asarray(
        rng.normal(size=(3, 40, 25)) * 10.0 ** rng.integers(-30, 20, (3, 40, 25)), jnp.float32
    )
    tx = sparsity_target(0.37, 10, start=0, end=0.1)
    updates, _ = jax.vmap(tx.update)(jnp.zeros_like(batch), jax.vmap(tx.init)(batch), batch)
    for w, new in zip(batch, batch + updates, strict=True):
        threshold = np.sort(np.abs(w).ravel())[370]
        np.testing.assert_array_equal(new, np.where(np.abs(w) < threshold, 0, w))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": 1.0}, "target must be above 0 and below 1"),
        ({"target": 0.0}, "target must be above 0 and below 1"),
        ({"total_steps": 0}, "total_steps must be a whole number"),
        ({"start": 0.8}, "0 <= start < end <= 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        sparsity_target(**{"target": 0.5, "total_steps": 10, **arguments})


def test_needs_params():
    tx = sparsity_target(0.5, 10)
    params = first_params()
    with pytest.raises(ValueError, match="sparsity_target needs the weights"):
        tx.update(params, tx.init(params))


def test_decay_does_not_have_to_reach_the_target():
    tx = optax.chain(padam(SCHEDULE, decay=Lp(0.8, 1e-6)), sparsity_target(0.3, 200))
    assert count(train(tx)) == 180
