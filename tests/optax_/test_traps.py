"""Wrong combinations of the decay with optax change the sparsity; the wrapper rejects them."""

import jax
import jax.numpy as jnp
import optax
import pytest

from pdecay import Lp
from pdecay.optax import p_norm_decay, padam, with_p_norm_decay, with_sparsity_target

from .training import SCHEDULE, first_params, train, zeros

pytestmark = pytest.mark.slow

DECAY = Lp(0.8, 0.02)


@pytest.fixture(scope="module")
def right():
    return train(padam(SCHEDULE, decay=DECAY))


def test_decay_before_scaling_by_the_learning_rate_gives_fewer_zeros(right):
    wrong = optax.chain(
        optax.scale_by_adam(), p_norm_decay(SCHEDULE, DECAY), optax.scale_by_learning_rate(SCHEDULE)
    )
    assert zeros(train(wrong)) < 0.1 * zeros(right)


def test_wrapper_rejects_a_constant_learning_rate_with_a_scheduled_optimizer(right):
    wrong = optax.chain(optax.adam(SCHEDULE), p_norm_decay(0.05, DECAY))
    assert abs(zeros(train(wrong)) - zeros(right)) > 0.05
    with pytest.raises(ValueError, match="has a schedule, but learning_rate is a constant"):
        with_p_norm_decay(optax.adam(SCHEDULE), DECAY, 0.05).init(first_params())
    # given a function, the wrapper passes the same schedule to the optimizer
    assert (
        train(with_p_norm_decay(optax.adam, DECAY, SCHEDULE))["kernel"] == right["kernel"]
    ).all()


def test_wrapper_rejects_inject_hyperparams_inside(right):
    inside = optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE)
    with pytest.raises(ValueError, match="Put inject_hyperparams around"):
        with_p_norm_decay(inside, DECAY, 0.05).init(first_params())
    around = optax.inject_hyperparams(padam)(learning_rate=SCHEDULE, decay=DECAY)
    assert zeros(train(around)) == pytest.approx(zeros(right), abs=0.01)


def test_wrapper_rejects_multi_steps_inside(right):
    inner = optax.MultiSteps(optax.adam(SCHEDULE), 4)
    wrong = optax.chain(inner.gradient_transformation(), p_norm_decay(SCHEDULE, DECAY))
    assert abs(zeros(train(wrong, repeat=4)) - zeros(right)) > 0.05
    with pytest.raises(ValueError, match=r"Put optax\.MultiSteps around with_p_norm_decay"):
        with_p_norm_decay(inner.gradient_transformation(), DECAY, SCHEDULE).init(first_params())
    with pytest.raises(TypeError, match="wrap with_p_norm_decay in it instead"):
        with_p_norm_decay(inner, DECAY, SCHEDULE)
    around = optax.MultiSteps(padam(SCHEDULE, decay=DECAY), 4)
    assert zeros(train(around, repeat=4)) == pytest.approx(zeros(right), abs=0.01)


def with_bad_steps(tx):
    """Make every second gradient infinite."""

    def update(updates, state, params):
        count, inner = state
        bad = jnp.where(count % 2 == 1, jnp.inf, 0.0)
        updates, inner = tx.update(jax.tree.map(lambda g: g + bad, updates), inner, params)
        return updates, (count + 1, inner)

    return optax.GradientTransformation(
        lambda params: (jnp.zeros((), jnp.int32), tx.init(params)), update
    )


def test_wrapper_rejects_apply_if_finite_inside(right):
    inner = optax.apply_if_finite(optax.adam(SCHEDULE), 10**6)
    wrong = optax.chain(inner, p_norm_decay(SCHEDULE, DECAY))
    with pytest.raises(ValueError, match=r"Put optax\.apply_if_finite around with_p_norm_decay"):
        with_p_norm_decay(inner, DECAY, SCHEDULE).init(first_params())
    around = optax.apply_if_finite(padam(SCHEDULE, decay=DECAY), 10**6)
    assert zeros(train(with_bad_steps(around), repeat=2)) == pytest.approx(zeros(right), abs=0.01)
    assert abs(zeros(train(with_bad_steps(wrong), repeat=2)) - zeros(right)) > 0.05


