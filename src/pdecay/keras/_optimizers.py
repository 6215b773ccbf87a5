"""Keras optimizers with p-norm weight decay.

Keras' own ``weight_decay`` acts before the optimizer's update. The p-norm decay divides after it,

    w  <-  w_tilde / (1 + lr * sum_k lam_k * |w_old|^(p_k - 2)) ,

with ``w_old`` the weight before and ``w_tilde`` the weight after the update. The class that
:func:`with_p_norm_decay` makes therefore wraps the update: it computes the factor from ``w_old``,
lets the optimizer update, then multiplies. :func:`decay_factor` is
:meth:`pdecay.Penalty.factor` in ``keras.ops``, so that every backend can trace and compile it.

All state is in variables of the optimizer, which Keras saves and restores with it:

    decay_scale   the factor of every lam; a float would be a constant in the compiled step
    decay_mask    for each trainable variable, 1 if it decays, else 0
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
from keras import ops

from pdecay._core.names import EXCLUDED_NAMES
from pdecay._core.penalty import Lp, Penalty, as_penalty
from pdecay._utils.interrupts import deferred_interrupts

Tensor = Any  # a tensor of Keras' backend
Variable = Any  # a keras.Variable, or a tf.Variable

# Too small to change a nonzero weight, and large enough to stay above 0 in single precision.
HOLD = 1e-30

_BACKEND = keras.backend.backend()
_WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer")
_DEFAULT = Lp(1, 1e-2)

_DOC = """Keras' {name} with p-norm weight decay.

Args:
    decay: the penalty, keyword only: an ``Lp``, a sum of them, a list of [p, lam] pairs, or None
        for no decay. The default is ``Lp(1, 1e-2)``.

