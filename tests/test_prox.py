import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdecay import Lp, prox
from pdecay._core.penalty import Sum

FRAMEWORKS = {"numpy": np.array, "torch": lambda *a: torch.tensor(*a, dtype=torch.float64)}
frameworks = pytest.mark.parametrize("array", FRAMEWORKS.values(), ids=FRAMEWORKS.keys())

CLOSED = [0, 1 / 2, 2 / 3, 1, 3 / 2, 2, 3]
OPEN = [1e-3, 0.1, 0.3, 0.8, 0.95, 0.999, 1.001, 1.05, 1.2, 4 / 3, 1.8, 1.99, 2.01, 2.5, 4, 7.5]
ALL_P = sorted([*CLOSED, *OPEN])
EPS = 2.0**-52

PENALTIES = [
    Lp(0.8, 0.2) + Lp(2, 0.3),
    Lp(1, 0.2) + Lp(2, 0.3),
    Lp(0, 0.2) + Lp(2, 0.3),
    Lp(0, 0.1) + Lp(1, 0.3),
    Lp(0, 0.1) + Lp(0.5, 0.2),
    Lp(0, 0.1) + Lp(1.5, 0.2),
    Lp(0, 0.1) + Lp(0.5, 0.2) + Lp(1, 0.1) + Lp(2, 0.4),
    Lp(0.5, 0.2) + Lp(0.8, 0.1),
    Lp(0.8, 0.2) + Lp(1.5, 0.1),
    Lp(1.2, 0.2) + Lp(1.7, 0.1),
    Lp(2.5, 0.2) + Lp(4, 0.1),
    Lp(0.3, 0.1) + Lp(0.6, 0.1) + Lp(0.9, 0.1),
    Lp(0.999, 0.4) + Lp(1.001, 0.3),
    Lp(0, 0.05) + Lp(0.7, 0.1) + Lp(1.4, 0.2) + Lp(3, 0.1),
    Lp(0.5, 0.1) + Lp(6, 0.5),
]


def objective(u, x, pairs):
    """Return ``sum_k (lam_k / p_k) u^p_k + (u - x)^2 / 2 - x^2 / 2`` for u >= 0."""
    total = u * (u / 2 - x)
    for p, lam in pairs:
        total = total + (lam * (u > 0) if p == 0 else lam / p * u**p)
    return total


def brute_force(x, pairs):
    """Return the lowest objective on a grid over [0, x] that is refined around its minimum."""
    low, high, best = 0.0, x, 0.0
    for _ in range(12):
        grid = np.concatenate([[0.0], np.linspace(low, high, 1001)])
        if low == 0:
            grid = np.concatenate([grid, x * np.logspace(-12, 0, 1000)])
        values = objective(grid, x, pairs)
        best = grid[values.argmin()]
        width = (high - low) / 100
        low, high = max(best - width, 0.0), min(best + width, x)
    return best


def assert_minimises(u, x, pairs):
    """Check that u is a minimiser within double precision, and a root to the last bits."""
    assert 0 <= u <= x
    scale = x * x + sum(lam / max(p, 0.5) * (x**p if u else 0) for p, lam in pairs)
    best = objective(brute_force(x, pairs), x, pairs)
    assert objective(u, x, pairs) <= best + 1e-13 * scale
    if u > 0:
        terms = [u, *(lam * u ** (p - 1) for p, lam in pairs if p)]
        steepness = max(1, *(abs(p - 1) for p, _ in pairs))
        assert sum(terms) == pytest.approx(x, rel=8 * EPS * steepness)


