"""Speed of a 1024 x 1024 SparseLinear compared with the dense layer and torch's CSR matrices (MKL).

python benchmarks/sparse_linear.py

The second table has single calls: each follows a call of the other layer, or work that empties the
caches.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from pdecay.deployment.layers.modules import SparseLinear
from pdecay.deployment.runtime.timing import interleaved

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
    print("threads  zeros  batch  dense us   CSR us   sparse us")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for zeros in (0.9, 0.95):
            dense, sparse = layers(zeros)
            for batch in (1, 64):
                x = torch.randn(batch, SIZE)
                functions = [partial(dense, x), csr(dense, x), partial(sparse, x)]
                taken = interleaved(functions, seconds=1.0).seconds
                times = "".join(f"{1e6 * one:9.0f}" for one in taken)
                print(f"{threads:7} {zeros:6.0%} {batch:6} {times}")
    print("\nbatch 1, 95 % zeros, each call after another\nthreads  dense us  sparse us  ratio")
    caches = torch.zeros(16 << 20)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        dense, sparse = layers(0.95)
        x = torch.randn(1, SIZE)
        for what, between in (("", float), ("  caches emptied", partial(caches.add_, 1.0))):
            first, second = one_by_one([partial(dense, x), partial(sparse, x)], between)
            print(f"{threads:7} {1e6 * first:9.0f} {1e6 * second:9.0f} {first / second:7.1f}{what}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