The other arguments are those of ``keras.optimizers.{name}``. Biases, normalisation parameters,
variables with fewer than two dimensions, variables that are all zero when the optimizer is built,
and those that ``exclude_from_weight_decay`` names do not decay.
"""


def decay_factor(
    penalty: Penalty, w_old: Tensor, learning_rate: Tensor, scale: Tensor = 1.0
) -> Tensor:
    """Return ``1 / (1 + learning_rate * scale * sum_k lam_k * |w_old|^(p_k - 2))``, elementwise.

    This is :meth:`pdecay.Penalty.factor` with its guards, in ``keras.ops``: half-precision weights
    compute in single precision, subnormal weights count as 0, the factor of a zero is 0 for p < 2,
    and where `scale` is 0 the factor is 1 everywhere.

    At a learning rate of 0 the factor is 1 for every nonzero weight. A zero keeps its factor of 0:
    the momentum of Keras' SGD contains the learning rates of earlier steps and would move it.
    """
    dtype = keras.backend.standardize_dtype(w_old.dtype)
    if dtype in ("float16", "bfloat16"):
        dtype = "float32"
    info = np.finfo(dtype)
    low = float(info.smallest_normal)
    x = ops.abs(ops.cast(w_old, dtype))
    x = ops.where(x < low, ops.zeros_like(x), x)
    one = ops.ones_like(x)
    terms = [(p, max(lam, low)) for p, lam in penalty.pairs() if lam]
    if not terms:
        return one
    learning_rate, scale = ops.cast(learning_rate, dtype), ops.cast(scale, dtype)
    # Arrays, because Keras on torch rounds plain floats to single precision.
    powers = [lam * ops.power(x, np.asarray(p - 2, dtype)) for p, lam in terms]
    # Finite, because infinity times a rate that underflows to 0 is NaN.
    total = ops.minimum(sum(powers), np.asarray(info.max, dtype))
    factor = ops.where(learning_rate > 0, 1 / (1 + learning_rate * scale * total), one)
    if penalty.absorbs:
        factor = ops.where(x > 0, factor, ops.zeros_like(x))
    return ops.where(scale > 0, factor, one)


class PNormDecay(keras.optimizers.Optimizer):
    """The base class of all Keras optimizers with p-norm weight decay.

    Attributes:
        decay: the penalty, or None. It is fixed: compiled training steps contain p and lam.
        decay_scale: a ``keras.Variable``, the factor of every lam. Assign to it at any time.
        decay_mask: a ``keras.Variable``, for each trainable variable 1 if it decays. It exists
            once the optimizer is built.
    """

    def __init__(self, *args: Any, decay: object = _DEFAULT, **kwargs: Any) -> None:
        penalty = as_penalty(decay)
        super().__init__(*args, **kwargs)
        self.decay = penalty
        self.decay_scale = self.add_variable(
            shape=(),
            initializer="ones",
            dtype="float32",
            aggregation="only_first_replica",
            name="decay_scale",
        )

    def build(self, variables: Sequence[Variable]) -> None:
        """Create the optimizer's variables and choose the variables that decay."""
        if self.built:
            return
        super().build(variables)
        self.decay_mask = self.add_variable(
            shape=(len(variables),),
            dtype="float32",
            aggregation="only_first_replica",
            name="decay_mask",
        )
        self._choose_decayed()

    def _choose_decayed(self) -> None:
        """Write the mask, once the variables have values.

        A model without an input shape is built while TensorFlow traces its first training step.
        Its variables have no values then; TensorFlow sets them and traces the step again.
        """
        variables = self._trainable_variables
        with _eager():
            sizes = [ops.convert_to_numpy(variable).size for variable in variables]
            self._has_chosen = sizes == [math.prod(variable.shape) for variable in variables]
            if self._has_chosen:
                self.decay_mask.assign([float(self._should_decay(v)) for v in variables])

    @property
    def decayed_variables(self) -> list[Variable]:
        """The variables that decay, without those of layers that were frozen since."""
        if not self.built or self.decay is None:
            return []
        chosen = zip(self._trainable_variables, ops.convert_to_numpy(self.decay_mask), strict=True)
        return [variable for variable, decays in chosen if decays and variable.trainable]

    # TensorFlow's update runs once for each replica of a variable, and only update_step acts
    # inside of it. On torch, Keras' fast optimizers do not call update_step.
    if _BACKEND == "tensorflow":

        def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
            """Update one variable, then multiply it by its factor."""
            factor = self._factor(variable, learning_rate)
            super().update_step(gradient, variable, learning_rate)
            self._multiply(variable, factor)

    else:

        def _backend_update_step(
            self,
            grads: Sequence[Tensor],
            trainable_variables: Sequence[Variable],
            learning_rate: Tensor,
        ) -> None:
            factors = [self._factor(variable, learning_rate) for variable in trainable_variables]
            update = super()._backend_update_step

            def decay() -> None:
                for variable, factor in zip(trainable_variables, factors, strict=True):
                    self._multiply(variable, factor)

            deferred_interrupts.run(  # on torch, Ctrl-C in between would leave no zeros
                functools.partial(update, grads, trainable_variables, learning_rate), decay
            )

    def _factor(self, variable: Variable, learning_rate: Tensor) -> Tensor | None:
        if self.decay is None or len(variable.shape) < 2:
            return None
        if not self._has_chosen:
            self._choose_decayed()
        scale = self.decay_scale * self.decay_mask[self._get_variable_index(variable)]
        return decay_factor(self.decay, _value(variable), learning_rate, scale)

    def _multiply(self, variable: Variable, factor: Tensor | None) -> None:
        if factor is not None:
            w_tilde = _value(variable)
            w = ops.cast(w_tilde, factor.dtype) * factor
            self.assign(variable, ops.cast(w, w_tilde.dtype))

    def _should_decay(self, variable: Variable) -> bool:
        name = getattr(variable, "path", variable.name).split("/")[-1].split(":")[0]
        return bool(
            len(variable.shape) >= 2
            and name not in EXCLUDED_NAMES
            and self._use_weight_decay(variable)
            and np.any(ops.convert_to_numpy(variable) != 0)
        )

    # The moving average of a weight that became zero would stay nonzero for a long time.

    def _update_model_variables_moving_average(self, trainable_variables: Any) -> None:
        super()._update_model_variables_moving_average(trainable_variables)
        self._zero_averages()

    def finalize_variable_values(self, var_list: Sequence[Variable]) -> None:
        """Replace the weights by their moving averages with ``use_ema``; zeros stay zero."""
        self._zero_averages()
        super().finalize_variable_values(var_list)

    def _zero_averages(self) -> None:
        if not self.use_ema or self.decay is None or not self.decay.absorbs:
            return
        pairs = zip(self._trainable_variables, self._model_variables_moving_average, strict=True)
        for i, (variable, average) in enumerate(pairs):
            if average is not None and len(variable.shape) >= 2:
                mean = _value(average)
                is_zero = ops.logical_and(ops.equal(_value(variable), 0), self.decay_mask[i] > 0)
                average.assign(ops.where(is_zero, ops.zeros_like(mean), mean))

    def get_config(self) -> dict[str, Any]:
        """Return the configuration, with the decay as a list of [p, lam] pairs."""
        pairs = self.decay.pairs() if self.decay is not None else None
        return {**super().get_config(), "decay": pairs}


