"""Write the tables of docs/deploy.md, docs/files.md and README from the records.

pdecay bench deploy                              # about half an hour on an idle machine
cp pdecay-bench/deploy.json benchmarks/records
python benchmarks/sparse_linear.py
python benchmarks/files.py size
python benchmarks/files.py speed
python benchmarks/busy_deploy.py --threads 1 2 --record benchmarks/records/busy_deploy.json
python benchmarks/deploy_tables.py               # docs/_data/*.md, README, the figure
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

import documents
from documents import RECORDS, ROOT, markdown
from pdecay.lab.bench import deploy_report

README_ZEROS = 0.95
Record = dict[str, Any]


def main() -> None:
    documents.write(tables(), readme())
    bench = read("deploy")
    figure = ROOT / "docs" / "_static" / "deploy.png"
    deploy_report.draw(bench["layers"], bench["networks"], figure)


def tables() -> dict[str, str]:
    """Return all tables in Markdown by name."""
    bench, linear, files = read("deploy"), read("sparse_linear"), read("files")
    return {
        "deploy_machine": machine(bench),
        "deploy_layers": deploy_report.layer_table(bench["layers"]),
        "deploy_networks": deploy_report.network_table(bench["networks"]),
        "deploy_shares": shares(bench["networks"]),
        "deploy_busy": busy(read("busy_deploy")),
        "deploy_linear_machine": machine(linear),
        "deploy_linear": repeated_calls(linear["repeated"]),
        "deploy_linear_single": single_calls(linear["single"]),
        "files_size": file_sizes(files["size"]["networks"]),
        "files_speed_machine": machine(files["speed"]),
        "files_speed": file_speed(files["speed"]["rates"]),
    }


def readme() -> dict[str, str]:
    """Return the sections of README in Markdown by name."""
    return {"deploy": summary(read("deploy")["networks"])}


def read(name: str) -> Record:
    record: Record = json.loads((RECORDS / f"{name}.json").read_text())
    return record


def machine(record: Record) -> str:
    """Return a line that describes the command and the machine."""
    here = record["machine"]
    commit = f", commit {here['commit'][:9]}" if "commit" in here else ""
    torch_version = here["torch"].partition("+")[0]
    command = record.get("command", "pdecay bench deploy")
    return f"`{command}`: {here['processor']}, torch {torch_version}{commit}\n"


def summary(networks: Sequence[Record]) -> str:
    """Return README's table: the networks with most zeros, on one thread."""
    names = dict.fromkeys(row["name"] for row in networks)
    found = {
        (row["name"], row["batch"]): row
        for row in networks
        if row["sparsity"] == README_ZEROS and row["threads"] == 1
    }
    batches = sorted({batch for _, batch in found})
    rows = []
    for name in names:
        ratios = [found[name, batch] for batch in batches]
        size = ratios[0]["dense_file"] / ratios[0]["file"]
        rows.append([name, *(f"{row['ratio']:.1f}" for row in ratios), f"{size:.0f}"])
    header = [f"{README_ZEROS * 100:.0f} % zeros", *(f"x as fast, batch {b}" for b in batches)]
    return markdown([*header, "x smaller file"], rows)


def shares(networks: Sequence[Record]) -> str:
    """Return a sentence about the parts that take most of the time of the last network."""
    row = next(one for one in reversed(networks) if one["batch"] == 1)
    sparse = sum(taken for _, kind, taken in row["layers"] if kind == "sparse")
    parts = [("sparse layers", sparse), *row["functions"]]
    found = [(name, 100 * taken / row["deployed"]) for name, taken in parts]
    named = ", ".join(f"{name} {share:.0f} %" for name, share in found if share >= 5)
    return (
        f"Shares of the time of {row['name']}, {row['sparsity']:.0%} zeros, batch size "
        f"{row['batch']}, {row['threads']} threads: {named}.\n"
    )


def busy(records: Record) -> str:
    """Return the gains that `deploy` reported on a busy machine, and those of a separate check."""
    rows = []
    for name, record in records.items():
        gains, separate = record["gains"], record["separate gains"]
        choices = ", ".join(f"{count} {kind}" for kind, count in record["choices"].items())
        rows.append(
            [
                name,
                choices,
                f"{statistics.median(gains):.2f}",
                f"{min(separate):.2f} to {max(separate):.2f}",
                f"{record['within 30 %']} of {len(gains)}",
                "yes" if record["passed"] else "no",
            ]
        )
    header = ["network, 95 % zeros", "choices", "median gain", "separate gains", "within 30 %"]
    return markdown([*header, "passed"], rows)


def repeated_calls(rows: Sequence[Record]) -> str:
    """Return the microseconds of a linear layer, dense, as a CSR matrix and sparse."""
    cells = [
        [
            *(str(row["threads"]), f"{row['zeros']:.0%}", str(row["batch"])),
            *(f"{row[kind]:,.0f}" for kind in ("dense", "csr", "sparse")),
        ]
        for row in rows
    ]
    return markdown(["threads", "zeros", "batch", "dense", "CSR", "`SparseLinear`"], cells)


def single_calls(rows: Sequence[Record]) -> str:
    """Return how many times as fast single calls of the sparse layer are."""
    cells = [
        [str(row["threads"]), row["before each call"], f"{row['dense'] / row['sparse']:.1f}"]
        for row in rows
    ]
    return markdown(["threads", "before each call", "times as fast"], cells)


def file_sizes(networks: Sequence[Record]) -> str:
    """Return the bytes of files."""
    cells = [
        [
            *(row["network"], f"{row['zeros']:.1%}"),
            *(f"{row[size]:,.0f}" for size in ("torch.save", "pdecay.save", "bound")),
            f"{row['pdecay.save'] / row['bound'] - 1:.1%}",
        ]
        for row in networks
    ]
    header = ["network", "zeros", "torch.save", "pdecay.save", "the bound", "above it"]
    return markdown(header, cells)


def file_speed(rates: Sequence[Record]) -> str:
    """Return the megabytes of dense weights that are written or read in a second."""
    kinds = ("save", "load", "torch.save", "torch.load")
    cells = [[f"{row['zeros']:.0%}", *(f"{row[kind]:,.0f}" for kind in kinds)] for row in rates]
    return markdown(["zeros", *kinds], cells)


if __name__ == "__main__":
    main()