@pytest.mark.parametrize(
    "inner",
    [optax.MultiSteps(optax.sgd(0.1), 4), optax.apply_if_finite(optax.sgd(0.1), 5)],
    ids=["MultiSteps", "apply_if_finite"],
)
def test_target_rejects_an_optimizer_that_skips_steps(inner):
    """Its ramp counts calls and would end after a quarter of the steps."""
    with pytest.raises(ValueError, match=r"Put optax\.\w+ around with_sparsity_target"):
        with_sparsity_target(inner, 0.8, 40).init(first_params())


@pytest.mark.parametrize(
    "inner",
    [
        optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
        optax.contrib.prodigy(),
        optax.contrib.dowg(),
        optax.contrib.mechanize(optax.adam(0.1)),
    ],
)
def test_a_learning_rate_that_the_decay_cannot_see_is_rejected(inner):
    """The updates become small while the decay stays as strong as at first."""
    with pytest.raises(ValueError, match="changes its learning rate by its own rule"):
        with_p_norm_decay(inner, DECAY, 0.1).init(first_params())
    with_p_norm_decay(inner, DECAY, lambda count: 0.1).init(first_params())  # on purpose


def test_casting_updates_to_bfloat16_loses_the_decay():
    # the step divides the weight by 1000: its update is -0.0999, which bfloat16 rounds too coarsely
    w = jnp.full((2, 2), 0.1)
    tx = p_norm_decay(1.0, Lp(2, 999.0))
    update, _ = tx.update(jnp.zeros_like(w), tx.init(w), w)
    assert jnp.allclose(w + update, 1e-4, rtol=1e-3)
    assert not jnp.allclose(w + update.astype(jnp.bfloat16), 1e-4, rtol=0.5)


def test_bfloat16_weights_get_float32_updates(right):
    params = first_params(jnp.bfloat16)
    tx = padam(SCHEDULE, decay=DECAY)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["kernel"].dtype == jnp.float32
    half = train(tx, params=params)
    assert half["kernel"].dtype == jnp.bfloat16
    assert zeros(half) == pytest.approx(zeros(right), abs=0.03)


def test_multi_steps_skips_infinite_gradients_of_bfloat16_weights():
    # apply_if_finite needs updates with the gradients' dtype, but the updates are float32
    params = first_params(jnp.bfloat16)
    tx = optax.MultiSteps(padam(0.05, decay=DECAY), 1, should_skip_update_fn=optax.skip_not_finite)
    state = tx.init(params)
    bad = jax.tree.map(lambda w: w + jnp.inf, params)
    updates, state = jax.jit(tx.update)(bad, state, params)
    assert not updates["kernel"].any()
    updates, state = jax.jit(tx.update)(params, state, params)
    assert updates["kernel"].all()
    assert updates["kernel"].dtype == jnp.float32


def test_lp_rejects_a_traced_lam_and_pairs_accept_it():
    def share(lam):
        with pytest.raises(TypeError, match="lam must be a number"):
            Lp(0.8, lam)
        tx = p_norm_decay(0.1, [(0.8, lam)])
        w = first_params()["kernel"]
        return w + tx.update(jnp.zeros_like(w), tx.init(w), w)[0]

    w = first_params()["kernel"]
    expected = w * Lp(0.8, 0.1).factor(w, 0.1)
    assert jnp.allclose(jax.jit(share)(0.1), expected, rtol=1e-6)


@pytest.mark.parametrize("mask", [3, 0.5, "kernel"])
def test_mask_must_be_a_tree_of_bool(mask):
    with pytest.raises(TypeError, match="mask must be a tree of bool or a function"):
        padam(0.1, mask=mask)


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: with_p_norm_decay(tx, DECAY, SCHEDULE),
        lambda tx: with_sparsity_target(tx, 0.5, 10),
    ],
    ids=["decay", "target"],
)
def test_wrappers_reject_schedule_free(around):
    tx = optax.contrib.schedule_free_adamw(0.05)
    with pytest.raises(ValueError, match="weights for evaluation are averages"):
        around(tx).init(first_params())
