"""Tests of the C kernels on tensors of all kinds: layouts, dtypes, tables, threads."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from pdecay._optim.kernels import native
from tests.optim.kernels.settings import ADAM, SGD, TERMS, TOLERANCE

pytestmark = pytest.mark.usefixtures("needs_native")


def _adam_once(w, grad, m, v, **options):
    settings = {"terms": [(0.8, 0.5)], "lr": 1e-2} | ADAM | options
    largest = [v.clone()] if settings["amsgrad"] else []
    native.adam_([w], [grad], [m], [v], largest, [torch.tensor(4.0)], **settings)


@pytest.mark.parametrize("weight_layout", range(3))
@pytest.mark.parametrize("other_layout", range(4))
def test_layouts(weight_layout, other_layout):
    def laid_out(tensor, layout):
        order = [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)]
        if layout == 3:  # with gaps
            return torch.stack([tensor, tensor], -1)[..., 0]
        inverse = torch.tensor(order[layout]).argsort().tolist()
        return (
            tensor.permute(order[layout])
            .clone(memory_format=torch.contiguous_format)
            .permute(inverse)
        )

    torch.manual_seed(0)
    plain = [torch.randn(4, 5, 6, 7) for _ in range(3)] + [torch.rand(4, 5, 6, 7)]
    other = [laid_out(t, other_layout if i else weight_layout) for i, t in enumerate(plain)]
    strides = [tensor.stride() for tensor in other]
    _adam_once(*plain)
    _adam_once(*other)
    for one, two in zip(plain, other, strict=True):
        assert torch.equal(one, two)
    assert [tensor.stride() for tensor in other] == strides


def test_non_dense_weight_raises_before_any_change():
    w = torch.ones(4, 4)[:, ::2]
    assert native.why_not(w) == "not dense in memory"
    with pytest.raises(ValueError, match="not dense"):
        native.decay_([w], [w], terms=[(1, 1.0)], rate=1.0)
    assert torch.equal(w, torch.ones(4, 2))


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, dtype=torch.complex64), "dtype complex64"),
        (torch.zeros(2, dtype=torch.int64), "dtype int64"),
        (torch.zeros(2, device="meta"), "device meta"),
        (torch.zeros(3, 3).to_sparse(), "not dense"),
        (torch.zeros(3).expand(3, 3), "not dense"),
    ],
)
def test_why_not_gives_the_reason(tensor, reason):
    assert reason in native.why_not(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_why_not_is_none_for_supported_tensors(dtype):
    assert native.why_not(torch.nn.Parameter(torch.zeros(3, 4, dtype=dtype))) is None
    assert (
        native.why_not(torch.zeros(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last))
        is None
    )
    assert native.why_not(torch.zeros(0, dtype=dtype)) is None
    assert native.why_not(torch.zeros((), dtype=dtype)) is None


def test_lists_of_mixed_dtypes_and_many_sizes():
    sizes = [0, 1, 15, 16, 17, 63, 1023, 1024, 1025, 40_000, 100_001]
    weights = [torch.rand(n) + 0.1 for n in sizes]
    weights += [torch.rand(n, dtype=torch.float64) + 0.1 for n in sizes]
    expected = [w * (w / (w + 0.01)) for w in weights]
    native.decay_(weights, [w.clone() for w in weights], terms=[(1, 0.01)], rate=1.0)
    for weight, value in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_state_that_is_more_precise_than_the_weight_is_not_rounded(dtype):
    torch.manual_seed(0)
    w, grad = torch.randn(40, 50).to(dtype), torch.randn(40, 50).to(dtype)
    m, v = torch.randn(40, 50), torch.rand(40, 50)
    wide = [w.float(), grad.float(), m.clone(), v.clone()]
    _adam_once(*wide)
    _adam_once(w, grad, m, v)
    for one, two in zip((w, m, v), (wide[0].to(dtype), *wide[2:]), strict=True):
        assert torch.equal(one, two)


def test_bfloat16_state_of_a_float16_weight_is_not_rounded_to_float16():
    """float16 has no numbers below 6e-8, as squared gradients are: Adam would divide by eps."""
    torch.manual_seed(0)
    w, grad = torch.randn(40, 50).half(), (1e-3 * torch.randn(40, 50)).half()
    m, v = (1e-3 * torch.randn(40, 50)).bfloat16(), (1e-9 + 1e-9 * torch.rand(40, 50)).bfloat16()
    wide = [tensor.float() for tensor in (w, grad, m, v)]
    _adam_once(*wide)
    _adam_once(w, grad, m, v)
    for one, two in zip(
        (w, m, v), (wide[0].half(), *map(torch.Tensor.bfloat16, wide[2:])), strict=True
    ):
        assert torch.equal(one, two)


# With five threads, the parts of the last size end within a vector.
@pytest.mark.parametrize("size", [17, 120_000, 100_003])
@pytest.mark.parametrize("terms", [[(0.8, 1.0)], [(0.5, 1.0)], [(0.8, 1.0), (1.3, 1.0)]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_result_does_not_depend_on_thread_count(size, terms, dtype):
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            weights = [torch.randn(300), torch.randn(size)]
            weights, olds = (
                [w.to(dtype) for w in ws] for ws in (weights, [w * 2 for w in weights])
            )
            native.decay_(weights, olds, terms=terms, rate=0.1)
            grads, averages, squares = ([w.abs() * 0.1 for w in weights] for _ in range(3))
            steps = [torch.tensor(3.0) for _ in weights]
            settings = {"terms": terms, "lr": 1e-2} | ADAM
            native.adam_(weights, grads, averages, squares, [], steps, **settings)
            results.append(weights)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_weights_that_share_memory_are_updated_in_their_order():
    # One thread has all the views, and the other one begins with the last tensor, if there are two.
    whole = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    results = []
    for threads in (1, 2):
        w = whole.clone()
        middle = w[len(w) // 2 :][:16]
        weights = [*(middle for _ in range(2000)), w]
        grads = [torch.full_like(weight, i % 7 - 3.0) for i, weight in enumerate(weights)]
        torch.set_num_threads(threads)
        try:
            native.sgd_(weights, grads, [], terms=[(1, 0.1)], lr=0.01, **SGD)
        finally:
            torch.set_num_threads(1)
        results.append(w)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["0.8", "1", "elastic", "four"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scales_multiply_lam(literal_factor, dtype, name):
    scales = [0.0, 1.0, 0.25, 1.0, 0.0, 3.0]
    olds = [torch.linspace(-1, 1, 5001, dtype=dtype) for _ in scales]
    news = [torch.full((5001,), 0.5, dtype=dtype) for _ in scales]
    native.decay_(news, olds, terms=TERMS[name], rate=1e-3, scales=scales)
    for old, new, scale in zip(olds, news, scales, strict=True):
        terms = [(p, lam * scale) for p, lam in TERMS[name]]
        expected = 0.5 * literal_factor(old, terms, 1e-3)
        torch.testing.assert_close(new.double(), expected, rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", TERMS)
def test_gradients_may_be_in_memory_that_cannot_be_written(tmp_path, name):
    values = np.linspace(-1, 1, 7 * 9, dtype=np.float32).reshape(7, 9)
    np.save(tmp_path / "gradient.npy", values)
    read_only = torch.from_numpy(np.load(tmp_path / "gradient.npy", mmap_mode="r"))
    writable = torch.from_numpy(values)
    results = []
    for gradient in (read_only, writable):
        weight, average, square = (torch.full((7, 9), 0.1) for _ in range(3))
        step = torch.tensor(3.0)
        native.adam_(
            *([weight], [gradient], [average], [square], [], [step]),
            terms=TERMS[name],
            lr=0.01,
            **ADAM,
        )
        native.sgd_(
            *([weight], [gradient], [average]),
            terms=TERMS[name],
            lr=0.01,
            **SGD | {"momentum": 0.9},
        )
        native.decay_([weight], [gradient], terms=TERMS[name], rate=0.01)
        results.append(torch.stack([weight, average, square]))
    assert torch.equal(*results)


def test_scale_0_is_the_update_of_the_optimizer():
    generator = torch.Generator().manual_seed(0)
    results = []
    for terms, scales in (([(0.8, 0.1)], [0.0]), ([], None)):
        generator.manual_seed(0)
        w, g, m, v = (torch.rand(3000, generator=generator) * 1e-39 for _ in range(4))
        native.adam_(
            [w], [g], [m], [v], [], [torch.tensor(0.0)], terms=terms, lr=1e-3, **ADAM, scales=scales
        )
        results.append((w, m, v))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert (results[0][1] != 0).any()  # subnormal numbers are not flushed


def plain_streams():
    return [[torch.ones(3, 4), torch.ones(7)], [torch.ones(3, 4), torch.ones(7)]]


def test_table_has_sizes_and_addresses():
    streams = plain_streams()
    table = native.table_of(streams)
    assert table.sizes.tolist() == [12, 7]
    assert table.data.tolist() == [x.data_ptr() for stream in streams for x in stream]
    view = torch.ones(10)[3:8]
    assert native.table_of([[view]]).data.tolist() == [view.data_ptr()]


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(12),
        torch.ones(12, 3)[:, 0],
        torch.ones(3, 4),
        torch.ones(12, 1),
        torch.ones(11),
        torch.ones(12, dtype=torch.float64),
        torch.ones(12, dtype=torch.complex64),
        torch.ones(12, dtype=torch.int32),
        torch.ones(12, device="meta"),
        torch.ones(12).to_sparse(),
        torch._neg_view(torch.ones(12)),
        torch._efficientzerotensor(12),
        torch.ones(12).as_subclass(type("Sub", (torch.Tensor,), {})),
        None,
    ],
    ids=lambda x: "None" if x is None else f"{type(x).__name__}-{x.dtype}-{x.layout}-{x.device}",
)
def test_table_accepts_contiguous_tensors_of_one_dtype_only(other):
    streams = plain_streams()
    streams[0][0], streams[1][0] = torch.ones(12), other
    accepted = native.table_of(streams) is not None
    assert accepted == (type(other) is torch.Tensor and other.shape == (12,) and is_ordinary(other))


def is_ordinary(tensor):
    return (
        tensor.dtype == torch.float32
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def test_table_of_lists_of_different_lengths_is_none():
    assert native.table_of([[torch.ones(3)], []]) is None
    assert native.table_of([[], []]) is None
    one, two, three = ([torch.ones(3)] * n for n in (1, 2, 3))
    assert native.table_of([two, one, three]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_table_has_addresses_of_step_counts(dtype):
    streams, counts = plain_streams(), [torch.tensor(1.0, dtype=dtype), torch.ones(1, dtype=dtype)]
    table = native.table_of(streams, counts)
    assert table.data[-2:].tolist() == [count.data_ptr() for count in counts]
    assert native.DTYPES[table.counts_dtype] == dtype
    assert native.DTYPES[table.dtype] == torch.float32
    assert native.table_of(streams).counts_dtype is None


@pytest.mark.parametrize(
    "counts",
    [
        [],
        [torch.tensor(1.0)],
        [torch.tensor(1.0), torch.ones(2)],
        [torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)],
        [torch.tensor(1, dtype=torch.int64)] * 2,
        [torch.tensor(1.0, dtype=torch.bfloat16)] * 2,
        [torch.tensor(1.0, device="meta")] * 2,
        [torch.tensor(1.0), torch._neg_view(torch.tensor(1.0))],
    ],
)
def test_table_of_unusual_step_counts_is_none(counts):
    assert native.table_of(plain_streams(), counts) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.slow
def test_small_tensors_start_no_threads():
    code = """
