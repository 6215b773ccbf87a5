"""Tests of the C kernels: comparison with torch in float64, and edge cases."""

import math

import pytest
import torch

from pdecay._optim.kernels import native
from tests.optim.kernels.settings import ADAM, SGD, TERMS, TOLERANCE

pytestmark = pytest.mark.usefixtures("needs_native")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TERMS)
def test_adam_matches_reference_after_200_steps(twins, dtype, name):
    pair = twins(dtype)
    pair.adam(native, TERMS[name], 200)
    assert pair.difference() < TOLERANCE[dtype]
    assert pair.different_zeros() < 0.005


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"maximize": True},
        {"weight_decay": 0.0},
        {"weight_decay": 0.3, "amsgrad": True, "maximize": True},
    ],
    ids=str,
)
def test_adam_supports_torch_settings(twins, dtype, options):
    pair = twins(dtype)
    pair.adam(native, TERMS["0.8"], 100, **options)
    assert pair.difference() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TERMS)
def test_sgd_matches_reference_after_200_steps(twins, dtype, name):
    pair = twins(dtype)
    pair.sgd(native, TERMS[name], 200, momentum=0.9)
    assert pair.difference() < TOLERANCE[dtype]
    assert pair.different_zeros() < 0.005


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.5, "maximize": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_sgd_supports_torch_settings(twins, dtype, options):
    pair = twins(dtype)
    pair.sgd(native, TERMS["0.8"], 100, **options)
    assert pair.difference() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", [name for name in TERMS if name != "none"])
def test_decay_multiplies_by_the_factor(twins, literal_factor, dtype, name):
    pair = twins(dtype)
    olds = [w.clone() for w in pair.fast]
    news = [pair.normal(w.shape).to(dtype) for w in olds]
    expected = [
        n.double() * literal_factor(o, TERMS[name], 1e-3) for o, n in zip(olds, news, strict=True)
    ]
    native.decay_(news, olds, terms=TERMS[name], rate=1e-3)
    for new, value in zip(news, expected, strict=True):
        torch.testing.assert_close(new.double(), value, rtol=TOLERANCE[dtype], atol=0)


def test_sgd_first_may_differ_between_tensors():
    weights = [torch.zeros(5), torch.zeros(5)]
    buffers = [torch.full((5,), math.nan), torch.ones(5)]
    grads = [torch.ones(5), torch.ones(5)]
    options = SGD | {"momentum": 0.5, "dampening": 0.25}
    native.sgd_(weights, grads, buffers, terms=[], lr=1.0, first=[True, False], **options)
    assert torch.equal(buffers[0], torch.ones(5))
    assert torch.equal(buffers[1], torch.full((5,), 0.5 + 0.75))
    assert torch.equal(weights[1], -buffers[1])


def test_decay_may_have_its_own_rate(literal_factor):
    w, old = torch.full((7,), 0.1), torch.full((7,), 0.1)
    native.sgd_([w], [torch.zeros(7)], [], terms=[(0.8, 0.5)], lr=1.0, rate=1e-2, **SGD)
    expected = old.double() * literal_factor(old, [(0.8, 0.5)], 1e-2)
    torch.testing.assert_close(w.double(), expected, rtol=1e-5, atol=0)


# ---- half precision ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["1", "0.8", "elastic"])
def test_half_precision_computes_in_float32_and_rounds_once(dtype, name):
    torch.manual_seed(0)
    half = [torch.randn(5000).to(dtype) for _ in range(3)] + [torch.rand(5000).to(dtype)]
    wide = [tensor.float() for tensor in half]
    for w, g, m, v in (half, wide):
        step = torch.tensor(3.0)
        native.adam_([w], [g], [m], [v], [], [step], terms=TERMS[name], lr=1e-2, **ADAM)
    for narrow, exact in zip(half, wide, strict=True):
        assert torch.equal(narrow, exact.to(dtype))


def test_half_precision_keeps_inf_and_nan():
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    grad = torch.tensor([math.nan, math.inf, 0.0], dtype=torch.bfloat16)
    native.sgd_([w], [grad], [], terms=[(1, 0.1)], lr=0.1, **SGD)
    assert w.isnan().tolist() == [True, False, False]
    assert w[1] == -math.inf


# ---- edge cases of the equation ----


@pytest.mark.parametrize("name", [n for n in TERMS if n != "none" and min(TERMS[n])[0] < 2])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_zero_stays_zero_for_any_update(name, dtype):
    w = torch.zeros(37, dtype=dtype)
    grad = torch.linspace(-1e20, 1e20, 37, dtype=dtype)
    native.sgd_([w], [grad], [], terms=TERMS[name], lr=1e-3, **SGD)
    assert torch.equal(w, torch.zeros_like(w))
    assert not torch.signbit(w).any()


