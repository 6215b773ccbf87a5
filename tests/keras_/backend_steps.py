"""Single steps and settings of the optimizers, on the backend of this process."""

import inspect
import signal
import sys

import keras
import numpy as np
import pytest
from keras import ops

import pdecay.keras as pk
from pdecay import Lp
from pdecay.keras._optimizers import decay_factor
from tests.contract.frameworks import PENALTIES, compiled_step

BACKEND = keras.backend.backend()


def variable(value, name="kernel", dtype="float32"):
    return keras.Variable(np.asarray(value, "float32"), dtype=dtype, name=name)


def array(value):
    return np.array(ops.convert_to_numpy(ops.cast(value, "float32")))


def ones(*shape):
    return np.ones(shape, "float32")


def test_torch_is_imported_on_its_backend_only():
    assert ("torch" in sys.modules) == (BACKEND == "torch")


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("lr", [0.01, 1e-12, 0.0])
def test_factor_equals_penalty(name, lr):
    w = np.float32([-3.0, -1e-3, -0.0, 0.0, 1e-12, 0.1, 1e4])
    factor = array(decay_factor(PENALTIES[name], ops.convert_to_tensor(w), lr))
    expected = PENALTIES[name].factor(w, lr)
    if not lr and PENALTIES[name].absorbs:
        expected[w == 0] = 0.0
    np.testing.assert_allclose(factor, expected, rtol=2e-5, atol=1e-30)


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has no float64 unless it is enabled")
@pytest.mark.parametrize("lr", [0.01, 0.0])
def test_factor_in_double_precision(lr):
    w = np.array([-3.0, 0.0, 1e-12, 0.1])
    factor = ops.convert_to_numpy(decay_factor(Lp(0.8, 0.1), ops.convert_to_tensor(w), lr))
    assert factor.dtype == np.float64
    np.testing.assert_allclose(factor[w != 0], Lp(0.8, 0.1).factor(w, lr)[w != 0], rtol=1e-6)
    assert factor[1] == 0


def test_subnormal_weights_become_zero():
    w = ops.convert_to_tensor(np.float32([1e-39, 1.0]))
    assert array(decay_factor(Lp(0.8, 0.1), w, 0.1))[0] == 0


