"""The decay under the transformations of JAX and optax."""

import os
import pickle
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pdecay import Every, Lp
from pdecay.optax import p_norm_decay, padam, psgd, sparsity_target, with_sparsity_target

from .training import SCHEDULE, first_params, gradient, train, zeros

pytestmark = pytest.mark.slow

DECAY = Lp(0.8, 0.02) + Lp(2, 0.01)


def eager(tx, steps, params=None):
    params = first_params() if params is None else params
    state = tx.init(params)
    for t in range(steps):
        updates, state = tx.update(gradient(params, t), state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(a, b):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.parametrize("auxiliary", [None, Every(3)])
def test_jit_and_scan_equal_eager_steps(auxiliary):
    tx = padam(SCHEDULE, decay=DECAY, auxiliary=auxiliary)
    expected = eager(tx, 10)
    params = first_params()

    @jax.jit
    def scanned(params):
        def step(carry, t):
            params, state = carry
            updates, state = tx.update(gradient(params, t), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(10))[0][0]

    assert_close(scanned(params), expected)
    assert_close(train(tx, 10), expected)


@pytest.mark.parametrize("auxiliary", [None, Every(3)])
def test_state_and_weights_can_be_donated(auxiliary):
    tx = with_sparsity_target(padam(SCHEDULE, decay=DECAY, auxiliary=auxiliary), 0.8, 10)
    expected = train(tx, 10)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, t):
        updates, state = tx.update(gradient(params, t), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, first_params())
    state = tx.init(params)
    for t in range(10):
        params, state = step(params, state, t)
    assert_close(params, expected)


def test_vmap_trains_an_ensemble_with_one_lam_each():
    lams = jnp.array([0.0, 0.01, 0.1])

    def run(lam):
        return train(psgd(SCHEDULE, decay=[(0.8, lam)]), 30)

    kernels = jax.vmap(run)(lams)["kernel"]
    for lam, kernel in zip(lams, kernels, strict=True):
        single = train(psgd(SCHEDULE, decay=Lp(0.8, float(lam))), 30)["kernel"]
        np.testing.assert_allclose(kernel, single, rtol=1e-4, atol=1e-6)


def test_vmap_does_not_decay_members_that_start_at_zero():
    params = jnp.stack([jnp.zeros((2, 2)), jnp.ones((2, 2))])
    tx = p_norm_decay(1.0, Lp(1, 1.0))
    updates, _ = jax.vmap(tx.update)(jnp.full((2, 2, 2), 0.5), jax.vmap(tx.init)(params), params)
    assert updates[:, 0, 0].tolist() == [0.5, -0.25]


def test_inject_hyperparams_changes_the_learning_rate():
    tx = optax.inject_hyperparams(padam)(learning_rate=0.1, decay=DECAY)
    params = first_params()
    state = tx.init(params)
    state.hyperparams["learning_rate"] = jnp.float32(0.01)
    updates, _ = jax.jit(tx.update)(gradient(params, 0), state, params)
    expected = padam(0.01, decay=DECAY)
    assert_close(updates, expected.update(gradient(params, 0), expected.init(params), params)[0])


def test_inject_hyperparams_changes_p_and_lam():
    @optax.inject_hyperparams
    def optimizer(learning_rate, p, lam):
        return padam(learning_rate, decay=[(p, lam)])

    tx = optimizer(SCHEDULE, p=0.8, lam=optax.constant_schedule(0.02))
    assert_close(train(tx, 10), train(padam(SCHEDULE, decay=Lp(0.8, 0.02)), 10))


def test_masked_and_multi_transform_restrict_the_decay():
    expected = train(padam(SCHEDULE, decay=DECAY), 10)
    plain = train(optax.adam(SCHEDULE), 10)
    masked = optax.chain(
        optax.adam(SCHEDULE),
        optax.masked(p_norm_decay(SCHEDULE, DECAY), {"bias": False, "kernel": True}),
    )
    labels = {"bias": "dense", "kernel": "sparse"}
    parts = {"dense": optax.adam(SCHEDULE), "sparse": padam(SCHEDULE, decay=DECAY)}
    for tx in (masked, optax.multi_transform(parts, labels)):
        assert_close(train(tx, 10), expected)
    labels = {"bias": "sparse", "kernel": "dense"}
    assert_close(train(optax.multi_transform(parts, labels), 10), plain)


