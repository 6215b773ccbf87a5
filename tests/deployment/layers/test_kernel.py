"""The sparse kernel compared with torch, over shapes, work partitions and threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv2d, linear, pad

from pdecay.deployment.layers import conv_plan as conv_module
from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.deployment.layers import row_plan as row_module
from pdecay.deployment.layers.conv_plan import conv_plan
from pdecay.deployment.layers.kernel import Call
from pdecay.deployment.layers.row_plan import row_plan
from pdecay.deployment.layers.shapes import NonZeros, Shape

pytestmark = pytest.mark.usefixtures("needs_native")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}


def non_zeros(weight: Tensor, bias: Tensor) -> NonZeros:
    outputs, columns = weight.flatten(1).nonzero(as_tuple=True)
    row = pad(torch.bincount(outputs, minlength=len(weight)).cumsum(0), (1, 0))
    return NonZeros(weight.flatten(1)[outputs, columns], columns.int(), row, bias)


def draw_weight(random: torch.Generator, shape: tuple[int, ...], sparsity: float, dtype) -> Tensor:
    weight = torch.randn(shape, generator=random, dtype=dtype)
    return weight * (torch.rand(shape, generator=random) >= sparsity)


def assert_close(got: Tensor, wanted: Tensor, scale: Tensor) -> None:
    """Compare relative to `scale`, the sum of the absolute terms, as rounding errors are."""
    assert got.shape == wanted.shape
    assert got.is_contiguous()
    error = (got.double() - wanted).abs()
    allowed = TOLERANCE[got.dtype] * scale.clamp(min=1e-30)
    assert bool((error <= allowed).all()), (error / allowed).max()


@pytest.fixture
def partition(monkeypatch):
    """Set the constants that partition the work, so that small inputs have many parts."""

    def set_(**values: float) -> None:
        for name, value in values.items():
            modules = (layers_kernel, conv_module, row_module)
            (module,) = [one for one in modules if hasattr(one, name)]
            monkeypatch.setattr(module, name, value)

    return set_


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    around = draw(st.tuples(*[st.integers(0, 3)] * 4))  # top, left, bottom, right
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    least = [
        max(1, d * (k - 1) + 1 - around[i] - around[i + 2])
        for i, (k, d) in enumerate(zip(kernel, dilation, strict=True))
    ]
    return {
        "shape": Shape(
            groups * draw(st.integers(1, 5)),
            groups * draw(st.integers(1, 19)),
            kernel,
            draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
            around,
            dilation,
            groups,
        ),
        "height": draw(st.integers(least[0], least[0] + 40)),
        "width": draw(st.integers(least[1], least[1] + 40) | st.sampled_from([16, 32, 48])),
        "images": draw(st.sampled_from([1, 1, 2, 5, 16, 33])),
        "planned": draw(st.sampled_from([1, 4, 33])),
        "sparsity": draw(st.sampled_from([0.0, 0.5, 0.9, 0.99])),
        "relu": draw(st.booleans()),
        "more": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float32, torch.float32, torch.float64])),
        "threads": draw(st.sampled_from([1, 2, 3])),
        "cache": draw(st.sampled_from([64, 1024, 32768])),
        "aligned": draw(st.sampled_from([0, 11, 1_000_000])),
    }


SAME = Shape(4, 18, (3, 3), padding=(1, 1, 1, 1))
CASE = {
    "shape": SAME,
    "height": 32,
    "width": 32,
    "images": 2,
    "planned": 2,
    "sparsity": 0.9,
    "relu": False,
    "more": False,
    "dtype": torch.float32,
    "threads": 1,
    "cache": 32768,
    "aligned": 11,
}


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
@example(CASE)
@example({**CASE, "aligned": 0, "cache": 64})  # each shift apart, in many blocks
@example({**CASE, "aligned": 1_000_000, "height": 40})  # all shifts in one plane, in bands
@example({**CASE, "height": 4, "width": 4, "images": 33, "planned": 33})  # images side by side
@example({**CASE, "height": 8, "width": 8, "images": 5, "planned": 33, "cache": 64})
@example({**CASE, "height": 7, "width": 7, "images": 33, "planned": 33, "cache": 64})
@example({**CASE, "shape": Shape(20, 40), "height": 16, "width": 16})  # read in place
@example({**CASE, "shape": Shape(40, 40), "height": 1, "width": 1, "images": 33, "planned": 33})
@example({**CASE, "shape": Shape(20, 40, stride=(2, 2)), "height": 16, "width": 16})
@example({**CASE, "shape": Shape(6, 6, (3, 3), groups=6), "dtype": torch.float64})  # depthwise
def test_convolution_matches_torch(partition, threads, case):
    shape, dtype = case["shape"], case["dtype"]
    random = torch.Generator().manual_seed(0)
    kernel = (shape.out_channels, shape.in_channels // shape.groups, *shape.kernel)
    weight = draw_weight(random, kernel, case["sparsity"], dtype)
    bias = torch.randn(shape.out_channels, generator=random, dtype=dtype)
    size = (case["images"], shape.in_channels, case["height"], case["width"])
    x = torch.randn(size, generator=random, dtype=dtype)

    partition(_CACHE=case["cache"], _MIN_VISIT=1, _MIN_ALIGNED=case["aligned"], _THREAD_WORK=1)
    threads(case["threads"])
    plan = conv_plan(
        shape, non_zeros(weight, bias), *size[2:], images=case["planned"], relu=case["relu"]
    )
    out_shape = (case["images"], shape.out_channels, *shape.output(*size[2:]))
    more = torch.randn(out_shape, generator=random, dtype=dtype) if case["more"] else None
    got = Call(plan, case["images"], out_shape)(x, more)

    def dense(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        top, left, bottom, right = shape.padding
        x = pad(x.double(), (left, right, top, bottom))
        return conv2d(
            *(x, weight.double(), bias.double(), shape.stride, 0, shape.dilation, shape.groups)
        )

    wanted = dense(x, weight, bias)
    scale = dense(x.abs(), weight.abs(), bias.abs())
    if more is not None:
        wanted, scale = wanted + more.double(), scale + more.double().abs()
    assert_close(got, wanted.relu() if case["relu"] else wanted, scale)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 200),
    st.integers(1, 600),
    st.sampled_from([0, 1, 2, 15, 16, 17, 128, 130, 300]),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0, 4]),
)
@example(32, 16, 1, 0.5, False, False, torch.float32, 1, 0)  # a single window
@example(31, 16, 1, 0.5, False, False, torch.float32, 1, 0)  # none: dot products
@example(1024, 1024, 1, 0.95, True, True, torch.float32, 2, 0)
def test_linear_layer_matches_torch(
    partition, threads, inputs, outputs, count, sparsity, relu, with_more, dtype, number, tile_fill
):
    random = torch.Generator().manual_seed(1)
    weight = draw_weight(random, (outputs, inputs), sparsity, dtype)
    bias = torch.randn(outputs, generator=random, dtype=dtype)
    x = torch.randn(count, inputs, generator=random, dtype=dtype)
    wanted = linear(x.double(), weight.double(), bias.double())
    scale = linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    more = torch.randn(count, outputs, generator=random, dtype=dtype) if with_more else None
    if more is not None:
        wanted, scale = wanted + more.double(), scale + more.double().abs()
    partition(_CACHE=64, _MIN_VISIT=1, _THREAD_WORK=1, _NEIGHBOURHOOD=2, _MIN_TILE_FILL=tile_fill)
    threads(number)
    shape, weights = Shape(inputs, outputs), non_zeros(weight, bias)
    for plan in (
        conv_plan(shape, weights, 1, 1, min(count, 128), relu),
        row_plan(shape, weights, relu),
    ):
        got = Call(plan, count, (count, outputs))(x, more)
        assert_close(got, wanted.relu() if relu else wanted, scale)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 30, 99])
@pytest.mark.parametrize("inputs", [100, 96 + 16])
def test_non_finite_input_of_row_kernel_reaches_only_its_readers(inputs, at, value):
    random = torch.Generator().manual_seed(3)
    weight = draw_weight(random, (40, inputs), 0.9, torch.float32)
    x = torch.randn(2, inputs, generator=random)
    x[1, at] = value
    got = Call(row_plan(Shape(inputs, 40), non_zeros(weight, torch.zeros(40)), False), 2, (2, 40))(
        x
    )
    read = weight[:, at] != 0
    assert 0 < read.sum() < 40
    wanted = x.nan_to_num(0, 0, 0) @ weight.T
    wanted[1, read] = value * weight[read, at]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_tiles_are_well_filled():
    if not layers_kernel.library().pdecay_has_tiles():
        pytest.skip("short vectors, or a compiler without variable permutations")
    random = torch.Generator().manual_seed(4)
    weight = draw_weight(random, (1024, 1024), 0.9, torch.float32)
    arrays = row_plan(Shape(1024, 1024), non_zeros(weight, torch.zeros(1024)), False).arrays
    used = int((arrays["tile_value"] != 0).sum())
    assert used == int((weight != 0).sum())
    assert int(arrays["tile_base"].max()) <= 1024 - 2 * layers_kernel.lanes_of(torch.float32)
    assert used > 0.5 * arrays["tile_value"].numel()
    weight = draw_weight(random, (1024, 1024), 0.999, torch.float32)
    arrays = row_plan(Shape(1024, 1024), non_zeros(weight, torch.zeros(1024)), False).arrays
    assert "tile_value" not in arrays  # they would be mostly empty


@pytest.mark.parametrize("relu", [False, True])
def test_non_finite_input_reaches_only_its_readers(relu):
    weight = torch.zeros(3, 2, 3, 3)
    weight[0, 0, 1, 1] = 1.0
    weight[1, 1, 1, 1] = -2.0
    x = torch.zeros(1, 2, 4, 4)
    x[0, 0, 2, 1] = math.nan
    x[0, 1, 0, 3] = math.inf
    plan = conv_plan(
        Shape(2, 3, (3, 3), padding=(1, 1, 1, 1)), non_zeros(weight, torch.ones(3)), 4, 4, 1, relu
    )
    got = Call(plan, 1, (1, 3, 4, 4))(x)
    wanted = torch.ones(1, 3, 4, 4)
    wanted[0, 0, 2, 1] = math.nan
    wanted[0, 1, 0, 3] = 0.0 if relu else -math.inf
    torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("size", [(1, 1), (4, 4), (16, 16), (32, 32), (5, 7)])
@pytest.mark.parametrize("nonzeros", [0, 1])
def test_zero_and_one_nonzero(size, nonzeros):
    weight = torch.zeros(17, 3, 3, 3)
    weight.view(-1)[weight.numel() // 2] = nonzeros
    bias = torch.arange(17.0)
    x = torch.randn(3, 3, *size)
    shape = Shape(3, 17, (3, 3), padding=(1, 1, 1, 1))
    plan = conv_plan(shape, non_zeros(weight, bias), *size, images=3, relu=False)
    got = Call(plan, 3, (3, 17, *size))(x)
    torch.testing.assert_close(got, conv2d(x, weight, bias, padding=1))


def test_concurrent_python_threads():
    """Each thread has its own scratch memory."""
    from concurrent.futures import ThreadPoolExecutor

    random = torch.Generator().manual_seed(2)
    weight = draw_weight(random, (32, 32, 3, 3), 0.9, torch.float32)
    weights = non_zeros(weight, torch.zeros(32))
    call = Call(conv_plan(SAME_32, weights, 8, 8, 4, False), 4, (4, 32, 8, 8))
    inputs = [torch.randn(4, 32, 8, 8, generator=random) for _ in range(16)]
    with ThreadPoolExecutor(4) as pool:
        for x, got in zip(inputs, pool.map(call, inputs), strict=True):
            torch.testing.assert_close(got, conv2d(x, weight, padding=1), rtol=1e-4, atol=1e-4)


SAME_32 = Shape(32, 32, (3, 3), padding=(1, 1, 1, 1))