@functools.cache
def with_p_norm_decay(optimizer_class: type[Any]) -> type[Any]:
    """Return a subclass of a Keras optimizer class that decays weights by a p-norm.

    The subclass takes the same arguments and ``decay``. It is registered with Keras as ``P`` and
    the name of the class, so that saved models load. For optimizers that are not part of Keras,
    call this function before you load a model that was saved with the subclass.

    Example:
        >>> import keras
        >>> from pdecay import Lp
        >>> from pdecay.keras import with_p_norm_decay
        >>> PLion = with_p_norm_decay(keras.optimizers.Lion)
        >>> optimizer = PLion(1e-4, decay=Lp(0.8, 1e-2))
        >>> optimizer.get_config()["decay"]
        [[0.8, 0.01]]
    """
    if not inspect.isclass(optimizer_class) or not issubclass(
        optimizer_class, keras.optimizers.Optimizer
    ):
        raise TypeError(
            "with_p_norm_decay needs a class of Keras optimizers such as keras.optimizers.Adam, "
            f"got {optimizer_class!r}"
        )
    if issubclass(optimizer_class, PNormDecay):
        return optimizer_class
    wrappers = tuple(
        getattr(keras.optimizers, n) for n in _WRAPPERS if hasattr(keras.optimizers, n)
    )
    if issubclass(optimizer_class, wrappers):
        raise TypeError(
            f"{optimizer_class.__name__} only wraps other optimizers: add the decay to the class "
            "of the inner optimizer"
        )
    name = optimizer_class.__name__
    base = optimizer_class
    if _BACKEND == "torch":  # Keras replaces its own optimizers by faster subclasses
        base = type(optimizer_class.__new__(optimizer_class))
    cls = type(f"P{name}", (PNormDecay, base), {"__doc__": _DOC.format(name=name)})
    cls.__module__ = "pdecay.keras"
    cls.__signature__ = _signature(optimizer_class)  # type: ignore[attr-defined]
    built_in = optimizer_class.__module__.split(".")[0] == "keras"
    key = f"P{name}" if built_in else f"P{name}.{optimizer_class.__module__}"
    keras.saving.register_keras_serializable(package="pdecay", name=key)(cls)
    return cls


def freeze_zeros(optimizer: Any) -> None:
    """Keep zeros at zero from now on, and train all other weights without decay.

    This sets ``decay_scale`` next to zero. Assign 1 to it to decay again.

    Args:
        optimizer: an optimizer with p-norm weight decay with some p < 2, or a wrapper of one such
            as ``LossScaleOptimizer``.
    """
    zero_keeping(optimizer, "freeze_zeros").decay_scale.assign(HOLD)


def decaying(optimizer: Any, caller: str) -> PNormDecay:
    """Return the unwrapped optimizer, or raise TypeError if it has no p-norm weight decay."""
    inner = optimizer
    while not isinstance(inner, PNormDecay) and hasattr(inner, "inner_optimizer"):
        inner = inner.inner_optimizer
    if not isinstance(inner, PNormDecay):
        raise TypeError(
            f"{caller} needs an optimizer that decays (pdecay.keras.PAdam, PSGD, or a class from "
            f"with_p_norm_decay), got {type(optimizer).__name__}"
        )
    return inner


def zero_keeping(optimizer: Any, caller: str) -> PNormDecay:
    """Return the unwrapped optimizer, or raise ValueError if its zeros could move."""
    inner = decaying(optimizer, caller)
    if inner.decay is None or not inner.decay.absorbs:
        raise ValueError(
            f"{caller}: zero is a fixed point only for some p < 2 with lam > 0, got {inner.decay!r}"
        )
    return inner


def _value(variable: Variable) -> Tensor:
    return ops.stop_gradient(ops.convert_to_tensor(variable))


def _eager() -> AbstractContextManager[Any]:
    """Return a context that reads and writes values although TensorFlow traces a function."""
    if _BACKEND != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    context: AbstractContextManager[Any] = tf.init_scope()
    return context


def _signature(optimizer_class: type[Any]) -> inspect.Signature:
    signature = inspect.signature(optimizer_class)
    parameters = list(signature.parameters.values())
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    new = inspect.Parameter("decay", keyword_only, default=_DEFAULT)
    at = next((i for i, p in enumerate(parameters) if p.kind > keyword_only), len(parameters))
    return signature.replace(parameters=[*parameters[:at], new, *parameters[at:]])


def _keras_classes() -> list[Any]:
    """Return the optimizer classes of Keras, without the base class and the wrappers."""
    return [
        value
        for name, value in vars(keras.optimizers).items()
        if inspect.isclass(value)
        and issubclass(value, keras.optimizers.Optimizer)
        and name not in ("Optimizer", *_WRAPPERS)
    ]


PAdam = with_p_norm_decay(keras.optimizers.Adam)
PSGD = with_p_norm_decay(keras.optimizers.SGD)

for _class in _keras_classes():  # registers them, so that saved models load
    with_p_norm_decay(_class)
