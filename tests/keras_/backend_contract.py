"""The contract over frameworks and Keras' own optimizers, on the backend of this process."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops

from pdecay import Lp
from pdecay.keras import with_p_norm_decay
from tests.contract.frameworks import (
    PENALTIES,
    Case,
    Keras,
    KerasReference,
    check_equals_reference,
    compiled_step,
)

OPTIMIZERS = [
    value
    for name, value in vars(keras.optimizers).items()
    if inspect.isclass(value)
    and issubclass(value, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
]
if keras.backend.backend() != "torch":  # each takes a second to compile
    OPTIMIZERS = [keras.optimizers.AdamW, keras.optimizers.Lion, keras.optimizers.SGD]


@pytest.mark.parametrize("name", ["p=0", "p=0.5", "p=0.8", "p=1", "p=1.3", "p=3", "p=0.8+2"])
def test_adam_equals_the_reference(name):
    check_equals_reference(Keras, Case("adam", PENALTIES[name]), KerasReference)


@pytest.mark.parametrize("name", ["p=0.8", "p=2", "p=0.5+1+3"])
def test_sgd_equals_the_reference(name):
    check_equals_reference(Keras, Case("sgd", PENALTIES[name]), KerasReference)


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_keras_optimizers_equal_copy_step_multiply(cls):
    penalty, lr = Lp(0.8, 0.5), 0.02
    # Keras applies AdamW's weight decay before the update, so that w_old would contain it.
    options = {"AdamW": {"weight_decay": 0.0}, "SGD": {"momentum": 0.9}}.get(cls.__name__, {})
    start = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")
    start[0] = 0.0
    ours, theirs = (keras.Variable(start, name="kernel") for _ in range(2))
    step = compiled_step(with_p_norm_decay(cls)(lr, decay=penalty, **options), [ours])
    plain_step = compiled_step(cls(lr, **options), [theirs])
    for t in range(4):
        w_old = np.array(ops.convert_to_numpy(theirs))
        g = w_old - np.random.default_rng(t).normal(size=w_old.shape).astype("float32")
        plain_step([g])
        theirs.assign(ops.convert_to_numpy(theirs) * penalty.factor(w_old, lr))
        step([g])
    result, expected = ops.convert_to_numpy(ours), ops.convert_to_numpy(theirs)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)
    assert not result[0].any()
