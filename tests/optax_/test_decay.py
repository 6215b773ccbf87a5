"""The decay step: its numbers, its settings, and the tensors that do not decay."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import pdecay
from pdecay import Every, Instant, Lp, Slow
from pdecay._core.penalty import as_penalty, factor_of
from pdecay.optax import p_norm_decay, padam, psgd, sparsity_target

from .training import SCHEDULE, first_params, train, zeros

W = np.array([[0.0, 1e-30, 1e-6], [0.01, -1.0, 30.0]], np.float32)


@jax.tree_util.register_dataclass
@dataclass
class Conv:
    """The parameters of a convolution as equinox has them."""

    weight: jax.Array
    bias: jax.Array


PRETRAINED = {
    "equinox": Conv(jnp.ones((3, 2, 5, 5)), jnp.ones((3, 1, 1))),
    "haiku": {"bn": {"scale": jnp.ones((1, 1, 1, 4)), "offset": jnp.ones((1, 1, 1, 4))}},
    "stack": {"norm": {"scale": jnp.ones((3, 8))}, "scale": {"kernel": jnp.ones((3, 8, 8))}},
    "flat": {"dense/kernel": jnp.ones((4, 4)), "dense/bias": jnp.ones((2, 2))},
    "flat tuples": {("dense", "kernel"): jnp.ones((4, 4)), ("dense", "bias"): jnp.ones((2, 2))},
}


def one_step(tx, w, u):
    w, u = jnp.asarray(w), jnp.asarray(u)
    update, _ = tx.update(u, tx.init(w), w)
    return optax.apply_updates(w, update)


@pytest.mark.parametrize(
    "penalty", [Lp(0, 1e-3), Lp(0.8, 0.1), Lp(1, 0.1), Lp(2, 0.5) + Lp(1, 0.1)]
)
@pytest.mark.parametrize("lr", [0.1, jnp.float32(0.1), lambda count: 0.1 + 0 * count])
def test_one_step_is_the_equation(penalty, lr):
    u = np.full_like(W, 0.05)
    new = one_step(p_norm_decay(lr, penalty), W, u)
    expected = (W + u).astype(np.float64) * penalty.factor(W.astype(np.float64), 0.1)
    assert (np.abs(new - expected) <= 1e-6 * np.abs(expected) + 1e-7 * np.abs(W)).all()


def test_zero_stays_zero_and_learning_rate_zero_changes_nothing():
    u = np.full_like(W, 0.05)
    assert one_step(p_norm_decay(0.1, Lp(0.8, 0.1)), W, u)[0, 0] == 0
    for lr in (0.0, jnp.float32(0), lambda count: 0.0 * count):
        np.testing.assert_array_equal(one_step(p_norm_decay(lr, Lp(0.8, 0.1)), W, u), W + u)


def test_no_decay_is_the_identity():
    for decay in (None, []):
        tx = p_norm_decay(0.1, decay)
        np.testing.assert_array_equal(one_step(tx, W, W), W + W)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_single(dtype):
    w = jnp.asarray(np.linspace(-1, 1, 64).reshape(8, 8), dtype)
    u = jnp.full_like(w, 0.003)
    new = one_step(p_norm_decay(0.1, Lp(0.8, 0.1)), w, u)
    single = [np.asarray(a, np.float32) for a in (w, u)]
    expected = (single[0] + single[1]) * Lp(0.8, 0.1).factor(single[0], 0.1)
    assert new.dtype == dtype
    np.testing.assert_array_equal(new, jnp.asarray(expected, dtype))


def test_complex_weights_decay_by_magnitude():
    w = np.array([[3 + 4j, 0.1j]], np.complex64)
    new = one_step(p_norm_decay(1.0, Lp(1, 1.0)), w, np.zeros_like(w))
    np.testing.assert_allclose(new, w * np.array([[1 / 1.2, 1 / 11]]), rtol=1e-6)


class TestSpared:
    def test_vectors_and_zero_tensors_do_not_decay_by_default(self):
        params = {"bias": jnp.ones(3), "zero": jnp.zeros((2, 2)), "kernel": jnp.ones((2, 2))}
        updates = jax.tree.map(lambda w: jnp.full_like(w, 0.5), params)
        tx = p_norm_decay(1.0, Lp(1, 1.0))
        for init in (tx.init, jax.jit(tx.init)):
            state = init(params)
            new, state = tx.update(updates, state, params)
            assert (new["bias"] == 0.5).all()
            assert (new["zero"] == 0.5).all()
            assert (new["kernel"] == -0.25).all()
            # a tensor that is initialised to zero never decays
            params_2 = optax.apply_updates(params, new)
            again, _ = tx.update(updates, state, params_2)
            assert (again["zero"] == 0.5).all()

    @pytest.mark.parametrize("tree", [*PRETRAINED, "flax"])
    def test_biases_and_norms_of_any_shape_are_left_alone(self, tree):
        # those of a trained network are not zero when the state is initialised
        params = jax.tree.map(jnp.ones_like, _attention() if tree == "flax" else PRETRAINED[tree])
        zeros = jax.tree.map(jnp.zeros_like, params)
        decay, target = p_norm_decay(1.0, Lp(1, 1.0)), sparsity_target(0.99, 1)
        for tx in (decay, target):
            new, _ = tx.update(zeros, tx.init(params), params)
            for path, update in jax.tree_util.tree_leaves_with_path(new):
                weight = any(name in jax.tree_util.keystr(path) for name in ("kernel", "weight"))
                assert (update != 0).any() == weight, path

    @pytest.mark.parametrize("as_function", [False, True])
    def test_mask_replaces_the_rule_of_dimensions(self, as_function):
        params = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
        mask = {"a": True, "b": False}
        tx = p_norm_decay(1.0, Lp(1, 1.0), (lambda params: mask) if as_function else mask)
        new, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
        assert (new["a"] == -0.5).all()
        assert (new["b"] == 0).all()


def _attention():
    layer = nnx.MultiHeadAttention(2, 4, 4, decode=False, rngs=nnx.Rngs(0))
    return nnx.state(layer, nnx.Param)


class TestSchedules:
    def test_p_and_lam_follow_their_schedules(self):
        p, lam = optax.linear_schedule(2.0, 0.5, 4), optax.linear_schedule(0.0, 0.4, 4)
        tx = p_norm_decay(0.5, [(p, lam), (1, 0.01)])
        w = jnp.asarray(W)
        state = tx.init(w)
        for t in range(6):
            update, state = jax.jit(tx.update)(jnp.zeros_like(w), state, w)
            factor = (Lp(float(p(t)), float(lam(t))) + Lp(1, 0.01)).factor(np.float64(w), 0.5)
            error = np.abs(w + update - w * factor)
            assert (error <= 2e-6 * np.abs(w * factor) + 1e-7 * np.abs(w)).all()

    def test_traced_settings_equal_numbers(self):
        pairs = [[0.8, 0.1], [2.0, 0.3]]
        expected = as_penalty(pairs).factor(W, 0.1)
        traced = jax.jit(factor_of)(jnp.asarray(W), pairs, 0.1)
        np.testing.assert_allclose(traced, expected, rtol=1e-6)
        np.testing.assert_allclose(factor_of(W, pairs, 0.1), expected, rtol=1e-6)
        assert (jax.jit(factor_of)(jnp.asarray(W), pairs, 0.0) == 1).all()

    def test_lam_has_a_gradient(self):
        def loss(lam):
            tx = p_norm_decay(0.1, [(1.0, lam)])
            w = jnp.ones((2, 2))
            update, _ = tx.update(jnp.zeros_like(w), tx.init(w), w)
            return jnp.sum(w + update)

        assert jax.grad(loss)(0.5) < 0


class TestAuxiliary:
    @pytest.mark.parametrize(
        "auxiliary", [Instant(), Every(7, start=0.5), Every(3), Slow(0.1), Slow(1, 2.0)]
    )
    @pytest.mark.parametrize("penalty", [Lp(0.8, 0.1), Lp(0.5, 0.02) + Lp(2, 0.3)])
    def test_equals_torch(self, auxiliary, penalty):
        rates = [0.0, *np.linspace(0.1, 0.02, 40), 0.0, 0.1]
        start = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
        w = torch.nn.Parameter(torch.tensor(start))
        optimizer = pdecay.PSGD([w], lr=1.0, decay=penalty, auxiliary=auxiliary)
        tx = psgd(lambda count: jnp.asarray(rates)[count], decay=penalty, auxiliary=auxiliary)
        params = jnp.asarray(start)
        state = tx.init(params)
        for rate in rates:
            optimizer.param_groups[0]["lr"] = float(rate)
            w.grad = w.detach() - 1
            optimizer.step()
            update, state = jax.jit(tx.update)(params - 1, state, params)
            params = optax.apply_updates(params, update)
            np.testing.assert_allclose(params, w.detach(), rtol=1e-4, atol=1e-6)

    def test_start_follows_a_schedule_of_p(self):
        p = optax.linear_schedule(1.0, 0.5, 10)
        tx = p_norm_decay(0.1, [(p, 0.1)], auxiliary=Every(5, start=4.0))
        for init in (tx.init, jax.jit(tx.init)):
            anchors = init(jnp.ones((2, 2))).inner_state.anchors
            np.testing.assert_allclose(anchors, 0.25, rtol=1e-6)  # 4 = anchor^(1 - 2)


class TestErrors:
    @pytest.mark.parametrize("decay", [3, "Lp", [0.8, 0.1], [(1, 2, 3)], Lp])
    def test_decay_of_a_wrong_type(self, decay):
        with pytest.raises(TypeError, match="a decay must be an Lp"):
            p_norm_decay(0.1, decay)

    def test_negative_numbers(self):
        with pytest.raises(ValueError, match="lam must be finite and >= 0, got -1"):
            padam(0.1, decay=[(1, -1)])
        with pytest.raises(ValueError, match="p must be finite and >= 0"):
            psgd(0.1, decay=[(-0.5, 1)])
        with pytest.raises(ValueError, match="learning_rate must be finite and >= 0"):
            p_norm_decay(-0.1, Lp(1, 1))
        with pytest.raises(TypeError, match="learning_rate must be a number"):
            p_norm_decay(None, Lp(1, 1))

    def test_update_without_params(self):
        tx = padam(0.1)
        params = first_params()
        with pytest.raises(ValueError, match="needs the weights"):
            tx.update(params, tx.init(params))


@pytest.mark.slow
def test_padam_and_psgd_are_adam_and_sgd_with_decay():
    decay = Lp(0.8, 0.1)
    for ours, plain in [
        (padam(SCHEDULE, 0.8, 0.9, 1e-6, decay), optax.adam(SCHEDULE, 0.8, 0.9, 1e-6)),
        (psgd(SCHEDULE, 0.9, nesterov=True, decay=decay), optax.sgd(SCHEDULE, 0.9, nesterov=True)),
    ]:
        chained = optax.chain(plain, p_norm_decay(SCHEDULE, decay))
        result = train(ours)
        assert 0.1 < zeros(result) < 0.9
        np.testing.assert_array_equal(result["kernel"], train(chained)["kernel"])
        bias = train(plain)["bias"]
        np.testing.assert_array_equal(result["bias"], bias)
