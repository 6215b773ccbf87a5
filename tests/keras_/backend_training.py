"""Trainings with `fit` on scikit-learn's digits, on the backend of this process."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops
from sklearn.datasets import load_digits

import pdecay.keras as pk
from pdecay import Lp

BACKEND = keras.backend.backend()
STEPS_PER_EPOCH, BATCH = 12, 64

if BACKEND == "tensorflow":
    import tensorflow as tf

    cpu, two = (
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    tf.config.set_logical_device_configuration(cpu, two)  # before the first use of TensorFlow


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    return (x[: STEPS_PER_EPOCH * BATCH] / 16).astype("float32"), y[: STEPS_PER_EPOCH * BATCH]


def compiled(optimizer, dtype=None):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(32, activation="relu", dtype=dtype),
            layers.LayerNormalization(dtype=dtype),
            layers.Dense(10, dtype=dtype),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=BACKEND == "jax")
    return model


def fit(model, digits, epochs, initial_epoch=0, callbacks=(), **options):
    x, y = digits
    return model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        initial_epoch=initial_epoch,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        **options,
    ).history


def weights(model):
    return [np.array(ops.convert_to_numpy(v)) for v in model.trainable_variables]


def zeros(model):
    kernels = [w for w in weights(model) if w.ndim == 2]
    return sum(int((w == 0).sum()) for w in kernels), sum(w.size for w in kernels)


def schedule():
    """Return a schedule that starts and ends at 0."""
    return keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps=54, warmup_target=1e-2, warmup_steps=6
    )


def test_resume_from_a_keras_file_is_exact(digits, tmp_path):
    def optimizer():
        made = pk.PAdam(schedule(), decay=Lp(0.8, 1e-2), clipnorm=1.0)
        made.exclude_from_weight_decay(var_names=["unused"])
        return made

    target = {"target": 0.8, "total_steps": 60}
    whole = compiled(optimizer())
    losses = fit(whole, digits, 5, callbacks=[pk.SparsityTarget(**target)])["loss"]
    part = compiled(optimizer())
    fit(part, digits, 2, callbacks=[pk.SparsityTarget(**target)])
    part.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is pk.PAdam
    assert loaded.optimizer.decay == Lp(0.8, 1e-2)
    assert float(loaded.optimizer.decay_scale) == float(part.optimizer.decay_scale) != 1.0
    fit(loaded, digits, 5, initial_epoch=2, callbacks=[pk.SparsityTarget(**target)])
    for ours, theirs in zip(weights(loaded), weights(whole), strict=True):
        assert (ours == theirs).all()
    count, size = zeros(whole)
    assert count == round(0.8 * size)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("target_first", [True, False])
def test_backup_and_restore_continues_exactly(digits, tmp_path, target_first):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def run(*more):
        model = compiled(pk.PAdam(1e-2, decay=Lp(0.8, 1e-2)))
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        callbacks = [pk.SparsityTarget(0.8), backup]
        fit(model, digits, 5, callbacks=[*callbacks[:: 1 if target_first else -1], *more])
        return weights(model)

    whole = run()
    with pytest.raises(KeyboardInterrupt):
        run(Interrupt())
    for ours, theirs in zip(run(), whole, strict=True):
        assert (ours == theirs).all()


def test_backup_of_the_last_step_of_the_ramp_meets_the_target(digits, tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(ops.convert_to_numpy(self.model.optimizer.iterations)) > 51:
                raise KeyboardInterrupt

    def run(*more):
        model = compiled(pk.PAdam(1e-2, decay=Lp(0.8, 1e-2)))
        # it saves before the target, which comes later in the list, ends its ramp
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=51)
        fit(model, digits, 5, callbacks=[backup, pk.SparsityTarget(0.5), *more])
        return model

    with pytest.raises(KeyboardInterrupt):
        run(Interrupt())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = run()
    count, size = zeros(model)
    assert count == round(0.5 * size)


def test_decay_makes_zeros_and_the_logger_counts_them(digits):
    model = compiled(pk.PSGD(0.1, momentum=0.9, decay=Lp(0.8, 1e-2)))
    history = fit(model, digits, 3, callbacks=[pk.SparsityLogger()])["sparsity"]
    kernels = np.concatenate([w.ravel() for w in weights(model) if w.ndim == 2])
    assert history[-1] == np.mean(np.abs(kernels) < 1e-13) == pk.sparsity(model)
    assert history[0] < history[-1]
    assert 0.1 < np.mean(kernels == 0) < 0.95


def test_mixed_precision_reaches_the_target(digits, tmp_path):
    model = compiled(pk.PAdam(1e-2, decay=Lp(0.8, 1e-2)), dtype="mixed_float16")
    if not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        scaled = keras.optimizers.LossScaleOptimizer(model.optimizer)
        model.compile(scaled, model.loss, jit_compile=BACKEND == "jax")
    fit(model, digits, 4, callbacks=[pk.SparsityTarget(0.75, 44)])
    count, size = zeros(model)
    assert count == round(0.75 * size)
    assert all(np.isfinite(w).all() for w in weights(model))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.inner_optimizer.decay == Lp(0.8, 1e-2)
    assert zeros(loaded) == (count, size)


def test_accumulation_and_averages_reach_the_target(digits):
    optimizer = pk.PAdam(1e-2, decay=Lp(1, 1e-2), gradient_accumulation_steps=2, use_ema=True)
    model = compiled(optimizer)
    history = fit(model, digits, 4, callbacks=[pk.SparsityTarget(0.7)])
    count, size = zeros(model)
    assert int(ops.convert_to_numpy(optimizer.iterations)) == 24
    assert count == round(0.7 * size)
    assert history["sparsity"][-1] == pytest.approx(count / size)
    assert history["sparsity"][0] < 0.7
    assert history["loss"][-1] < history["loss"][0]


def test_zeros_that_were_frozen_stay_zero_under_a_target(digits):
    model = compiled(pk.PAdam(1e-2, decay=Lp(0.8, 1e-2)))
    first = model.layers[0].kernel
    kept = np.random.default_rng(0).random(first.shape) < 0.5
    first.assign(ops.convert_to_numpy(first) * kept)
    pk.freeze_zeros(model.optimizer)

    class Check(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weight = np.array(ops.convert_to_numpy(self.model.layers[0].kernel))
            assert not weight[~kept].any()

    fit(model, digits, 3, callbacks=[pk.SparsityTarget(0.8), Check()])
    count, size = zeros(model)
    assert count == round(0.8 * size)


@pytest.mark.skipif(BACKEND == "jax", reason="Keras on JAX needs a new optimizer")
def test_target_leaves_frozen_layers_alone(digits):
    model = compiled(pk.PAdam(1e-2, decay=Lp(0.8, 1e-2)))
    fit(model, digits, 1)
    first = model.layers[0]
    first.trainable = False
    before = np.array(ops.convert_to_numpy(first.kernel))
    model.compile(model.optimizer, model.loss)
    fit(model, digits, 4, initial_epoch=1, callbacks=[pk.SparsityTarget(0.6, 44)])
    np.testing.assert_array_equal(ops.convert_to_numpy(first.kernel), before)
    count, size = zeros(model)  # of the trainable weights
    assert count == round(0.6 * size)
    assert pk.sparsity(model) == count / size


@pytest.mark.skipif(BACKEND == "jax", reason="Keras on JAX cannot freeze layers during fit")
def test_layers_may_be_frozen_between_accumulated_steps(digits):
    class Freeze(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.layers[0].trainable = epoch != 1

    model = compiled(pk.PAdam(1e-2, gradient_accumulation_steps=5))
    fit(model, digits, 3, callbacks=[pk.SparsityTarget(0.6, total_steps=7), Freeze()])
    count, size = zeros(model)
    assert count == round(0.6 * size)


@pytest.mark.skipif(BACKEND == "torch", reason="Keras on torch runs one step per execution")
def test_several_steps_per_execution_reach_the_target(digits):
    model = compiled(pk.PAdam(1e-2, decay=Lp(0.8, 1e-2)))
    model.steps_per_execution = 5
    fit(model, digits, 2, callbacks=[pk.SparsityTarget(0.6)])
    count, size = zeros(model)
    assert count == round(0.6 * size)


@pytest.mark.skipif(BACKEND == "torch", reason="Keras on torch runs one step per execution")
def test_stages_that_end_with_an_execution_set_the_scale(digits):
    model = compiled(pk.PAdam(1e-2, decay=Lp(0.8, 1e-2)))
    model.steps_per_execution = 4  # the ramp begins at step 108 and has a stage every 4 steps
    history = fit(model, digits, 25, callbacks=[pk.SparsityTarget(0.9, total_steps=1080)])
    assert float(model.optimizer.decay_scale) > 1e-3
    assert 0 < history["sparsity"][-2] < history["sparsity"][-1]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a strategy of TensorFlow")
def test_two_replicas_equal_one(digits):
    import tensorflow as tf

    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    strategies = [tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(devices)]
    assert strategies[1].num_replicas_in_sync == 2
    trained = []
    for strategy in strategies:
        with strategy.scope():
            trained.append(compiled(pk.PAdam(1e-3, decay=Lp(0.8, 1e-2))))
        fit(trained[-1], digits, 1, callbacks=[pk.SparsityTarget(0.5)])
    assert zeros(trained[0]) == zeros(trained[1])
    for one, two in zip(*map(weights, trained), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_target_warns_after_the_end_of_its_ramp(digits):
    model = compiled(pk.PSGD(0.01))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(100)
    callback = pk.SparsityTarget(0.5, 50)
    callback.set_model(model)
    with pytest.warns(UserWarning, match="has made 100 steps"):
        callback.on_train_begin()


def test_second_target_warns_if_it_asks_for_more_zeros_too_late(digits):
    model = compiled(pk.PAdam(1e-2))
    fit(model, digits, 1, callbacks=[pk.SparsityTarget(0.5)])
    with pytest.warns(UserWarning, match=r"SparsityTarget\(0.9\) has no effect"):
        fit(model, digits, 1, callbacks=[pk.SparsityTarget(0.9)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(model, digits, 1, callbacks=[pk.SparsityTarget(0.5)])  # it only continues


@pytest.mark.parametrize("total_steps", [None, 4 * STEPS_PER_EPOCH])
def test_target_warns_if_it_starts_in_the_middle_of_its_ramp(digits, total_steps):
    model = compiled(pk.PAdam(1e-2))
    fit(model, digits, 2)
    with pytest.warns(UserWarning, match=r"starts in the middle of its ramp.* 24 steps"):
        fit(model, digits, 4, callbacks=[pk.SparsityTarget(0.9, total_steps)])


class Restore(keras.callbacks.Callback):
    """Restore the first weights when the training ends, as `EarlyStopping` may do."""

    def on_train_begin(self, logs=None):
        self.first = self.model.get_weights()

    def on_train_end(self, logs=None):
        self.model.set_weights(self.first)


class Stop(keras.callbacks.Callback):
    """Stop after the first epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