class TestKnownAnswers:
    @frameworks
    def test_p_1_is_soft_threshold(self, array):
        result = prox.lp(array([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5]), 1, 1.0)
        assert result.tolist() == [-2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5]

    @frameworks
    def test_p_0_is_hard_threshold(self, array):
        result = prox.lp(array([-3.0, -2.0, -1.9, 0.0, 2.0, 2.1]), 0, 2.0)  # sqrt(2 * 2) = 2
        assert result.tolist() == [-3.0, 0.0, 0.0, 0.0, 0.0, 2.1]

    @frameworks
    def test_p_2_is_ridge(self, array):
        assert prox.lp(array([-3.0, 0.0, 1.0]), 2, 0.5).tolist() == [-2.0, 0.0, 1 / 1.5]

    @frameworks
    @pytest.mark.parametrize(
        ("p", "lam", "u"),  # w = u + lam u^(p-1), so that the root u is known
        [
            (0.5, 1.0, 4.0),  # 4 + 1/2
            (2 / 3, 2.0, 8.0),  # 8 + 2/2
            (0.75, 8.0, 16.0),  # 16 + 8/2
            (1.5, 3.0, 4.0),  # 4 + 3*2
            (4 / 3, 3.0, 8.0),  # 8 + 3*2
            (1.25, 3.0, 16.0),  # 16 + 3*2
            (3, 0.5, 2.0),  # 2 + 0.5*4
            (4, 0.5, 2.0),  # 2 + 0.5*8
            (2.5, 1.0, 4.0),  # 4 + 8
        ],
    )
    def test_roots_by_hand(self, array, p, lam, u):
        w = u + lam * u ** (p - 1)
        np.testing.assert_allclose(prox.lp(array([w, -w]), p, lam), [u, -u], rtol=1e-15)

    @pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 2 / 3, 0.8, 0.95, 0.999])
    def test_threshold_below_1(self, p):
        # The textbook form: tau = (2 - p) / (2 (1 - p)) * u*, u* = (2 lam (1 - p) / p)^(1/(2-p))
        lam = 0.3
        jump = (2 * lam * (1 - p) / p) ** (1 / (2 - p))
        tau = (2 - p) / (2 * (1 - p)) * jump
        below, above = prox.lp(np.array([tau * (1 - 1e-13), tau * (1 + 1e-13)]), p, lam)
        assert below == 0
        assert above == pytest.approx(jump, rel=1e-12)

    def test_tie_gives_zero(self):
        # p = 1/2: r = 2/3 and a = (2/3)^(1/2) / 3 at the threshold; x = 3/2 gives u = 1, lam = 1/2.
        lam = 0.5
        assert objective(1.0, 1.5, [(0.5, lam)]) == 0
        x = np.array([np.nextafter(1.5, 0), 1.5, 1.5 + 4 * EPS])
        assert prox.lp(x, 0.5, lam).tolist() == [0, 0, pytest.approx(1, rel=1e-14)]
        assert prox.lp(np.array([2.0]), 0, 2.0).tolist() == [0]

    @pytest.mark.parametrize("p", [p for p in ALL_P if p >= 1])
    def test_p_near_1_and_2_is_close_to_the_limits(self, p):
        w = np.linspace(-3, 3, 101)
        np.testing.assert_allclose(prox.lp(w, 1 + 1e-9, 0.7), prox.lp(w, 1, 0.7), atol=1e-7)
        np.testing.assert_allclose(prox.lp(w, 2 + 1e-9, 0.7), prox.lp(w, 2, 0.7), atol=1e-8)


class TestBruteForce:
    @settings(max_examples=200, deadline=None)
    @given(
        st.floats(0, 4) | st.sampled_from(ALL_P),
        st.floats(-3, 3).map(lambda e: 10**e),
        st.floats(-3, 3).map(lambda e: 10**e),
    )
    def test_any_p_finds_the_minimum(self, p, lam, x):
        # For smaller p, lam / p and u^p differ too much to compare objectives in double precision.
        p = 0.0 if p < 1e-6 else p
        assert_minimises(float(prox.lp(np.array([x]), p, lam)[0]), x, [(p, lam)])

    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 1.0, 2.0]) | st.floats(0.05, 4),
                st.floats(-2, 2).map(lambda e: 10**e),
            ),
            min_size=2,
            max_size=4,
            unique_by=lambda pair: pair[0],
        ),
        st.floats(-2, 2).map(lambda e: 10**e),
    )
    def test_any_sum_finds_the_minimum(self, pairs, x):
        penalty = Sum(tuple(Lp(p, lam) for p, lam in pairs))
        assert_minimises(float(prox.penalty_prox(penalty, np.array([x]), 1.0)[0]), x, pairs)

    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_chosen_sums_find_the_minimum(self, penalty):
        x = np.concatenate([np.logspace(-3, 2, 40), np.linspace(0.2, 2, 40)])
        for one, u in zip(x, prox.penalty_prox(penalty, x, 1.0), strict=True):
            assert_minimises(float(u), one, penalty.pairs())