def test_saved_state_resumes_exactly():
    tx = optax.chain(padam(SCHEDULE, decay=DECAY, auxiliary=Every(3)), sparsity_target(0.8, 20))

    @jax.jit
    def step(t, params, state):
        updates, state = tx.update(gradient(params, t), state, params)
        return optax.apply_updates(params, updates), state

    params = first_params()
    state = tx.init(params)
    for t in range(20):
        if t == 7:
            params, state = pickle.loads(pickle.dumps(jax.device_get((params, state))))
        params, state = step(t, params, state)
    np.testing.assert_array_equal(params["kernel"], train(tx, 20)["kernel"])


def test_double_precision():
    with jax.enable_x64(True):
        w = jnp.asarray(np.random.default_rng(0).normal(size=(10, 10)))
        for lam in (0.1, lambda count: 0.1 + 0.0 * count):
            tx = p_norm_decay(0.01, [(0.8, lam)])
            update, _ = tx.update(jnp.zeros_like(w), tx.init(w), w)
            expected = np.asarray(w) * Lp(0.8, 0.1).factor(np.asarray(w), 0.01)
            assert update.dtype == jnp.float64
            np.testing.assert_allclose(w + update, expected, rtol=1e-12)
        tx = sparsity_target(0.5, 10, start=0, end=0.1)
        update, _ = jax.jit(tx.update)(jnp.zeros_like(w), tx.init(w), w)
        assert (w + update == 0).sum() == 50


def test_extra_arguments_reach_the_optimizer():
    tx = optax.chain(optax.contrib.reduce_on_plateau(), padam(0.1, decay=DECAY))
    params = first_params()
    tx.update(params, tx.init(params), params, value=jnp.float32(1.0))


def test_state_maps_over_parameters():
    tx = padam(0.1, decay=DECAY, auxiliary=Every(3))
    state = tx.init(first_params())
    moved = optax.tree.map_params(tx, lambda x: x, state)
    assert jax.tree.structure(moved) == jax.tree.structure(state)


SHARDED = """
import sys
sys.path.insert(0, sys.argv[1])
import jax, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pdecay import Lp, Slow
from pdecay.optax import padam, sparsity_target
from tests.optax_.training import SCHEDULE, first_params, gradient, train
assert len(jax.devices()) == 2
decay = padam(SCHEDULE, decay=Lp(0.8, 0.02), auxiliary=Slow(0.9))
tx = optax.chain(decay, sparsity_target(0.8, 10))
mesh = Mesh(np.array(jax.devices()), ("x",))
params = first_params()
params["kernel"] = jax.device_put(params["kernel"], NamedSharding(mesh, P("x")))
params["bias"] = jax.device_put(params["bias"], NamedSharding(mesh, P()))
state = jax.jit(tx.init)(params)
step = jax.jit(lambda t, s, p: tx.update(gradient(p, t), s, p))
for t in range(10):
    updates, state = step(t, state, params)
    params = optax.apply_updates(params, updates)
assert len(params["kernel"].sharding.device_set) == 2, params["kernel"].sharding
assert not params["kernel"].sharding.is_fully_replicated
single = train(tx, 10)
np.testing.assert_allclose(params["kernel"], single["kernel"], rtol=1e-4, atol=1e-5)
assert (np.asarray(params["kernel"]) == 0).sum() == 480
"""


def test_sharded_arrays(request):
    run_with(request, SHARDED, {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"})


def run_with(request, code, variables):
    result = subprocess.run(
        [sys.executable, "-c", code, str(request.config.rootpath)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_training_makes_zeros():
    assert 0.3 < zeros(train(padam(SCHEDULE, decay=DECAY))) < 0.7
