"""One training run for every framework, side by side with a numpy reference in double precision.

To put another framework under the contract, write a subclass of :class:`Run` with two methods and
add it to ``FRAMEWORKS``; ``test_frameworks.py`` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pdecay import Lp
from pdecay._core.penalty import Penalty

Weights = dict[str, np.ndarray]

STEPS = 100
MOMENTUM = 0.9
# Not 0.999: optax computes 1 - b2^t in single precision, where it has a relative error of 6e-5.
BETAS = (0.9, 0.99)
EPS = 1e-8
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

    Both methods exchange float arrays of numpy. The learning rate of step t is ``RATES[t]``; a
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


FRAMEWORKS: dict[str, type[Run]] = {"torch": Torch, "optax": Optax}


def walk(framework: type[Run], case: Case) -> list[tuple[Weights, Weights]]:
    """Run a framework and the reference; return the weights of both after each step.

    Each follows its own gradients, so that differences add up as in a training.
    """
    runs = [Reference(case, first_weights()), framework(case, first_weights())]
    history = []
    for t in range(STEPS):
        for run in runs:
            run.step(gradient(run.weights(), t))
        history.append((runs[0].weights(), runs[1].weights()))
    return history
