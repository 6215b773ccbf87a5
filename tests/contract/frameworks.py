"""One training run for every framework, side by side with a numpy reference in double precision.

To put another framework under the contract, write a subclass of :class:`Run` and add it to
``FRAMEWORKS``; ``test_frameworks.py`` does the rest. :class:`Keras` is not in it: Keras has one
backend for each process, and ``tests/keras_`` starts one process for each backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdecay import Lp
from pdecay._core.penalty import Penalty

Weights = dict[str, np.ndarray]

STEPS = 100
MOMENTUM = 0.9
# Not 0.999: optax and Keras compute 1 - b2^t in single precision, where it has a relative error
# of 6e-5.
BETAS = (0.9, 0.99)
EPS = 1e-8
ZERO = 1e-13  # smaller weights count as zero
# Warmup from 0, a plateau, a pause at 0, and a decay back to 0.
RATES = np.concatenate(
    [np.linspace(0, 0.02, 11), np.full(39, 0.02), np.zeros(5), np.linspace(0.02, 0, 45)]
)
PENALTIES = {
    "p=0": Lp(0, 1e-3),
    "p=0.5": Lp(0.5, 0.02),
    "p=0.8": Lp(0.8, 0.05),
    "p=1": Lp(1, 0.2),
    "p=1.3": Lp(1.3, 0.3),
    "p=2": Lp(2, 0.5),
    "p=3": Lp(3, 0.5),
    "p=0.8+2": Lp(0.8, 0.05) + Lp(2, 0.3),
    "p=0.5+1+3": Lp(0.5, 0.01) + Lp(1, 0.05) + Lp(3, 0.1),
}


@dataclass(frozen=True)
class Case:
    """An optimizer, "adam" or "sgd" (with momentum), and a penalty."""

    optimizer: str
    penalty: Penalty


def first_weights() -> Weights:
    """Return a kernel, which decays, and a bias, which does not."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(40, 50)) * 0.3
    kernel.flat[::97] = 0.0
    weights = {"kernel": kernel, "bias": rng.normal(size=50) * 0.01}
    return {name: w.astype(np.float32).astype(np.float64) for name, w in weights.items()}


def gradient(weights: Weights, step: int) -> Weights:
    """Return the noisy gradient of a quadratic whose minimum is sparse, as float32 numbers."""
    gradients = {}
    for name, w in weights.items():
        rng = np.random.default_rng(len(name))
        minimum = rng.normal(size=w.shape) * (rng.random(w.shape) < 0.3)
        noise = np.random.default_rng([len(name), step]).normal(size=w.shape)
        gradients[name] = (w - minimum + 0.1 * noise).astype(np.float32)
    return gradients


class Run:
    """A training run of one framework.

    Weights and gradients are float arrays of numpy. The learning rate of step t is ``RATES[t]``; a
    framework that has schedules should use one.
    """

    def __init__(self, case: Case, weights: Weights) -> None:
        raise NotImplementedError

    def step(self, gradients: Weights) -> None:
        raise NotImplementedError

    def weights(self) -> Weights:
        raise NotImplementedError


class Reference(Run):
    """Adam and SGD as their papers print them, and the factor of ``Lp``, in float64."""

    def __init__(self, case: Case, weights: Weights) -> None:
        self.case = case
        self.params = weights
        self.t = 0
        self.m = {name: np.zeros_like(w) for name, w in weights.items()}
        self.v = {name: np.zeros_like(w) for name, w in weights.items()}

    def step(self, gradients: Weights) -> None:
        rate = float(RATES[self.t])
        self.t += 1
        for name, w in self.params.items():
            g = gradients[name].astype(np.float64)
            new = w - rate * (
                self._adam(name, g) if self.case.optimizer == "adam" else self._sgd(name, g)
            )
            if name == "kernel":
                new = new * self.case.penalty.factor(w, rate)
            self.params[name] = new

    def _adam(self, name: str, g: np.ndarray) -> np.ndarray:
        b1, b2 = BETAS
        self.m[name] = b1 * self.m[name] + (1 - b1) * g
        self.v[name] = b2 * self.v[name] + (1 - b2) * g**2
        mean, square = self.m[name] / (1 - b1**self.t), self.v[name] / (1 - b2**self.t)
        return mean / (np.sqrt(square) + EPS)

    def _sgd(self, name: str, g: np.ndarray) -> np.ndarray:
        self.m[name] = MOMENTUM * self.m[name] + g
        return self.m[name]

    def weights(self) -> Weights:
        return dict(self.params)


class KerasReference(Reference):
    """The reference without momentum.

    The momentum of Keras' SGD contains the learning rate of each step, that of torch does not.
    """

    def _sgd(self, name: str, g: np.ndarray) -> np.ndarray:
        return g


