"""Property tests of the decay step: extreme p, lr, lam, weights, shapes and precisions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from pdecay import PSGD, Lp, PAdam, attach
from pdecay._core.penalty import as_penalty

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(0,), (0, 3), (), (1,), (1, 1), (5,), (2, 3), (33, 40)]

powers = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 4.0]), st.floats(0, 4))
strengths = st.one_of(st.sampled_from([0.0, 1e-3, 1.0, 1e3]), st.floats(0, 1e3))
rates = st.one_of(st.sampled_from([0.0, 1e-3, 1.0, 10.0]), st.floats(0, 10))
penalties = st.lists(st.tuples(powers, strengths), min_size=1, max_size=3).map(as_penalty)


def special(dtype):
    """Generate zeros of both signs, subnormal numbers, and both ends of the dtype's range."""
    info = torch.finfo(dtype)
    tiny = float(info.smallest_normal)
    subnormal = [tiny / 2, tiny * info.eps]
    ends = [tiny, tiny * (1 + info.eps), 1e-38, 1e38, float(info.max)]
    sizes = [0.0, *subnormal, *(size for size in ends if size <= info.max), 1.0]
    return [sign * size for size in sizes for sign in (1, -1)]


@st.composite
def weights(draw, dtype):
    info = torch.finfo(dtype)
    shape = draw(st.sampled_from(SHAPES))
    low, high = math.log10(info.smallest_normal), math.log10(info.max) - 0.01
    if math.prod(shape) <= 6:
        size = st.floats(low, high).map(lambda x: 10**x)
        some = st.one_of(st.sampled_from(special(dtype)), size, size.map(lambda x: -x))
        values = [draw(some) for _ in range(math.prod(shape))]
    else:
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        values = 10 ** rng.uniform(low, high, shape) * rng.choice([-1, 1], shape)
        values = np.where(rng.random(shape) < 0.3, rng.choice(special(dtype), shape), values)
    return torch.as_tensor(np.array(values), dtype=torch.float64).to(dtype).reshape(shape)


def some_weights():
    return st.sampled_from(DTYPES).flatmap(weights)


def holds_zero(penalty, lr):
    """Return whether zero is a fixed point: a term with p < 2 has a rate that is not 0."""
    return any(p < 2 and lr * lam > 0 for p, lam in penalty.pairs())


def does_nothing(penalty, lr):
    return all(lr * lam == 0 for _, lam in penalty.pairs())


class TestFactor:
    @given(some_weights(), penalties, rates)
    @settings(deadline=None, max_examples=500)
    @example(torch.zeros(3), Lp(1, 1e-300), 1e-20)
    @example(torch.zeros(3), Lp(1, 5e-324), 0.1)
    @example(torch.tensor([1e38, -1e38]), Lp(4, 1e3), 10.0)
    @example(torch.tensor([1e-38, -1e-38, 1e-45]), Lp(0, 1e3), 10.0)
    @example(torch.zeros(2), Lp(0, 1e-320) + Lp(4, 1e3), 10.0)
    def test_is_between_0_and_1(self, w, penalty, lr):
        lr_tensor = torch.tensor(lr, dtype=torch.float64)
        underflows = any(lr and lam and not lr * lam for _, lam in penalty.pairs())
        for array, rate in [(w, lr), (_numpy(w), lr), (w, lr_tensor)]:
            factor = torch.as_tensor(penalty.factor(array, rate))
            assert factor.shape == w.shape
            assert ((factor >= 0) & (factor <= 1)).all(), "also fails for NaN"
            if rate is lr_tensor and underflows:
                continue  # for a tensor lr, the product lr * lam is not computed, so cannot be 0
            at_zero = factor[w == 0]
            if does_nothing(penalty, lr):
                assert (factor == 1).all()
            elif holds_zero(penalty, lr):
                assert (at_zero == 0).all()
            else:
                flat = 1 + lr * sum(lam for p, lam in penalty.pairs() if p == 2)
                torch.testing.assert_close(at_zero, torch.full_like(at_zero, 1 / flat))

    @given(
        some_weights(),
        st.lists(st.tuples(powers, st.floats(1e-3, 1e3)), min_size=1, max_size=3).map(as_penalty),
        st.floats(1e-3, 10),
    )
    @settings(deadline=None, max_examples=200)
    def test_matches_logarithmic_computation(self, w, penalty, lr):
        """Compare with a computation in logarithms, which neither overflows nor underflows.

        A power that overflows leaves the factor at 0, which is off by less than the smallest
        normal number over lr * lam.
        """
        factor = penalty.factor(w, lr)
        normal = w.double().abs() >= torch.finfo(factor.dtype).smallest_normal
        x = w[normal].double().abs().log()
        exponents = [math.log(lr * lam) + (p - 2) * x for p, lam in penalty.pairs()]
        expected = torch.sigmoid(-torch.logsumexp(torch.stack(exponents), 0))
        single = factor.dtype == torch.float32
        torch.testing.assert_close(
            factor[normal].double(),
            expected,
            rtol=3e-6 if single else 1e-11,
            atol=1e-31 if single else 1e-300,
        )

    @given(some_weights(), penalties, rates)
    @settings(deadline=None, max_examples=100)
    def test_s_and_value_give_no_nan(self, w, penalty, lr):
        for array in (w, _numpy(w)):
            assert not torch.as_tensor(penalty.s(array)).isnan().any()
            assert not torch.as_tensor(penalty.value(array)).isnan().any()