def test_factor_ignores_terms_and_scales_of_zero():
    w = ops.convert_to_tensor(np.float32([0.0, 1.0]))
    assert array(decay_factor(Lp(0.8, 0.0), w, 0.1)).tolist() == [1.0, 1.0]
    assert array(decay_factor(Lp(0.8, 0.1), w, 0.1, 0.0)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_computes_the_factor_in_float32(dtype):
    w = variable(ones(4, 4), dtype=dtype)
    optimizer = pk.PSGD(1e-3, decay=Lp(1, 1e-3))
    optimizer.build([w])
    factor = optimizer._factor(w, optimizer.learning_rate)
    assert keras.backend.standardize_dtype(factor.dtype) == "float32"
    assert 0 < 1 - array(factor)[0, 0] < 1.1e-6
    big = variable(ones(4, 4), dtype=dtype)
    step = compiled_step(pk.PSGD(0.5, decay=Lp(1, 1.0)), [big])
    step([0 * np.asarray(ones(4, 4), "float16" if dtype == "float16" else "float32")])
    np.testing.assert_allclose(array(big), 2 / 3, rtol=1e-2)
    assert keras.backend.standardize_dtype(big.dtype) == dtype


def test_learning_rate_zero_changes_nothing():
    start = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    start[0] = 0.0
    w = variable(start)
    step = compiled_step(pk.PAdam(0.0, decay=Lp(0.5, 1.0) + Lp(2, 1.0)), [w])
    for _ in range(3):
        step([ones(5, 4)])
    assert (array(w) == start).all()


def test_zeros_stay_and_remain_finite():
    start = np.eye(4, dtype="float32")
    w = variable(start)
    step = compiled_step(pk.PSGD(0.1, momentum=0.9, decay=Lp(0, 1e-3) + Lp(3, 0.1)), [w])
    for _ in range(3):
        step([ones(4, 4)])
    assert np.isfinite(array(w)).all()
    assert ((array(w) == 0) == (start == 0)).all()


@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow runs the step as one graph")
def test_ctrl_c_between_update_and_decay_keeps_zeros(monkeypatch):
    start = np.eye(4, dtype="float32")
    w = variable(start)
    optimizer = pk.PSGD(0.1, decay=Lp(1, 1e-3))
    optimizer.build([w])
    name = "_backend_update_step"
    base = next(c for c in pk.PSGD.__mro__ if name in vars(c) and c.__module__.startswith("keras."))
    update = getattr(base, name)

    def interrupted(*args):
        update(*args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(base, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.apply([ops.convert_to_tensor(ones(4, 4))])
    assert not (array(w) == start).all()
    assert ((array(w) == 0) == (start == 0)).all()


def test_biases_norms_and_zero_initialised_kernels_do_not_decay():
    names = ["kernel", "bias", "gamma", "lora_kernel_b", "vector"]
    shapes = [(3, 3), (3, 3), (3, 3), (3, 3), (3,)]
    model = [variable(ones(*shape), name) for shape, name in zip(shapes, names, strict=True)]
    model[3].assign(np.zeros((3, 3)))
    optimizer = pk.PSGD(0.1, decay=Lp(0.8, 1.0))
    step = compiled_step(optimizer, model)
    assert array(optimizer.decay_mask).tolist() == [1, 0, 0, 0, 0]
    assert [v.name for v in optimizer.decayed_variables] == ["kernel"]
    step([-ones(*shape) for shape in shapes])
    np.testing.assert_allclose(array(model[0]), 1.0, rtol=1e-6)  # 1.1 / (1 + 0.1)
    np.testing.assert_allclose(array(model[1]), 1.1, rtol=1e-6)
    np.testing.assert_allclose(array(model[3]), 0.1, rtol=1e-6)
    np.testing.assert_allclose(array(model[4]), 1.1, rtol=1e-6)


def test_exclude_from_weight_decay_is_honoured():
    model = [variable(ones(2, 2), name) for name in ("kernel", "head", "table")]
    optimizer = pk.PAdam(0.1, decay=Lp(0.8, 1.0))
    optimizer.exclude_from_weight_decay(var_list=[model[2]], var_names=["head"])
    optimizer.build(model)
    assert [v.name for v in optimizer.decayed_variables] == ["kernel"]


def test_scale_changes_a_compiled_step():
    w = variable(ones(2, 2))
    optimizer = pk.PSGD(0.5, decay=Lp(2, 1.0))
    step = compiled_step(optimizer, [w])
    step([0 * ones(2, 2)])
    np.testing.assert_allclose(array(w), 1 / 1.5, rtol=1e-6)
    optimizer.decay_scale.assign(0.0)
    step([0 * ones(2, 2)])
    np.testing.assert_allclose(array(w), 1 / 1.5, rtol=1e-6)
    optimizer.decay_scale.assign(2.0)
    step([0 * ones(2, 2)])
    np.testing.assert_allclose(array(w), 1 / 3, rtol=1e-6)


def test_freeze_zeros_keeps_zeros_and_stops_the_decay():
    w = variable(np.eye(3))
    optimizer = pk.PAdam(1e-3, decay=Lp(0.8, 0.1))
    step = compiled_step(optimizer, [w])
    pk.freeze_zeros(optimizer)
    plain = variable(np.eye(3))
    plain_step = compiled_step(keras.optimizers.Adam(1e-3), [plain])
    for _ in range(3):
        step([ones(3, 3)])
        plain_step([ones(3, 3)])
    np.testing.assert_allclose(array(w), array(plain) * np.eye(3), rtol=1e-6)
    assert ((array(w) == 0) == (np.eye(3) == 0)).all()


def test_without_decay_equals_keras():
    rng = np.random.default_rng(0)
    ours, theirs = (variable(np.random.default_rng(1).normal(size=(6, 5))) for _ in range(2))
    options = {"weight_decay": 0.01, "clipnorm": 0.5}
    step = compiled_step(pk.PAdam(0.02, decay=None, **options), [ours])
    plain_step = compiled_step(keras.optimizers.Adam(0.02, **options), [theirs])
    for _ in range(3):
        g = rng.normal(size=(6, 5)).astype("float32")
        step([g])
        plain_step([g])
    assert (array(ours) == array(theirs)).all()


def test_accumulated_gradients_equal_one_large_batch():
    rng = np.random.default_rng(0)
    start = rng.normal(size=(6, 5)).astype("float32")
    small, large = variable(start), variable(start)
    options = {"decay": Lp(0.5, 0.1), "clipnorm": 1.0}
    micro = compiled_step(pk.PAdam(0.02, gradient_accumulation_steps=4, **options), [small])
    whole = compiled_step(pk.PAdam(0.02, **options), [large])
    for _ in range(3):
        grads = rng.normal(size=(4, 6, 5)).astype("float32")
        for i, g in enumerate(grads):
            before = array(small)
            micro([g])
            assert (array(small) == before).all() == (i < 3)
        whole([grads.mean(0)])
    np.testing.assert_allclose(array(small), array(large), rtol=1e-4, atol=1e-6)


def test_loss_scale_optimizer_skips_the_decay_with_the_step():
    w = variable(ones(3, 3))
    inner = pk.PSGD(0.1, decay=Lp(0.8, 1.0))
    step = compiled_step(keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0), [w])
    step([np.inf * ones(3, 3)])
    assert (array(w) == 1).all()
    step([-8 / 4 * ones(3, 3)])  # the skipped step halved the scale
    np.testing.assert_allclose(array(w), (1 + 0.1 / 2) / 1.1, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"ema_overwrite_frequency": 4}])