class Torch(Run):
    def __init__(self, case: Case, weights: Weights) -> None:
        import torch

        from pdecay import PSGD, PAdam

        self.params = {
            name: torch.nn.Parameter(torch.from_numpy(w).float()) for name, w in weights.items()
        }
        parameters, lr = list(self.params.values()), 1.0
        if case.optimizer == "adam":
            self.optimizer: Any = PAdam(parameters, lr, BETAS, EPS, case.penalty)
        else:
            self.optimizer = PSGD(parameters, lr, MOMENTUM, decay=case.penalty)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda t: float(RATES[min(t, STEPS - 1)])
        )

    def step(self, gradients: Weights) -> None:
        import torch

        for name, param in self.params.items():
            param.grad = torch.from_numpy(gradients[name])
        self.optimizer.step()
        self.schedule.step()

    def weights(self) -> Weights:
        return {name: param.detach().double().numpy() for name, param in self.params.items()}


class Optax(Run):
    def __init__(self, case: Case, weights: Weights) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        from pdecay.optax import padam, psgd

        rates = jnp.asarray(RATES, jnp.float32)
        self.params: Any = {name: jnp.asarray(w, jnp.float32) for name, w in weights.items()}
        if case.optimizer == "adam":
            tx = padam(lambda count: rates[count], *BETAS, EPS, case.penalty)
        else:
            tx = psgd(lambda count: rates[count], MOMENTUM, decay=case.penalty)
        self.state = tx.init(self.params)

        @jax.jit
        def step(gradients: Any, state: Any, params: Any) -> Any:
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        self._step = step

    def step(self, gradients: Weights) -> None:
        self.params, self.state = self._step(gradients, self.state, self.params)

    def weights(self) -> Weights:
        return {name: np.asarray(w, np.float64) for name, w in self.params.items()}


class Keras(Run):
    """Keras on the backend of this process, with a step that is compiled as ``fit`` does it."""

    def __init__(self, case: Case, weights: Weights) -> None:
        import keras

        from pdecay.keras import PSGD, PAdam

        class Rates(keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step: Any) -> Any:
                return keras.ops.take(keras.ops.convert_to_tensor(RATES, "float32"), step)

        self.params = {
            name: keras.Variable(w, dtype="float32", name=name) for name, w in weights.items()
        }
        if case.optimizer == "adam":
            optimizer = PAdam(Rates(), *BETAS, EPS, decay=case.penalty)
        else:
            optimizer = PSGD(Rates(), decay=case.penalty)  # see KerasReference
        self._step = compiled_step(optimizer, list(self.params.values()))

    def step(self, gradients: Weights) -> None:
        self._step([gradients[name] for name in self.params])

    def weights(self) -> Weights:
        import keras

        arrays = {name: keras.ops.convert_to_numpy(v) for name, v in self.params.items()}
        return {name: np.array(array, np.float64) for name, array in arrays.items()}


def compiled_step(optimizer: Any, variables: list[Any]) -> Callable[[list[np.ndarray]], None]:
    """Return a function of the gradients that makes one step of a Keras optimizer."""
    import keras

    optimizer.build(variables)
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        def step(gradients: list[np.ndarray]) -> None:
            with torch.no_grad():
                optimizer.apply([torch.from_numpy(g) for g in gradients], variables)

    elif backend == "tensorflow":
        import tensorflow as tf

        traced = tf.function(lambda gradients: optimizer.apply(gradients, variables))

        def step(gradients: list[np.ndarray]) -> None:
            traced([tf.constant(g) for g in gradients])

    else:
        import jax

        compiled = jax.jit(optimizer.stateless_apply)

        def step(gradients: list[np.ndarray]) -> None:
            old = [v.value for v in variables]
            new, state = compiled([v.value for v in optimizer.variables], gradients, old)
            for variable, value in zip(
                [*variables, *optimizer.variables], [*new, *state], strict=True
            ):
                variable.assign(value)

    return step


FRAMEWORKS: dict[str, type[Run]] = {"torch": Torch, "optax": Optax}


def walk(
    framework: type[Run], case: Case, reference: type[Run] = Reference
) -> list[tuple[Weights, Weights]]:
    """Run a framework and the reference; return the weights of both after each step.

    Each follows its own gradients, so that differences add up as in a training.
    """
    runs = [reference(case, first_weights()), framework(case, first_weights())]
    history = []
    for t in range(STEPS):
        for run in runs:
            run.step(gradient(run.weights(), t))
        history.append((runs[0].weights(), runs[1].weights()))
    return history


def check_equals_reference(
    framework: type[Run], case: Case, reference: type[Run] = Reference
) -> None:
    """Check the weights of a framework against the reference, after each step."""
    smooth = all(p >= 2 for p, _ in case.penalty.pairs())
    for exact, weights in walk(framework, case, reference):
        for name, expected in exact.items():
            difference = np.abs(weights[name] - expected) / np.abs(expected).max()
            assert np.quantile(difference, 0.99) <= 1e-5
            assert difference.max() <= (1e-5 if smooth or name == "bias" else 1e-2)
        zeros = [np.abs(run["kernel"]) < ZERO for run in (exact, weights)]
        assert np.mean(zeros[0] != zeros[1]) <= 0.005