import os, torch
from pdecay._optim.kernels import native

torch.set_num_threads(2)

def new_threads(size):
    params, olds = [torch.ones(size) for _ in range(8)], [torch.ones(size) for _ in range(8)]
    before = len(os.listdir("/proc/self/task"))
    native.decay_(params, olds, terms=[(0.8, 1.0)], rate=0.1)
    assert all(param[0] < 1 for param in params)
    return len(os.listdir("/proc/self/task")) - before

print(new_threads(10), new_threads(10_000))
"""
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.split() == ["0", "1"]


def test_missing_step_counts_raise():
    w, g, m, v = ([torch.ones(3)] for _ in range(4))
    with pytest.raises(ValueError, match="0 step counts for 1 weights"):
        native.adam_(w, g, m, v, [], [], terms=[], lr=0.1, **ADAM)


@pytest.mark.parametrize("shape", [(3, 5), (4, 3), (12,), (3, 4, 1)])
def test_different_shapes_raise(shape):
    weight = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"must have the shape of their weight.*\(3, 4\)"):
        native.decay_([weight], [torch.ones(shape)], terms=[(1, 1.0)], rate=1.0)
    assert torch.equal(weight, torch.ones(3, 4))


def test_empty_lists_are_accepted():
    native.adam_([], [], [], [], [], [], terms=[(1, 1.0)], lr=1.0, **ADAM)
    native.sgd_([], [], [], terms=[(1, 1.0)], lr=1.0, **SGD)
    native.decay_([], [], terms=[(1, 1.0)], rate=1.0)


def test_autograd_detects_the_changed_weight():
    w = torch.nn.Parameter(torch.ones(3))
    loss = (w * w).sum()
    native.decay_([w], [w.detach().clone()], terms=[(1, 1.0)], rate=1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_step_counts_may_be_float32_or_float64(default):
    step = torch.tensor(6.0, dtype=default)
    w, m, v = torch.ones(3), torch.zeros(3), torch.zeros(3)
    native.adam_([w], [torch.ones(3)], [m], [v], [], [step], terms=[], lr=1.0, **ADAM)
    assert step.item() == 7
    root = math.sqrt(0.001 / (1 - 0.999**7))
    expected = 1 - 0.1 / (1 - 0.9**7) / root
    torch.testing.assert_close(w, torch.full((3,), expected))


def test_dtensor_uses_its_local_part(tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        w = distribute_tensor(torch.full((4, 4), 0.1), mesh)
        assert native.why_not(w) is None
        native.decay_([w], [w.clone()], terms=[(1, 0.1)], rate=1.0)
        torch.testing.assert_close(w.to_local(), torch.full((4, 4), 0.05))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adam_matches_torch_fused(dtype):
    torch.manual_seed(0)
    mine = [torch.randn(100).to(dtype) for _ in range(3)] + [torch.rand(100).to(dtype)]
    theirs = [tensor.clone() for tensor in mine]
    _adam_once(*mine, terms=[])
    step = torch.tensor(5.0)
    torch._fused_adamw_(*([tensor] for tensor in theirs), [], [step], lr=1e-2, **ADAM)
    loose = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, two, **loose)