@pytest.mark.parametrize("target_first", [True, False])
def test_target_warns_if_other_callbacks_restore_weights(digits, target_first):
    callbacks = [pk.SparsityTarget(0.5), Restore()]
    model = compiled(pk.PAdam(1e-2))
    with pytest.warns(UserWarning, match="has 0.0% zeros, but SparsityTarget was given 50.0%"):
        fit(model, digits, 2, callbacks=callbacks if target_first else callbacks[::-1])
    assert "on_train_end" not in vars(model.history)


@pytest.mark.parametrize("total", [None, 4 * STEPS_PER_EPOCH])
def test_target_warns_if_the_training_stops_before_the_end_of_the_ramp(digits, total):
    model = compiled(pk.PAdam(1e-2))
    with pytest.warns(UserWarning, match="stopped at step 12; the ramp ends at step 41"):
        fit(model, digits, 4, callbacks=[pk.SparsityTarget(0.5, total), Stop()])


def test_target_warns_if_no_variable_decays(digits):
    optimizer = pk.PAdam(1e-2)
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    with pytest.warns(UserWarning, match="no variable decays"):
        fit(compiled(optimizer), digits, 2, callbacks=[pk.SparsityTarget(0.5)])


def test_target_does_not_warn_between_two_calls_of_fit(digits):
    model = compiled(pk.PAdam(1e-2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for epoch in range(4):
            target = pk.SparsityTarget(0.5, 4 * STEPS_PER_EPOCH)
            fit(model, digits, epoch + 1, epoch, callbacks=[target])
    assert zeros(model)[0] == round(zeros(model)[1] / 2)


@pytest.mark.parametrize("jit_compile", [False, True] if BACKEND == "tensorflow" else [False])
def test_model_without_an_input_shape_decays_from_the_first_step(digits, jit_compile):
    def trained(*first):
        keras.utils.set_random_seed(0)
        zero = layers.Dense(16, kernel_initializer="zeros", bias_initializer="ones")
        model = keras.Sequential([*first, layers.Dense(32, "relu"), zero, layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(pk.PAdam(1e-2, decay=Lp(0.8, 1e-2)), loss, jit_compile=jit_compile)
        fit(model, digits, 1)
        assert [len(v.shape) for v in model.optimizer.decayed_variables] == [2, 2]  # not the zeros
        target = pk.SparsityTarget(0.9, 5 * STEPS_PER_EPOCH, start=0.3)
        fit(model, digits, 5, 1, callbacks=[target])
        return model

    model = trained()
    for w, same in zip(weights(model), weights(trained(keras.Input((64,)))), strict=True):
        np.testing.assert_allclose(w, same, atol=1e-4)
    assert pk.sparsity(model) == pytest.approx(0.9, abs=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (lambda: keras.optimizers.Adam(), TypeError, "needs an optimizer that decays"),
        (lambda: pk.PAdam(decay=Lp(2, 1.0)), ValueError, "some p < 2"),
        (lambda: pk.PAdam(decay=None), ValueError, "some p < 2"),
        (lambda: pk.PAdam(), ValueError, "pass total_steps"),
    ],
)
def test_target_rejects_unsuitable_settings(optimizer, error, message):
    callback = pk.SparsityTarget(0.5)
    callback.set_model(compiled(optimizer()))
    callback.set_params({"epochs": 3, "steps": None})
    with pytest.raises(error, match=message):
        callback.on_train_begin()


@pytest.mark.parametrize(
    "arguments",
    [{"target": 0.0}, {"target": 1.0}, {"target": 0.5, "start": 0.9}, {"target": 0.5, "end": 2.0}],
)
def test_target_checks_its_arguments(arguments):
    with pytest.raises(ValueError, match="must"):
        pk.SparsityTarget(**arguments)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="Keras waits for all callbacks there")
def test_target_outside_a_list_is_an_error(digits):
    model = compiled(pk.PAdam(0.01))
    with pytest.raises(TypeError, match=r"pass a list to fit, callbacks=\[SparsityTarget"):
        model.fit(*digits, epochs=2, verbose=0, callbacks=pk.SparsityTarget(0.9))


def test_logger_rejects_optimizers_without_decay():
    callback = pk.SparsityLogger()
    callback.set_model(compiled(keras.optimizers.SGD()))
    with pytest.raises(TypeError, match="SparsityLogger needs an optimizer that decays"):
        callback.on_train_begin()