def _numpy(w):
    return (w.float() if w.dtype == torch.bfloat16 else w).numpy()


def _attached(groups, lr):
    optimizer = torch.optim.SGD(groups, lr=lr)
    attach(optimizer, None)
    return optimizer


# The plain optimizer, ours, and whether ours must be bit-identical to "step, then multiply".
OPTIMIZERS = {
    "PAdam": (
        lambda params, lr: torch.optim.AdamW(params, lr, weight_decay=0, foreach=False),
        lambda groups, lr: PAdam(groups, lr, foreach=False),
        True,
    ),
    "PAdam foreach": (
        lambda params, lr: torch.optim.AdamW(params, lr, weight_decay=0, foreach=True),
        lambda groups, lr: PAdam(groups, lr, foreach=True),
        False,
    ),
    "PAdam foreach without C": (
        lambda params, lr: torch.optim.AdamW(params, lr, weight_decay=0, foreach=True),
        lambda groups, lr: PAdam(groups, lr, foreach=True, fused=False),
        True,
    ),
    "PSGD": (
        lambda params, lr: torch.optim.SGD(params, lr),
        lambda groups, lr: PSGD(groups, lr, foreach=False),
        True,
    ),
    "PSGD foreach": (
        lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, foreach=True),
        lambda groups, lr: PSGD(groups, lr, momentum=0.9, foreach=True),
        False,
    ),
    "PSGD foreach without C": (
        lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, foreach=True),
        lambda groups, lr: PSGD(groups, lr, momentum=0.9, foreach=True, fused=False),
        True,
    ),
    "attach": (lambda params, lr: torch.optim.SGD(params, lr), _attached, False),
}
optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


@optimizers
@pytest.mark.filterwarnings("ignore:these tensors are all zero")
@given(st.lists(some_weights(), min_size=1, max_size=2), penalties, rates, st.integers(0, 99))
@settings(deadline=None, max_examples=150)
def test_one_step_keeps_signs_and_never_grows_weights(name, tensors, penalty, lr, seed):
    make_plain, make_ours, exact = OPTIMIZERS[name]
    rng = np.random.default_rng(seed)
    params = []
    for w in tensors:
        gradient = torch.as_tensor(10 ** rng.uniform(-3, 3, w.shape) * rng.choice([-1, 1], w.shape))
        pair = nn.Parameter(w.clone()), nn.Parameter(w.clone())
        for param in pair:
            param.grad = gradient.to(w.dtype).clone()
        params.append(pair)
    make_plain([plain for plain, _ in params], lr).step()
    make_ours([{"params": [ours for _, ours in params], "decay": penalty}], lr).step()
    for w_old, (plain, ours) in zip(tensors, params, strict=True):
        finite = plain.detach().isfinite()
        w_tilde, w, w_old = plain.detach()[finite], ours.detach()[finite], w_old[finite]
        assert w.isfinite().all()
        assert (w.sign() * w_tilde.sign() >= 0).all(), "a sign was flipped"
        assert (w.abs() <= w_tilde.abs()).all(), "a weight grew"
        if does_nothing(penalty, lr):
            assert torch.equal(w, w_tilde)
        elif holds_zero(penalty, lr):
            assert (w[w_old == 0] == 0).all()
        if exact:
            assert torch.equal(w, w_tilde.mul_(penalty.factor(w_old, lr)))


@optimizers
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("penalty", [Lp(0, 0.1), Lp(0.8, 0.1), Lp(1, 0.1) + Lp(2, 1)], ids=repr)
def test_warmup_from_zero_learning_rate(name, dtype, penalty):
    """A warm-up that starts at lr = 0 keeps weights finite, and zeros at zero."""
    torch.manual_seed(0)
    w = torch.randn(20, 30)
    w[:, ::3] = 0
    w[0] *= 1e-6
    w = nn.Parameter(w.to(dtype))
    optimizer = OPTIMIZERS[name][1]([{"params": [w], "decay": penalty}], 0.0)
    zeros = w == 0
    for step in range(15):
        optimizer.param_groups[0]["lr"] = 0.01 * step
        # Not near 0, where squares underflow in torch's own Adam in half precision.
        w.grad = ((0.5 + torch.rand(20, 30)) * torch.randn(20, 30).sign()).to(dtype)
        before = w.detach().clone()
        optimizer.step()
        assert w.isfinite().all()
        assert (w[zeros] == 0).all()
        assert torch.equal(w, before) == (step == 0)
        zeros = w == 0


@optimizers
@pytest.mark.parametrize("p", [2, 2.5, 4])
def test_zeros_move_if_every_p_is_at_least_2(name, p):
    w = nn.Parameter(torch.zeros(2, 2))
    w.grad = -torch.ones_like(w)
    OPTIMIZERS[name][1]([{"params": [w], "decay": Lp(p, 0.1)}], 0.1).step()
    assert (w > 0.05).all()
