"""Write the tables of docs/sklearn.md from the record of bridge.py.

OPENBLAS_NUM_THREADS=1 python benchmarks/bridge.py     # several minutes
python benchmarks/bridge_tables.py                     # docs/_data/bridge_*.md
"""

from __future__ import annotations

import json
from typing import Any

import documents
from documents import RECORDS, markdown

Record = dict[str, Any]
_LABELS = {
    "p=0.50 bridge": "p = 1/2",
    "p=0.50 one_start": "p = 1/2, `n_starts=1`",
    "p=0.67 bridge": "p = 2/3",
    "p=0.67 one_start": "p = 2/3, `n_starts=1`",
}


def main() -> None:
    documents.write(tables(), {})


def tables() -> dict[str, str]:
    """Return all tables in Markdown by name."""
    record = json.loads((RECORDS / "bridge.json").read_text())
    return {
        "bridge_recovery": recovery(record["recovery"]["chosen_by_validation"]),
        "bridge_solvers": comparison(record["solvers"]["summary"]),
        "bridge_designs": comparison(record["designs"]["summary"]),
        "bridge_norms": norms(record["norms"]["summary"]),
    }


def recovery(found: Record) -> str:
    """Return the errors and the selected features of each method."""
    rows = [
        [name, f"{one['error']:.2f}", f"{one['f1']:.2f}", f"{one['features']:.0f}"]
        for name, one in found.items()
    ]
    header = ["lam chosen by validation", "prediction error (1 = noise)", "F1 of the features"]
    return markdown([*header, "features"], rows)


def comparison(summary: Record) -> str:
    """Return objectives and times relative to skglm."""
    rows = [
        [
            label,
            *(f"{summary[name][f'objective_{kind}']:.3f}" for kind in ("median", "mean")),
            f"{summary[name]['not_above']} of {summary[name]['problems']}",
            *(f"{summary[name][f'time_{kind}']:.2f}" for kind in ("median", "total")),
        ]
        for name, label in _LABELS.items()
    ]
    header = ["", "objective, median", "objective, mean", "not above"]
    return markdown([*header, "CPU time, median", "CPU time, sum"], rows)


def norms(summary: Record) -> str:
    """Return the times of p above 1 relative to p = 1/2."""
    weak = [key for key in summary["wide"] if key.endswith(" weak")]
    sizes = {"wide": "more features than samples", "tall": "2000 x 500"}
    rows = [
        [f"{label}, {lam}", *(f"{summary[name][key.removesuffix(cut)]:.2f}" for key in weak)]
        for lam, cut in (("fit of the Lasso", " weak"), ("lam of the Lasso", ""))
        for name, label in sizes.items()
    ]
    shown = [f"p = {float(key.removesuffix(' weak')):g}" for key in weak]
    return markdown(["CPU time relative to p = 1/2", *shown], rows)


if __name__ == "__main__":
    main()
