"""Prune the gates of a variational quantum circuit with p < 1.

    python examples/quantum_circuit.py [picture.png]

The circuit prepares the ground state of a transverse-field Ising chain. Its parameters are the
angles of single-qubit rotations and of two-qubit XX, YY and ZZ rotations. A gate with angle zero
does nothing and can be removed, so that the p-norm decay on the angles prunes gates. The same
circuit is trained without decay and with p = 1 for comparison.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pennylane as qml

from pdecay.optax import padam

QUBITS, LAYERS, STEPS = 4, 3, 300
DECAYED = 0.6  # share of the steps with decay; zeros stay, the other angles train on
SINGLE = (qml.RX, qml.RY, qml.RZ)
DOUBLE = (qml.IsingXX, qml.IsingYY, qml.IsingZZ)
GATES = LAYERS * QUBITS * (len(SINGLE) + len(DOUBLE))

field = qml.Hamiltonian(
    [-1.0] * (2 * QUBITS),
    [qml.PauliZ(i) @ qml.PauliZ((i + 1) % QUBITS) for i in range(QUBITS)]
    + [qml.PauliX(i) for i in range(QUBITS)],
)


@qml.qnode(qml.device("default.qubit", wires=QUBITS), interface="jax")
def energy(angles: jax.Array) -> jax.Array:
    """Return the energy of the prepared state; angles have shape (layers, 6, qubits)."""
    for layer in angles:
        for gate, row in zip(DOUBLE, layer[:3], strict=True):
            for i in range(QUBITS):
                gate(row[i], wires=(i, (i + 1) % QUBITS))
        for gate, row in zip(SINGLE, layer[3:], strict=True):
            for i in range(QUBITS):
                gate(row[i], wires=i)
    return qml.expval(field)


GROUND = float(np.linalg.eigvalsh(qml.matrix(field, wire_order=range(QUBITS)))[0])


@jax.jit
def train(p: jax.Array, lam: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the energy above the ground state and the angles."""
    schedule = optax.cosine_decay_schedule(0.05, STEPS)

    def strength(step: jax.Array) -> jax.Array:
        # A zero stays zero at any positive lam: the other angles then train almost without decay.
        return jnp.where(step < DECAYED * STEPS, lam, 1e-9 * lam)

    tx = padam(schedule, decay=[(p, strength)])
    angles = 0.3 * jax.random.normal(jax.random.key(seed), (LAYERS, 6, QUBITS))

    def step(carry: Any, _: None) -> tuple[Any, None]:
        angles, state = carry
        updates, state = tx.update(jax.grad(energy)(angles), state, angles)
        return (optax.apply_updates(angles, updates), state), None

    (angles, _), _ = jax.lax.scan(step, (angles, tx.init(angles)), None, length=STEPS)
    return energy(angles) - GROUND, angles


def main(picture: str | None = None, seeds: int = 3) -> dict[str, list[tuple[float, float]]]:
    """Return the mean gates and energy errors of several strengths, for p = 1/2 and p = 1."""
    results: dict[str, list[tuple[float, float]]] = {}
    angles = None
    # PennyLane asks for double precision, which JAX does not have by default.
    warnings.filterwarnings("ignore", message="Explicitly requested dtype complex128")
    for name, p, strengths in (
        ("no decay", 1.0, (0.0,)),
        ("p = 1/2", 0.5, (0.005, 0.01, 0.02, 0.03, 0.05)),
        ("p = 1", 1.0, (0.02, 0.04, 0.06, 0.1, 0.2)),
    ):
        results[name] = []
        for lam in strengths:
            runs = [train(p, lam, seed) for seed in range(seeds)]
            error = float(np.mean([run[0] for run in runs]))
            gates = float(np.mean([np.count_nonzero(run[1]) for run in runs]))
            results[name].append((gates, error))
            print(f"{name:8} lam {lam:<5} {gates:5.1f} of {GATES} gates, energy error {error:.1e}")
            if name == "p = 1/2" and lam == 0.02:
                angles = np.asarray(runs[0][1])
    if picture and angles is not None:
        draw(picture, results, angles)
    return results


def draw(picture: str, results: dict[str, list[tuple[float, float]]], angles: np.ndarray) -> None:
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(9.5, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    for (name, rows), colour in zip(results.items(), ("black", "#08519c", "#b58900"), strict=True):
        gates, errors = zip(*sorted(rows), strict=True)
        errors = np.maximum(errors, 1e-6)  # the rounding errors of single precision
        left.plot(gates, errors, "o-", color=colour, label=name)
    left.set(xlabel=f"gates left of {GATES}", ylabel="energy above the ground state", yscale="log")
    left.legend(frameon=False)
    left.spines[["top", "right"]].set_visible(False)
    table = angles.reshape(LAYERS * 6, QUBITS)
    shown = np.ma.masked_equal(table, 0)
    limit = float(np.abs(table).max())
    image = right.imshow(shown.T, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    right.set_facecolor("#eeeeee")
    names = [gate.__name__.removeprefix("Ising") for gate in (*DOUBLE, *SINGLE)] * LAYERS
    right.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    right.set_yticks(range(QUBITS))
    right.set(ylabel="qubit", title="Angles for p = 1/2, lam = 0.02 (grey: gate removed)")
    for k in range(1, LAYERS):
        right.axvline(6 * k - 0.5, color="black", linewidth=0.8)
    figure.colorbar(image, ax=right, label="angle")
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:2])
