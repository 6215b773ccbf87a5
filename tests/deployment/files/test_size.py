"""File sizes relative to the entropy bound, and peak memory of saving and loading."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from pdecay.deployment.files import save
from pdecay.lab.models import GPT, MLP, ResNet

SPARSITIES = [0.0, 0.01, 0.1, 0.3, 0.5, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999]
DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def reference_bound(tensors):
    """Compute nnz * itemsize + min(mask, entropy of the positions) from the definition."""
    total = 0.0
    for tensor in tensors:
        n, nnz = tensor.numel(), int((tensor.float() != 0).sum())
        p = nnz / n if n else 0.0
        entropy = -n * sum(x * math.log2(x) for x in (p, 1 - p) if x > 0)
        total += nnz * tensor.itemsize + min(n, entropy) / 8
    return total


def random_mask(shape, sparsity):
    return torch.rand(shape) >= sparsity


def dead_rows(shape, sparsity):
    return (torch.rand(shape[0]) >= sparsity).view(-1, 1).expand(shape)


def dead_columns(shape, sparsity):
    return (torch.rand(shape[1]) >= sparsity).expand(shape)


def uneven(shape, sparsity):
    """Return a mask whose rows differ in sparsity."""
    share = (1 - sparsity) * 2 * torch.rand(shape[0], 1)
    return torch.rand(shape) < share


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("mask", [random_mask, dead_rows, dead_columns, uneven])
def test_layer_is_within_10_percent_of_bound(tmp_path, mask, sparsity, dtype):
    torch.manual_seed(0)
    shape = (500, 1000)
    weight = (torch.randint(1, 100, shape) * mask(shape, sparsity)).to(dtype)
    report = save({"layer.weight": weight}, tmp_path / "file")
    (stored,) = report.tensors
    bound = reference_bound([weight])
    assert stored.bound == pytest.approx(min(bound, weight.nbytes), rel=1e-9)
    assert stored.nbytes <= 1.05 * bound + 32
    if bound > 5000:  # names and shapes dominate smaller files
        assert (tmp_path / "file").stat().st_size <= 1.1 * bound


NETWORKS = {
    "digits MLP": lambda: MLP(64, [256, 256], 10),
    "ResNet": lambda: ResNet(width=16),
    "char-GPT": lambda: GPT(65, 128, layers=4, heads=4, width=128),
}


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99])
@pytest.mark.parametrize("network", NETWORKS)
def test_network_is_within_10_percent_of_bound(tmp_path, network, sparsity):
    torch.manual_seed(0)
    model = NETWORKS[network]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= torch.rand(parameter.shape) >= sparsity
    report = save(model, tmp_path / "file")
    state = model.state_dict()
    unique = {value.data_ptr(): value for value in state.values()}.values()
    size = (tmp_path / "file").stat().st_size
    assert size == report.nbytes <= 1.1 * reference_bound(unique)
    assert report.ratio == pytest.approx(size / report.bound)
    assert report.bound <= reference_bound(unique) * (1 + 1e-9)
    assert f"{size:,}" in str(report)
    assert f"{report.bound:,.0f}" in str(report)
    assert report.to_dict()["bound"] == report.bound


def test_save_report(tmp_path):
    state = {"a": torch.zeros(10, 100), "b": torch.ones(3), "c": torch.zeros(0)}
    state["a"][3, 4] = 1
    report = save(state, tmp_path / "file")
    a, b, c = report.tensors
    assert (a.encoding, a.zeros, a.size) == ("gaps", 999, 1000)
    assert (b.encoding, b.nbytes, b.bound) == ("dense", 12, 12)
    assert (c.nbytes, c.bound) == (0, 0)
    assert report.dense_nbytes == 4012
    lines = str(report).splitlines()
    assert lines[0].split() == ["tensor", "shape", "dtype", "zeros", "encoding", "bytes", "bound"]
    assert lines[2].split()[:5] == ["a", "10x100", "F32", "99.90%", "gaps"]
    assert lines[-1].startswith(str(tmp_path / "file"))
    empty = save({}, tmp_path / "file")
    assert empty.bound == 0
    assert str(empty)


MEASURE = """
import json, sys, torch
from pathlib import Path
from torch import nn
from pdecay.deployment.files import load, save

torch.set_num_threads(1)
TENSOR, COUNT = 2**24, 4

def peak_of(call):
    # Peak memory of the process during a call, in units of one tensor.
    def status(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    call()
    return (status("VmHWM") - before) / TENSOR

def peaks(dense, sparsity, dtype, path):
    model = nn.Module()
    for i in range(COUNT):
        shape = (TENSOR // dtype.itemsize // 1024, 1024)
        weight = torch.randint(1, 100, shape, dtype=torch.int8) * (torch.rand(shape) >= sparsity)
        weight = weight.to(dtype)
        model.register_buffer(f"w{i}", weight.t() if i == 1 else weight)
    yield peak_of(lambda: save(model, path, dense=dense))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for buffer in model.buffers():
        buffer.zero_()
    yield peak_of(lambda: load(path, model))
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    states = []
    yield peak_of(lambda: states.append(load(path))) - COUNT

for dense, sparsity, dtype in json.loads(sys.argv[2]):
    print(json.dumps(list(peaks(dense, sparsity, getattr(torch, dtype), sys.argv[1]))))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_saving_and_loading_take_about_one_tensor_of_memory(tmp_path):
    """Measure in a new process whose allocator returns freed memory at once."""
    cases = [(False, 0.3, "float32"), (False, 0.95, "float32"), (True, 0, "float32")]
    cases += [(False, 0.65, "int8")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "file"), json.dumps(cases)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "4000000", "MALLOC_TRIM_THRESHOLD_": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for case, line in zip(cases, done.stdout.splitlines(), strict=True):
        saving, loading_in_place, loading = json.loads(line)
        print(case, saving, loading_in_place, loading)
        assert saving < 2.2, case
        assert loading_in_place < 2, case
        assert loading < 1, case
