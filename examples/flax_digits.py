"""Train a sparse flax network on scikit-learn's handwritten digits.

    python examples/flax_digits.py

The decay makes small weights zero; after the ramp, exactly 90 % of the weights are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from pdecay.optax import padam, sparsity_target

STEPS = 600
SPARSITY = 0.9


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, 128, rngs=rngs)
        self.second = nnx.Linear(128, 64, rngs=rngs)
        self.last = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


def loss(model: Network, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@nnx.jit
def train_step(model: Network, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> None:
    optimizer.update(model, nnx.grad(loss)(model, x, y))


def main() -> tuple[float, float]:
    """Train, print the result, and return the accuracy and the share of zeros."""
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, random_state=0)

    model = Network(nnx.Rngs(0))
    schedule = optax.cosine_decay_schedule(3e-3, STEPS)

    def lam(step):  # once the zeros are fixed, the other weights train without decay
        return jnp.where(step < 0.85 * STEPS, 1e-2, 0.0)

    tx = optax.chain(padam(schedule, decay=[(0.8, lam)]), sparsity_target(SPARSITY, STEPS))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        batch = rng.integers(len(x_train), size=128)
        train_step(model, optimizer, jnp.asarray(x_train[batch]), jnp.asarray(y_train[batch]))

    accuracy = float((model(jnp.asarray(x_test)).argmax(axis=1) == y_test).mean())
    kernels = [w for w in jax.tree.leaves(nnx.state(model, nnx.Param)) if w.ndim == 2]
    zeros = sum(int((w == 0).sum()) for w in kernels) / sum(w.size for w in kernels)
    print(f"accuracy {accuracy:.3f} with {zeros:.1%} of the weights zero")
    return accuracy, zeros


if __name__ == "__main__":
    main()
