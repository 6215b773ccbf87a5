"""Pruning to a share of zeros along a ramp."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import pdecay
from pdecay import Lp
from pdecay._core.ramp import cubic_ramp
from pdecay.optax import padam, sparsity_target, with_sparsity_target

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
        assert count(params) == round(600 * 0.9 * cubic_ramp(t, 10, 85))


@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_target_is_exact_after_the_decay(target):
    def lam(t):
        return jnp.where(t < 170, 0.003, 0.0)

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


@pytest.mark.parametrize(("size", "spared"), [(10, 5), (10, 0), (13, 25), (200, 33)])
def test_tensors_that_take_no_part_do_not_change_the_count(size, spared):
    params = {"w": jnp.arange(1.0, size + 1)[None], "zero": jnp.zeros((1, spared))}
    tx = sparsity_target(0.7, 10, start=0, end=0.1)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert (params["w"] + updates["w"] == 0).sum() == round(0.7 * size)


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
        ({"start": 0.9}, "0 <= start < end <= 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        sparsity_target(**{"target": 0.5, "total_steps": 10, **arguments})


@pytest.mark.parametrize("tx", [optax.adam, None])
def test_needs_an_optimizer(tx):
    with pytest.raises(TypeError, match=r"tx must be an optax\.GradientTransformation"):
        with_sparsity_target(tx, 0.5, 10)


def test_steps_without_jit_compile_once(caplog):
    tx = with_sparsity_target(optax.sgd(0.01), 0.9, 10)
    params = first_params()
    state = tx.init(params)
    for _ in range(3):
        caplog.clear()
        with jax.log_compiles():
            _, state = tx.update(params, state, params)
    assert "Compiling" not in caplog.text


def test_needs_params():
    tx = sparsity_target(0.5, 10)
    params = first_params()
    with pytest.raises(ValueError, match="sparsity_target needs the weights"):
        tx.update(params, tx.init(params))


def test_decay_does_not_have_to_reach_the_target():
    tx = optax.chain(padam(SCHEDULE, decay=Lp(0.8, 1e-6)), sparsity_target(0.3, 200))
    assert count(train(tx)) == 180


def test_adaptive_ranking_removes_what_torch_removes():
    steps = 60
    start = {name: np.asarray(w) for name, w in first_params().items()}
    params = {name: torch.nn.Parameter(torch.tensor(w)) for name, w in start.items()}
    optimizer = pdecay.PAdam(params.values(), lr=0.01, decay=Lp(0.8, 1e-2))
    pdecay.SparsityTarget(optimizer, 0.8, steps, rank="adaptive")
    tx = with_sparsity_target(optax.adam(0.01), 0.8, steps)
    scale = {"bias": np.float32(1), "kernel": np.float32(10) ** np.linspace(-2, 2, 20, dtype="f4")}

    def gradients(params, t):
        return {name: g * scale[name] for name, g in gradient(params, t).items()}

    ours = first_params()
    state = tx.init(ours)
    update = jax.jit(tx.update)
    for t in range(steps):
        for name, g in gradients(
            {k: jnp.asarray(w.detach().numpy()) for k, w in params.items()}, t
        ).items():
            params[name].grad = torch.tensor(np.asarray(g))
        optimizer.step()
        updates, state = update(gradients(ours, t), state, ours)
        ours = optax.apply_updates(ours, updates)
    theirs = params["kernel"].detach().numpy()
    assert count(ours) == (theirs == 0).sum() == 480
    assert ((np.asarray(ours["kernel"]) == 0) == (theirs == 0)).mean() > 0.99
    # weights with small gradients go first, whatever their magnitude
    zeros = np.asarray(ours["kernel"] == 0).mean(axis=0)
    assert zeros[:5].mean() > zeros[-5:].mean() + 0.3


def test_adaptive_ranking_ignores_infinite_gradients():
    params = first_params()
    tx = with_sparsity_target(optax.sgd(0.0), 0.5, 10)
    state = tx.init(params)
    _, state = tx.update(jax.tree.map(lambda w: w + jnp.inf, params), state, params)
    assert not state[1].inner_state.squares["kernel"].any()
    _, state = tx.update(params, state, params)
    assert jnp.isfinite(state[1].inner_state.squares["kernel"]).all()


def test_tensors_are_not_removed_before_their_first_gradient():
    """A head whose loss is added during the ramp would be all zero."""
    params = {"body": jnp.ones((8, 8)), "head": jnp.full((8, 8), 0.1)}
    tx = with_sparsity_target(optax.sgd(1e-3), 0.5, 20, start=0, end=0.5)
    state, rng = tx.init(params), np.random.default_rng(0)
    for t in range(20):
        gradients = {name: jnp.array(rng.standard_normal((8, 8))) for name in params}
        gradients["head"] *= t >= 5
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        zeros = {name: int(jnp.sum(w == 0)) for name, w in params.items()}
        if t < 5:
            share = 0.5 * cubic_ramp(t + 1, 0, 10)
            assert zeros == {"body": round(64 * share), "head": 0}
    assert sum(zeros.values()) == 64
    assert zeros["head"] < 64


def with_ranking(tx, ranking, *args, **settings):
    if ranking == "adaptive":
        return with_sparsity_target(tx, *args, **settings)
    return optax.chain(tx, sparsity_target(*args, **settings))


@pytest.mark.parametrize("ranking", ["magnitude", "adaptive"])
def test_updates_of_zeros_do_not_make_more_zeros(ranking):
    # the zeros are held, but their updates are larger than all other weights
    params = {"a": jnp.arange(1.0, 61.0).reshape(6, 10), "b": jnp.arange(61.0, 101.0)[None]}
    tx = with_ranking(optax.identity(), ranking, 0.5, 4, start=0, end=1)
    state = tx.init(params)
    counts = []
    for _ in range(6):
        updates = jax.tree.map(lambda w: jnp.where(w == 0, 1000.0, 0.001), params)
        updates, state = tx.update(updates, state, params)
        params = optax.apply_updates(params, updates)
        counts.append(count(params))
    assert counts == [29, 44, 49, 50, 50, 50]


def test_zeros_come_before_scores_that_are_rounded_to_zero():
    w = jnp.full((10, 10), 1e-32).at[5:].set(0.0)
    tx = with_sparsity_target(optax.identity(), 0.5, 10, start=0, end=0.1)
    updates, _ = tx.update(jnp.zeros_like(w), tx.init(w), w)
    assert ((w + updates == 0) == (w == 0)).all()


@pytest.mark.parametrize("ranking", ["magnitude", "adaptive"])
def test_target_is_exact_inside_sam(ranking):
    # sam chooses between two states by arithmetic, after which bools are integers
    tx = with_ranking(optax.sgd(0.1), ranking, 0.7, 20)
    *_, params = history(optax.contrib.sam(tx, optax.sgd(0.01)), 40)
    assert count(params) == 420


@pytest.mark.slow
@pytest.mark.parametrize("ranking", ["magnitude", "adaptive"])
@pytest.mark.parametrize(
    "tx",
    [optax.adam(1e-8), optax.adam(100.0), optax.sgd(0.1, momentum=0.9), optax.contrib.prodigy()],
    ids=["tiny", "huge", "momentum", "prodigy"],
)
def test_target_is_exact_for_other_optimizers(tx, ranking):
    for t, params in enumerate(history(with_ranking(tx, ranking, 0.7, 100), 100), start=1):
        assert count(params) == round(600 * 0.7 * cubic_ramp(t, 10, 85))
