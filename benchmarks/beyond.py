"""Run the examples beyond neural networks, and write the tables and figures of docs/examples.md.

python benchmarks/beyond.py          # benchmarks/records/beyond.json, then as below
python benchmarks/beyond.py table    # docs/_data/beyond_*.md
"""

from __future__ import annotations

import json
import sys
from typing import Any

import documents
from documents import RECORDS, ROOT, markdown

_RECORD = RECORDS / "beyond.json"
_PICTURES = ROOT / "docs" / "_static"
_SHOWN = {0.5: (0.005, 0.01, 0.02), 1.0: (0.06, 0.1)}  # lam of the circuits in the table


def main(arguments: list[str]) -> None:
    if arguments != ["table"]:
        _RECORD.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    documents.write(tables(), {})


def measure() -> dict[str, Any]:
    """Run both examples, draw their figures, and return their results."""
    sys.path.insert(0, str(ROOT / "examples"))
    import lorenz
    import quantum_circuit

    from provenance import provenance

    wrong = lorenz.main(str(_PICTURES / "lorenz.png"))
    circuits = quantum_circuit.main(str(_PICTURES / "quantum_circuit.png"))
    return {
        **provenance("pysindy", "scikit-learn", "pennylane", "jax"),
        "lorenz": {"noises": lorenz.NOISES, "wrong_terms": wrong},
        "quantum_circuit": [
            {"p": p, "lam": lam, "gates": gates, "energy": energy}
            for p, rows in circuits.items()
            for lam, (gates, energy) in zip(quantum_circuit.STRENGTHS[p], rows, strict=True)
        ],
    }


def tables() -> dict[str, str]:
    """Return both tables in Markdown by name."""
    record = json.loads(_RECORD.read_text(encoding="utf-8"))
    return {
        "beyond_lorenz": lorenz_table(record["lorenz"]),
        "beyond_quantum_circuit": circuit_table(record["quantum_circuit"]),
    }


def lorenz_table(found: dict[str, Any]) -> str:
    """Return the wrong terms of each method at each noise."""
    wrong = found["wrong_terms"]
    rows = [
        [f"{100 * noise:g} %", *(f"{means[i]:.1f}" for means in wrong.values())]
        for i, noise in enumerate(found["noises"])
    ]
    return markdown(["noise of the derivatives", *wrong], rows)


def circuit_table(runs: list[dict[str, float]]) -> str:
    """Return the gates and the energy of some strengths."""
    rows = [["no decay", f"{runs[0]['gates']:.0f}", f"at most {runs[0]['energy']:.0e}"]]
    rows += [
        [f"p = {run['p']:g}, lam = {run['lam']:g}", f"{run['gates']:.1f}", f"{run['energy']:.1e}"]
        for run in runs
        if run["lam"] in _SHOWN[run["p"]]
    ]
    return markdown(["", "gates left", "energy above the ground state"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