class TestIteration:
    """Closed forms compared with Newton's iteration."""

    @pytest.mark.parametrize(
        ("p", "closed"), [(1 / 2, prox._half), (2 / 3, prox._two_thirds)], ids=["1/2", "2/3"]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_closed_forms_below_1_match_the_iteration(self, p, closed, dtype):
        r = 2 * (1 - p) / (2 - p)
        a = p / (2 - p) * r ** (1 - p) * torch.linspace(0, 1, 10001, dtype=dtype)
        torch.testing.assert_close(
            closed(a, p), prox._newton_below_1(a, p), rtol=12 * torch.finfo(dtype).eps, atol=0
        )

    @pytest.mark.parametrize(
        ("p", "closed"), [(3 / 2, prox._three_halves), (3, prox._three)], ids=["3/2", "3"]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_closed_forms_above_1_match_the_iteration(self, p, closed, dtype):
        x = torch.logspace(-9, 9, 10001, dtype=dtype)
        for lam in (1e-6, 0.3, 1e6):
            torch.testing.assert_close(
                closed(x, p, lam),
                prox._newton_above_1(x, p, lam),
                rtol=8 * torch.finfo(dtype).eps,
                atol=0,
            )

    @pytest.mark.parametrize("p", [p for p in ALL_P if p not in (0, 1, 2)])
    def test_several_agrees_with_single(self, p):
        x = np.logspace(-2, 2, 1001)
        with np.errstate(all="ignore"):
            halves, _ = prox._several(x, {p: 0.3, p + 1e-14: 0.3})
        np.testing.assert_allclose(halves, prox.lp(x, p, 0.6), rtol=1e-10 / abs(p - 1), atol=1e-300)

    @pytest.mark.parametrize("p", OPEN)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_more_steps_change_nothing(self, p, dtype, monkeypatch):
        lam = 0.3
        scale = lam ** (1 / (2 - p)) if abs(p - 2) > 0.1 else 1.0
        x = scale * torch.logspace(-4, 4, 20001, dtype=dtype)
        result = prox.lp(x, p, lam)
        once = prox._newton
        monkeypatch.setattr(prox, "_newton", lambda a, b, p, t: once(a, b, p, once(a, b, p, t)))
        tolerance = 4 * torch.finfo(dtype).eps / min(1, abs(p - 1))
        torch.testing.assert_close(prox.lp(x, p, lam), result, rtol=tolerance, atol=0)


class TestProperties:
    @settings(max_examples=100, deadline=None)
    @given(st.floats(0, 4) | st.sampled_from(ALL_P), st.floats(-4, 4), st.integers(0, 1000))
    def test_is_odd_shrinking_and_monotone(self, p, exponent, seed):
        w = np.random.default_rng(seed).standard_normal(200) * 10**exponent
        w.sort()
        u = prox.lp(w, p, 0.3)
        assert (prox.lp(-w, p, 0.3) == -u).all()
        assert (np.abs(u) <= np.abs(w)).all()
        assert (u * w >= 0).all()
        assert (np.diff(u) >= -8 * EPS * np.abs(u[1:]) / min(1, abs(p - 1) or 1)).all()

    @pytest.mark.parametrize("p", ALL_P)
    def test_larger_lam_shrinks_more(self, p):
        w = np.linspace(-2, 2, 401)
        results = [np.abs(prox.lp(w, p, lam)) for lam in (0, 0.01, 0.1, 1, 10)]
        for weak, strong in itertools.pairwise(results):
            assert (strong <= weak).all()

    @pytest.mark.parametrize("p", [p for p in ALL_P if p >= 1])
    def test_firmly_nonexpansive_where_convex(self, p):
        w = np.random.default_rng(0).standard_normal((2, 1000)) * 2
        u = prox.lp(w, p, 0.5)
        step_w, step_u = w[0] - w[1], u[0] - u[1]
        assert (step_u * step_u <= step_u * step_w + 1e-14).all()

    @pytest.mark.parametrize("p", ALL_P)
    def test_scales_with_the_weights(self, p):
        # prox of lam c^(2-p) at c w is c times prox of lam at w; exact if c is a power of 2
        w = np.linspace(-3, 3, 1001)
        c = 2.0**8
        np.testing.assert_allclose(
            prox.lp(c * w, p, 0.4 * c ** (2 - p) if p else 0.4 * c**2),
            c * prox.lp(w, p, 0.4),
            rtol=1e-13 / min(1, abs(p - 1) or 1),
        )

    @frameworks
    @pytest.mark.parametrize("p", ALL_P)
    def test_zero_lam_returns_the_weights(self, array, p):
        w = array([-2.0, -0.0, 0.0, 5e-324, 1e-30, 1e300, math.inf])
        result = prox.lp(w, p, 0)
        assert result.tolist() == w.tolist()
        assert math.copysign(1, result[1]) == -1
        assert result is not w

    @pytest.mark.parametrize("p", ALL_P)
    def test_zeros_have_positive_sign(self, p):
        result = prox.lp(torch.tensor([-1e-9, -0.0, 0.0, 1e-9]), p, 1e9)
        zeros = result[result == 0]
        assert len(zeros) >= 2
        assert not torch.signbit(zeros).any()


class TestExtremes:
    @pytest.mark.parametrize("p", ALL_P)
    @pytest.mark.parametrize(
        ("dtype", "most"), [(torch.float64, 30), (torch.float32, 35)], ids=["double", "single"]
    )
    def test_tiny_and_huge_weights(self, p, dtype, most):
        exponents = torch.linspace(-most, most, 61, dtype=torch.float64)
        w = torch.cat([10**exponents, -(10**exponents), torch.zeros(1)]).to(dtype)
        eps = torch.finfo(dtype).eps
        for lam in (10.0 ** torch.linspace(-most, most, 31, dtype=torch.float64)).tolist():
            u = prox.lp(w, p, lam)
            assert u.isfinite().all()
            assert (u.abs() <= w.abs()).all()
            assert (u * w >= 0).all()
            x, v = w.double().abs(), u.double().abs()
            alive = v > 0
            root = v + (lam * v ** (p - 1) if p else 0)
            torch.testing.assert_close(root[alive], x[alive], rtol=12 * eps * max(1, p), atol=0)
            # For p > 1, only results that underflow are 0.
            if p > 1:
                bound = torch.minimum(x, (x / lam) ** (1 / (p - 1)))
                tiny = torch.finfo(dtype).smallest_normal * 2 ** (1 + max(1, 1 / (p - 1)))
                assert (alive | (bound <= tiny)).all()

    @pytest.mark.parametrize("p", [2.5, 3.9])
    @pytest.mark.parametrize(("x", "lam"), [(1e24, 1e-22), (1e-24, 1e30)])
    def test_sum_where_weight_by_lam_exceeds_single_precision(self, x, lam, p):
        penalty = Lp(p, lam) + Lp(3.5, lam)
        single, double = (
            prox.penalty_prox(penalty, torch.tensor([x], dtype=dtype), lr=1.0).double()
            for dtype in (torch.float32, torch.float64)
        )
        assert 0 < double < 2 * x
        torch.testing.assert_close(single, double, rtol=1e-5, atol=0)

    @frameworks
    @pytest.mark.parametrize("p", ALL_P)
    def test_non_finite_weights_are_unchanged(self, array, p):
        result = prox.lp(array([math.inf, -math.inf, math.nan, 1.0]), p, 0.01).tolist()
        assert result[:2] == [math.inf, -math.inf]
        assert math.isnan(result[2])
        assert math.isfinite(result[3])

    @pytest.mark.parametrize("p", [1e-300, 1 - 2**-53, 1 + EPS, 2 - EPS, 2 + 2 * EPS, 50.0, 1e300])
    def test_extreme_p(self, p):
        w = np.linspace(-3, 3, 601)
        u = prox.lp(w, p, 0.5)
        assert np.isfinite(u).all()
        assert (np.abs(u) <= np.abs(w)).all()
        limits = {1 - 2**-53: 1, 1 + EPS: 1, 2 - EPS: 2, 2 + 2 * EPS: 2}
        if p in limits:
            np.testing.assert_allclose(u, prox.lp(w, limits[p], 0.5), atol=1e-13)
        if p == 1e300:
            np.testing.assert_allclose(u, np.clip(w, -1, 1))

    def test_subnormal_weights_become_zero(self):
        assert prox.lp(torch.tensor([1e-40, -1e-40]), 2, 1e-3).tolist() == [0, 0]


class TestArrays:
    @pytest.mark.parametrize("p", ALL_P)
    def test_numpy_matches_torch(self, p):
        w = np.random.default_rng(0).standard_normal((50, 40))
        ours = prox.lp(torch.from_numpy(w), p, 0.3).numpy()
        tolerance = 8 * EPS / min(1, abs(p - 1) or 1)  # p near 1 is ill-conditioned
        np.testing.assert_allclose(ours, prox.lp(w, p, 0.3), rtol=tolerance)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("p", [0, 0.5, 0.8, 1, 1.2, 2])
    def test_half_precision_computes_in_float32(self, dtype, p):
        w = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
        result = prox.lp(w, p, 0.01)
        assert result.dtype == dtype
        assert torch.equal(result, prox.lp(w.float(), p, 0.01).to(dtype))
        assert prox.lp(np.ones(3, np.float16), p, 0.01).dtype == np.float16

    @frameworks
    @pytest.mark.parametrize("p", [0, 0.5, 0.8, 1, 1.2, 2])
    def test_complex_shrinks_by_magnitude(self, array, p):
        w = np.array([3 + 4j, -0.3 + 0.4j, 0, 1e-9j])
        result = np.asarray(prox.lp(w if array is np.array else torch.from_numpy(w), p, 0.1))
        assert result.dtype == np.complex128
        np.testing.assert_allclose(np.abs(result), prox.lp(np.abs(w), p, 0.1), rtol=1e-15)
        alive = result != 0
        np.testing.assert_allclose(np.angle(result)[alive], np.angle(w)[alive], rtol=1e-15)

    @frameworks
    @pytest.mark.parametrize("p", ALL_P)
    def test_lam_may_differ_between_weights(self, array, p):
        w, lam = array([-2.0, 0.5, 3.0, -0.0, 1.0]), array([0.1, 0.2, 0.0, 0.0, 5.0])
        result = prox.lp(w, p, lam).tolist()
        each = [float(prox.lp(array([x]), p, float(y))[0]) for x, y in zip(w, lam, strict=True)]
        assert result == pytest.approx(each, rel=1e-14)
        assert result[2] == 3.0

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
    def test_array_lam_keeps_the_dtype(self, dtype):
        w, lam = torch.ones(3, dtype=dtype), torch.full((3,), 0.1, dtype=torch.float64)
        assert prox.lp(w, 0.8, lam).dtype == dtype

    @pytest.mark.parametrize("p", [0.8, 1, 2.5])
    def test_splitting_into_pieces_changes_nothing(self, p, monkeypatch):
        w = torch.randn(7, 501, generator=torch.Generator().manual_seed(0)).T
        whole = prox.lp(w, p, 0.1)
        monkeypatch.setattr(prox, "_PIECE", 64)
        pieces = prox.lp(w, p, 0.1)
        assert pieces.shape == w.shape
        torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=0)

    def test_accepts_lists_and_integers(self):
        assert prox.lp([-3, 2], 1, 1).tolist() == [-2.0, 1.0]
        assert prox.lp(torch.tensor([-3, 2]), 1, 1).tolist() == [-2.0, 1.0]
        assert float(prox.lp(np.float64(3.0), 1, np.float32(1))) == 2.0
        assert prox.lp(torch.empty(0, 3), 0.8, 1).shape == (0, 3)
        assert prox.lp(torch.tensor(3.0), 0.8, 1).shape == ()

    def test_has_no_gradient_and_is_not_in_place(self):
        w = torch.ones(3, requires_grad=True)
        result = prox.lp(w, 0.8, 0.1)
        assert not result.requires_grad
        assert w.tolist() == [1, 1, 1]


class TestPenaltyProx:
    @frameworks
    @pytest.mark.parametrize("p", ALL_P)
    def test_one_term_equals_lp(self, array, p):
        w = array([-2.0, -0.1, 0.0, 0.5])
        assert (prox.penalty_prox(Lp(p, 0.5), w, 0.2) == prox.lp(w, p, 0.2 * 0.5)).all()

    def test_lam_of_equal_p_add_up(self):
        w = np.linspace(-2, 2, 101)
        penalty = Lp(0.8, 0.1) + Lp(0.8, 0.3) + Lp(1.5, 0.0)
        np.testing.assert_allclose(
            prox.penalty_prox(penalty, w, 1.0), prox.lp(w, 0.8, 0.4), rtol=1e-15
        )

    @frameworks
    def test_elastic_net(self, array):
        # soft threshold, then shrink: (|w| - l1) / (1 + l2)
        w = array([-3.5, -0.4, 0.5, 2.5])
        result = prox.penalty_prox(Lp(1, 0.5) + Lp(2, 1.0), w, 1.0)
        assert result.tolist() == [-1.5, 0, 0, 1.0]

    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_lr_may_be_a_tensor(self, penalty):
        w = torch.linspace(-3, 3, 101, dtype=torch.float64)
        torch.testing.assert_close(
            prox.penalty_prox(penalty, w, torch.tensor(0.3, dtype=torch.float64)),
            prox.penalty_prox(penalty, w, 0.3),
            rtol=1e-12,
            atol=0,
        )
        assert torch.equal(prox.penalty_prox(penalty, w, torch.tensor(0.0)), w)
        assert torch.equal(prox.penalty_prox(penalty, w, 0.0), w)

    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_extremes(self, penalty):
        for dtype, most in ((torch.float64, 30), (torch.float32, 18)):
            w = (10 ** torch.linspace(-most, most, 121, dtype=torch.float64)).to(dtype)
            w = torch.cat([w, -w, torch.zeros(1, dtype=dtype)])
            for lr in (10.0**-most, 1e-6, 1.0, 1e6, 10.0**most):
                u = prox.penalty_prox(penalty, w, lr)
                assert u.isfinite().all()
                assert (u.abs() <= w.abs()).all()
                assert (u * w >= 0).all()

    @pytest.mark.parametrize("p", [0.5, 0.8, 1, 1.5, 2, 3])
    def test_decay_step_approximates_it(self, p):
        # To first order in lr both are w - lr * lam * |w|^(p-1).
        w = torch.tensor([-2.0, 0.5, 1.0, 3.0], dtype=torch.float64)
        penalty, lr = Lp(p, 0.3), 1e-4
        step = penalty.factor(w, lr) * w
        torch.testing.assert_close(prox.penalty_prox(penalty, w, lr), step, rtol=1e-7, atol=0)


class TestErrors:
    @pytest.mark.parametrize("p", [-0.5, math.nan, math.inf])
    def test_invalid_p_raises(self, p):
        with pytest.raises(ValueError, match="p must be finite and >= 0"):
            prox.lp(np.ones(2), p, 0.1)

    @pytest.mark.parametrize("lam", [-1e-9, math.nan, math.inf])
    def test_invalid_lam_raises(self, lam):
        with pytest.raises(ValueError, match="lam must be finite and >= 0"):
            prox.lp(np.ones(2), 1, lam)

    @pytest.mark.parametrize("value", ["1", None, True, 1j, [0.1]])
    def test_non_number_raises(self, value):
        with pytest.raises(TypeError, match="p must be a number"):
            prox.lp(np.ones(2), value, 0.1)
        with pytest.raises(TypeError, match="lam must be a number"):
            prox.lp(np.ones(2), 1, value)

    def test_invalid_lr_raises(self):
        with pytest.raises(ValueError, match="lr must be finite and >= 0, got -1"):
            prox.penalty_prox(Lp(1, 0.1), np.ones(2), -1)
        with pytest.raises(TypeError, match="needs an Lp or a sum of Lp"):
            prox.penalty_prox(0.1, np.ones(2), 0.1)