@pytest.mark.parametrize(("p", "expected"), [(2, 1 / (1 + 0.5)), (2.1, 1.0), (3, 1.0), (10, 1.0)])
def test_zero_moves_for_p_at_least_2(p, expected):
    w = torch.ones(20)
    native.decay_([w], [torch.zeros(20)], terms=[(p, 0.5)], rate=1.0)
    torch.testing.assert_close(w, torch.full((20,), expected), rtol=1e-7, atol=0)


@pytest.mark.parametrize("name", TERMS)
def test_zero_lr_changes_nothing_even_at_zero(name):
    values = [0.0, -0.0, 1.0, -1e-20, 1e-42, 3e38, -3e38]
    w, old = torch.tensor(values), torch.tensor(values).flip(0)
    before = w.clone()
    native.decay_([w], [old], terms=TERMS[name], rate=0.0)
    native.sgd_([w], [torch.zeros(7)], [], terms=TERMS[name], lr=0.0, **SGD)
    state = [torch.zeros(7) for _ in range(2)]
    native.adam_([w], [torch.zeros(7)], *[[s] for s in state], [], [torch.tensor(0.0)],
                 terms=TERMS[name], lr=0.0, **ADAM)  # fmt: skip
    assert torch.equal(w, before)


def test_term_with_zero_lam_is_dropped():
    w = torch.zeros(9)
    native.sgd_([w], [-torch.ones(9)], [], terms=[(0.5, 0.0), (3, 1.0)], lr=1.0, **SGD)
    assert torch.equal(w, torch.ones(9))


@pytest.mark.parametrize("name", [name for name in TERMS if name != "none"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rate", [1e-45, 1e-30, 1e-3, 1.0, 1e30])
def test_extreme_weights_are_handled(name, dtype, rate):
    info = torch.finfo(dtype)
    size = 10.0 ** torch.arange(-320, 309, dtype=torch.float64)
    old = torch.cat([size, -size, torch.tensor([info.max, info.tiny])]).to(dtype)
    old = old[old.isfinite()]
    w = old.clone()
    native.decay_([w], [old], terms=TERMS[name], rate=rate)
    assert w.isfinite().all()
    assert (w.abs() <= old.abs()).all()
    assert ((w == 0) | (w.sign() == old.sign())).all()
    assert not ((w != 0) & (w.abs() < info.tiny)).any()


@pytest.mark.parametrize("name", ["0", "0.8", "1", "two"])
def test_underflowing_rate_only_keeps_zeros(name):
    old = torch.tensor([0.0, 1e-6, -0.1, 1e10])
    w = torch.tensor([1.0, 2.0, 3.0, 4.0])
    native.decay_([w], [old], terms=TERMS[name], rate=1e-300)
    assert w.tolist() == [0.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("name", ["0", "0.8", "1.5", "elastic", "two", "four"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_results_below_the_smallest_normal_number_are_plus_zero(name, dtype):
    tiny = torch.finfo(dtype).tiny
    old = torch.full((100,), 0.5, dtype=dtype)
    w = torch.linspace(-3 * tiny, 3 * tiny, 100, dtype=dtype)
    native.decay_([w], [old], terms=TERMS[name], rate=1e-6)
    assert ((w == 0) | (w.abs() >= tiny)).all()
    assert (w == 0).any()
    assert not torch.signbit(w[w == 0]).any()


@pytest.mark.parametrize("name", ["none", "0", "0.8", "1", "two", "four"])
def test_nan_gradients_reach_the_weights(name):
    for size in (1, 50):
        w, grad = torch.ones(size), torch.ones(size)
        grad[0] = math.nan
        adam_w, state = w.clone(), [torch.zeros(size) for _ in range(2)]
        native.sgd_([w], [grad], [], terms=TERMS[name], lr=1e-3, **SGD)
        native.adam_([adam_w], [grad], *[[s] for s in state], [], [torch.tensor(0.0)],
                     terms=TERMS[name], lr=1e-3, **ADAM)  # fmt: skip
        for result in (w, adam_w):
            assert result[0].isnan()
            assert not result[1:].isnan().any()


def test_huge_gradient_keeps_weights_finite():
    w, grad = torch.full((40,), 0.5), torch.full((40,), 1e20)
    state = [torch.zeros(40) for _ in range(2)]
    native.adam_([w], [grad], *[[s] for s in state], [], [torch.tensor(0.0)],
                 terms=[(0.8, 1e-3)], lr=1e-3, **ADAM)  # fmt: skip
    assert w.isfinite().all()