def test_moving_averages_keep_zeros(options):
    start = np.random.default_rng(0).normal(size=(20, 10)).astype("float32")
    start[0] = 0.0
    w = variable(start)
    optimizer = pk.PAdam(0.05, decay=Lp(0.5, 0.3), use_ema=True, **options)
    step = compiled_step(optimizer, [w])
    for t in range(11):
        step([np.random.default_rng(t).normal(size=(20, 10)).astype("float32")])
    zeros = array(w) == 0
    assert 0.05 <= zeros.mean() < 1
    optimizer.finalize_variable_values([w])
    assert (array(w)[zeros] == 0).all()
    assert (array(w)[~zeros] != 0).all()


def test_config_is_plain_numbers_and_round_trips():
    optimizer = pk.PAdam(1e-3, decay=Lp(0.8, 1e-3) + Lp(2, 1e-2), clipnorm=1.0)
    config = optimizer.get_config()
    assert config["decay"] == [[0.8, 1e-3], [2.0, 1e-2]]
    again = pk.PAdam.from_config(config)
    assert again.decay == optimizer.decay
    assert again.clipnorm == 1.0
    assert pk.PSGD.from_config(pk.PSGD(decay=None).get_config()).decay is None
    assert pk.PAdam().decay == Lp(1, 1e-2)
    data = keras.saving.serialize_keras_object(optimizer)
    assert data["registered_name"] == "pdecay>PAdam"
    assert type(keras.saving.deserialize_keras_object(data)) is pk.PAdam


def test_with_p_norm_decay_makes_one_class_each():
    cls = pk.with_p_norm_decay(keras.optimizers.Adam)
    assert cls is pk.PAdam
    assert pk.with_p_norm_decay(cls) is cls
    assert issubclass(cls, keras.optimizers.Adam)
    assert cls.__name__ == "PAdam"
    assert "beta_1" in inspect.signature(cls).parameters
    assert inspect.signature(cls).parameters["decay"].default == Lp(1, 1e-2)


def test_classes_of_users_are_registered_with_their_module():
    class Mine(keras.optimizers.SGD):
        pass

    cls = pk.with_p_norm_decay(Mine)
    data = keras.saving.serialize_keras_object(cls(0.1, decay=Lp(0.5, 1.0)))
    assert data["registered_name"] == f"pdecay>PMine.{__name__}"
    loaded = keras.saving.deserialize_keras_object(data)
    assert type(loaded) is cls
    assert loaded.decay == Lp(0.5, 1.0)


@pytest.mark.parametrize(
    ("decay", "error", "message"),
    [
        ("l1", TypeError, "a decay must be an Lp"),
        (0.1, TypeError, "a decay must be an Lp"),
        ([[0.8, -1.0]], ValueError, "lam must be finite and >= 0"),
        ([[-1, 1.0]], ValueError, "p must be finite and >= 0"),
    ],
)
def test_bad_decay_is_an_error(decay, error, message):
    with pytest.raises(error, match=message):
        pk.PAdam(1e-3, decay=decay)


def test_only_optimizer_classes_are_wrapped():
    for given in (keras.optimizers.SGD(), dict, "adam"):
        with pytest.raises(TypeError, match="needs a class of Keras optimizers"):
            pk.with_p_norm_decay(given)


def test_wrappers_of_optimizers_are_not_wrapped():
    with pytest.raises(TypeError, match="class of the inner optimizer"):
        pk.with_p_norm_decay(keras.optimizers.LossScaleOptimizer)


def test_freeze_zeros_rejects_optimizers_without_fixed_zeros():
    with pytest.raises(ValueError, match="some p < 2"):
        pk.freeze_zeros(pk.PSGD(decay=Lp(2, 1.0)))
    with pytest.raises(TypeError, match="needs an optimizer that decays"):
        pk.freeze_zeros(keras.optimizers.SGD())
