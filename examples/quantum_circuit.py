"""Prune the gates of a variational quantum circuit with p < 1.

    python examples/quantum_circuit.py

The circuit prepares the ground state of a transverse-field Ising chain. Its parameters are the
angles of single-qubit rotations and of two-qubit XX, YY and ZZ rotations. A gate with angle zero
does nothing and can be removed, so that the p-norm decay on the angles prunes gates.
"""

import warnings

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pennylane as qml

from pdecay.optax import padam

QUBITS, LAYERS, STEPS = 4, 3, 300
GATES = (qml.IsingXX, qml.IsingYY, qml.IsingZZ, qml.RX, qml.RY, qml.RZ)
STRENGTHS = {0.5: (0, 0.005, 0.01, 0.02, 0.03, 0.05), 1.0: (0, 0.02, 0.04, 0.06, 0.1, 0.2)}  # lam
PAIRS = [qml.PauliZ(i) @ qml.PauliZ((i + 1) % QUBITS) for i in range(QUBITS)]
CHAIN = qml.Hamiltonian([-1.0] * 2 * QUBITS, PAIRS + [qml.PauliX(i) for i in range(QUBITS)])
GROUND = float(np.linalg.eigvalsh(qml.matrix(CHAIN, wire_order=range(QUBITS)))[0])


@qml.qnode(qml.device("default.qubit", wires=QUBITS), interface="jax")
def energy(angles: jax.Array) -> jax.Array:
    """Return the energy of the prepared state; angles have shape (layers, gates, qubits)."""
    for layer in angles:
        for gate, row in zip(GATES, layer, strict=True):
            for i in range(QUBITS):
                gate(row[i], wires=(i, (i + 1) % QUBITS)[: gate.num_wires])
    return qml.expval(CHAIN)


@jax.jit
def train(p: jax.Array, lam: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the angles and the energy above the ground state."""

    def strength(step: jax.Array) -> jax.Array:
        # A zero stays zero at any positive lam: the other angles then train almost without decay.
        return jnp.where(step < 0.6 * STEPS, lam, 1e-9 * lam)

    def update(_: int, carry: tuple) -> tuple:
        angles, state = carry
        updates, state = tx.update(jax.grad(energy)(angles), state, angles)
        return optax.apply_updates(angles, updates), state

    tx = padam(optax.cosine_decay_schedule(0.05, STEPS), decay=[(p, strength)])
    angles = 0.3 * jax.random.normal(jax.random.key(seed), (LAYERS, len(GATES), QUBITS))
    angles, _ = jax.lax.fori_loop(0, STEPS, update, (angles, tx.init(angles)))
    return angles, energy(angles) - GROUND


def main(picture: str = "quantum_circuit.png", seeds: int = 3) -> dict[float, list[tuple]]:
    """Return for each p the mean number of gates and energy error at each lam."""
    # PennyLane asks for double precision, which JAX does not have by default.
    warnings.filterwarnings("ignore", message="Explicitly requested dtype complex128")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    results: dict[float, list[tuple]] = {p: [] for p in STRENGTHS}
    for p, rows in results.items():
        for lam in STRENGTHS[p]:
            angles, errors = zip(*(train(p, lam, seed) for seed in range(seeds)), strict=True)
            gates = np.count_nonzero(angles) / seeds
            error = max(float(np.mean(errors)), 1e-6)  # below: rounding errors
            rows.append((gates, error))
            print(f"p {p}  lam {lam:<5}  {gates:4.1f} of 72 gates, energy error {error:.1e}")
        axes.plot(*np.transpose(rows), "o-", label=f"p = {p}")
    axes.set(xlabel="gates left of 72", ylabel="energy above the ground state", yscale="log")
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=150)
    return results


if __name__ == "__main__":
    main()
