"""Speed of a 1024 x 1024 SparseLinear compared with the dense layer and torch's CSR matrices (MKL).

    python benchmarks/sparse_linear.py       # half a minute on an idle machine

Single calls follow a call of the other layer, or work that empties the caches. The microseconds are
written to benchmarks/records/sparse_linear.json; deploy_tables.py makes tables from them.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from documents import RECORDS
from pdecay.deployment.layers.modules import SparseLinear
from pdecay.deployment.runtime.timing import interleaved
from provenance import provenance

SIZE = 1024
Function = Callable[[], object]


def layers(zeros: float) -> tuple[nn.Linear, SparseLinear]:
    torch.manual_seed(0)
    dense = nn.Linear(SIZE, SIZE).requires_grad_(False)
    dense.weight.mul_(torch.rand(SIZE, SIZE) >= zeros)
    return dense, SparseLinear(dense)


def csr(dense: nn.Linear, x: Tensor) -> Function:
    """Return a CSR product. MKL needs column vectors; the transposition is not timed."""
    return partial(torch.addmm, dense.bias[:, None], dense.weight.to_sparse_csr(), x.T.contiguous())


def one_by_one(functions: list[Function], between: Function) -> list[float]:
    """Return the median seconds of single calls in turn."""
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(150):
        for function, times in zip(functions, taken, strict=True):
            between()
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in taken]


def main() -> None:
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
    record = {**provenance(), "repeated": repeated_calls(), "single": single_calls()}
    (RECORDS / "sparse_linear.json").write_text(json.dumps(record, indent=1) + "\n")


def repeated_calls() -> list[dict[str, Any]]:
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for zeros in (0.9, 0.95):
            dense, sparse = layers(zeros)
            for batch in (1, 64):
                x = torch.randn(batch, SIZE)
                functions = [partial(dense, x), csr(dense, x), partial(sparse, x)]
                taken = interleaved(functions, seconds=1.0).seconds
                rows.append(
                    {"threads": threads, "zeros": zeros, "batch": batch}
                    | microseconds(("dense", "csr", "sparse"), taken)
                )
                print(rows[-1], flush=True)
    return rows


def single_calls() -> list[dict[str, Any]]:
    """Time single calls with 95 % zeros and batch size 1."""
    rows = []
    caches = torch.zeros(16 << 20)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        dense, sparse = layers(0.95)
        x = torch.randn(1, SIZE)
        for before, between in (
            ("the other layer", float),
            ("caches emptied", partial(caches.add_, 1.0)),
        ):
            taken = one_by_one([partial(dense, x), partial(sparse, x)], between)
            rows.append(
                {"threads": threads, "before each call": before}
                | microseconds(("dense", "sparse"), taken)
            )
            print(rows[-1], flush=True)
    return rows


def microseconds(names: Sequence[str], seconds: Sequence[float]) -> dict[str, float]:
    return {name: round(1e6 * one, 2) for name, one in zip(names, seconds, strict=True)}


if __name__ == "__main__":
    with torch.inference_mode():
        main()
