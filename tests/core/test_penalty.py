import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdecay import Lp
from pdecay._core.penalty import as_penalty, magnitude

from .penalties import PENALTIES

FRAMEWORKS = {"numpy": np.array, "torch": lambda *a: torch.tensor(*a, dtype=torch.float64)}
frameworks = pytest.mark.parametrize("array", FRAMEWORKS.values(), ids=FRAMEWORKS.keys())

W = [-2.0, -0.5, 0.25, 1.0, 4.0]


def plain_value(w, penalty):
    return sum(
        lam * (sum(x != 0 for x in w) if p == 0 else sum(abs(x) ** p for x in w) / p)
        for p, lam in penalty.pairs()
    )


def plain_factor(x, penalty, lr):
    return 1 / (1 + lr * sum(lam * abs(x) ** (p - 2) for p, lam in penalty.pairs()))


class TestValue:
    @frameworks
    @pytest.mark.parametrize(
        ("penalty", "w", "expected"),
        [
            (Lp(1, 0.1), [1.0, -2.0, 0.0], 0.3),
            (Lp(2, 0.5), [1.0, -2.0, 0.0], 1.25),  # (0.5 / 2) * 5
            (Lp(0.5, 3), [4.0, -9.0, 0.0], 30.0),  # (3 / 0.5) * (2 + 3)
            (Lp(3, 6), [1.0, -2.0], 18.0),
            (Lp(0, 0.1), [0.0, -0.0, 5.0, -1e-9], 0.2),  # lam times the number of non-zeros
            (Lp(1, 0), [1.0, 2.0], 0.0),
            (Lp(1, 0.1) + Lp(2, 0.5), [1.0, -2.0], 1.55),
            (Lp(1, 1), [], 0.0),
        ],
    )
    def test_matches_hand_computed_values(self, array, penalty, w, expected):
        value = penalty.value(array(w))
        assert value.shape == ()
        assert float(value) == pytest.approx(expected, rel=1e-15)

    @frameworks
    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_closed_form(self, array, penalty):
        assert float(penalty.value(array(W))) == pytest.approx(plain_value(W, penalty), rel=1e-14)

    @pytest.mark.parametrize("penalty", [p for p in PENALTIES if p.terms[0].p > 0], ids=repr)
    def test_gradient_is_lam_s_w(self, penalty):
        w = torch.tensor(W, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(penalty.value(w), w)
        lam = sum(term.lam for term in penalty.terms)
        torch.testing.assert_close(gradient, lam * penalty.s(w.detach()) * w.detach())

    @pytest.mark.parametrize(
        ("penalty", "w"),
        [
            (Lp(2, 0), [1e38]),  # 0 * inf
            (Lp(1e-300, 0.1), [0.0]),  # inf * 0
            (Lp(1e-300, 0.1), []),
        ],
        ids=repr,
    )
    def test_extremes_give_no_nan(self, penalty, w):
        assert penalty.value(torch.tensor(w)) == 0

    def test_half_precision_sums_in_float32(self):
        # 5000 ones: in float16 neither the sum of ones past 2048 nor 5000 * 1.1 is exact.
        value = Lp(1, 1.1).value(torch.ones(5000, dtype=torch.float16))
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(5500, rel=1e-6)


class TestS:
    @frameworks
    @pytest.mark.parametrize(
        ("p", "expected"),
        [
            (0, [0.25, 4.0, np.inf]),
            (1, [0.5, 2.0, np.inf]),
            (1.5, [0.5**0.5, 2**0.5, np.inf]),
            (2, [1, 1, 1]),
            (3, [2, 0.5, 0]),
            (4, [4, 0.25, 0]),
        ],
    )
    def test_matches_hand_computed_values(self, array, p, expected):
        np.testing.assert_allclose(Lp(p, 0.3).s(array([-2.0, 0.5, 0.0])), expected, rtol=1e-15)

    @frameworks
    def test_single_term_ignores_lam(self, array):
        w = array(W)
        assert (Lp(0.7, 0).s(w) == Lp(0.7, 5).s(w)).all()

    @frameworks
    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_factor_follows_from_s(self, array, penalty):
        w, lr = array([*W, 0.0]), 0.3
        lam = sum(term.lam for term in penalty.terms)
        np.testing.assert_allclose(
            1 / (1 + lr * lam * penalty.s(w)), penalty.factor(w, lr), rtol=1e-14
        )

    def test_sum_is_mean_weighted_by_lam(self):
        s = (Lp(1, 3) + Lp(3, 1)).s(np.array([2.0]))
        np.testing.assert_allclose(s, [(3 * 0.5 + 1 * 2) / 4], rtol=1e-15)

    def test_sum_with_zero_lam_is_unweighted_mean(self):
        s = (Lp(1, 0) + Lp(3, 0)).s(np.array([2.0]))
        np.testing.assert_allclose(s, [(0.5 + 2) / 2], rtol=1e-15)

    @pytest.mark.parametrize(
        ("w", "least"), [(np.zeros(2), 1e-322), (torch.zeros(2), 1e-50)], ids=["numpy", "float32"]
    )
    def test_underflowing_weight_gives_no_nan(self, w, least):
        s = (Lp(1, least) + Lp(2, 1e3)).s(w)
        assert (s == s).all()


class TestFactor:
    @frameworks
    @pytest.mark.parametrize(
        ("p", "lam", "w", "lr", "expected"),
        [
            (1, 0.1, [0.0, 0.1, 1.0, -0.4], 1.0, [0, 0.5, 10 / 11, 0.8]),
            (2, 0.5, [0.0, 3.0, -1e9], 0.5, [0.8, 0.8, 0.8]),
            (0, 1.0, [0.0, 0.5, -2.0], 0.25, [0, 0.5, 16 / 17]),
            (0.5, 2.0, [0.0, 0.25, -4.0], 0.0625, [0, 0.5, 64 / 65]),
            (3, 0.5, [0.0, 2.0, -6.0], 1.0, [1, 0.5, 0.25]),
            (4, 1.0, [0.0, -1.0, 3.0], 1.0, [1, 0.5, 0.1]),
        ],
    )
    def test_matches_hand_computed_values(self, array, p, lam, w, lr, expected):
        np.testing.assert_allclose(Lp(p, lam).factor(array(w), lr), expected, rtol=1e-15)

    @frameworks
    def test_elastic_by_hand(self, array):
        factor = (Lp(1, 1) + Lp(2, 3)).factor(array([0.0, 0.5, -1.0]), 0.5)
        np.testing.assert_allclose(factor, [0, 1 / 3.5, 1 / 3], rtol=1e-15)

    @frameworks
    @pytest.mark.parametrize("lr", [1e-4, 0.3, 10])
    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_closed_form(self, array, penalty, lr):
        expected = [plain_factor(w, penalty, lr) for w in W]
        np.testing.assert_allclose(penalty.factor(array(W), lr), expected, rtol=1e-14)

    @given(
        st.lists(st.tuples(st.floats(0, 4), st.floats(0, 10)), min_size=1, max_size=5),
        st.lists(st.floats(-1e6, 1e6), max_size=5),
        st.floats(0, 10),
    )
    @settings(deadline=None, max_examples=200)
    def test_same_in_numpy_and_torch(self, pairs, w, lr):
        penalty = as_penalty(pairs)
        w = np.array(w, dtype=np.float64)
        for method in (penalty.factor, lambda x, _: penalty.s(x)):
            ours, theirs = method(w, lr), method(torch.from_numpy(w.copy()), lr).numpy()
            np.testing.assert_allclose(ours, theirs, rtol=1e-13, atol=1e-300)

    @frameworks
    def test_order_of_terms_does_not_matter(self, array):
        w = array([*W, 0.0])
        terms = [Lp(0.5, 0.1), Lp(2, 0.2), Lp(3, 0.3)]
        first, *others = [sum(order).factor(w, 0.1) for order in itertools.permutations(terms)]
        for other in others:
            np.testing.assert_allclose(other, first, rtol=1e-15)

    @frameworks
    def test_splitting_lam_changes_nothing(self, array):
        w = array([*W, 0.0])
        split = sum([Lp(0.7, 0.05)] * 4).factor(w, 0.1)
        np.testing.assert_allclose(split, Lp(0.7, 0.2).factor(w, 0.1), rtol=1e-15)

    @frameworks
    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_zero_lr_changes_nothing_even_at_zero(self, array, penalty):
        w = array([*W, 0.0, -0.0])
        assert (penalty.factor(w, 0.0) == 1).all()
        assert (sum(Lp(p, 0) for p, _ in penalty.pairs()).factor(w, 0.1) == 1).all()

    @frameworks
    def test_term_with_zero_lam_does_not_freeze_zeros(self, array):
        assert (Lp(1, 0) + Lp(2, 1)).factor(array([0.0]), 1.0) == 0.5

    @pytest.mark.parametrize("lr", [0, 1, np.float32(0.5), np.int64(2), Fraction(1, 2)], ids=repr)
    def test_accepts_any_real_lr(self, lr):
        np.testing.assert_allclose(
            Lp(1, 0.2).factor(np.array([0.5]), lr), 1 / (1 + 0.4 * float(lr)), rtol=1e-15
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("lr", [0.0, 1e-3, 0.25, 10.0])
    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_accepts_lr_as_tensor(self, penalty, lr, dtype):
        w = torch.tensor([*W, 0.0], dtype=dtype)
        rate = torch.tensor(lr, dtype=torch.float64)
        factor = penalty.factor(w, rate)
        expected = penalty.factor(w, lr)
        assert factor.dtype == expected.dtype
        torch.testing.assert_close(factor, expected)
        assert rate.item() == lr

    def test_accepts_lr_as_array(self):
        w = np.array([*W, 0.0])
        for lr in (0.0, 0.1):
            np.testing.assert_allclose(
                Lp(1, 0.2).factor(w, np.array(lr)), Lp(1, 0.2).factor(w, lr), rtol=1e-15
            )


class TestKindsOfArray:
    @pytest.mark.parametrize(
        "half", [torch.float16, torch.bfloat16, np.float16], ids=["float16", "bfloat16", "numpy"]
    )
    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_half_precision_computes_in_float32(self, penalty, half):
        if half is np.float16:
            w, single = np.array([*W, 0.0], half), np.float32
            full = w.astype(single)
        else:
            w, single = torch.tensor([*W, 0.0], dtype=half), torch.float32
            full = w.to(single)
        for ours, expected in [
            (penalty.factor(w, 1e-3), penalty.factor(full, 1e-3)),
            (penalty.s(w), penalty.s(full)),
        ]:
            assert ours.dtype == single
            assert (ours == expected).all()

    def test_half_precision_keeps_a_factor_near_one(self):
        factor = Lp(1, 1e-2).factor(torch.ones(1, dtype=torch.bfloat16), 1e-3)
        assert factor.item() == pytest.approx(1 - 1e-5, abs=1e-7)
        assert factor.item() < 1

    @pytest.mark.parametrize(
        ("make", "dtype"),
        [
            (lambda w: torch.tensor(w, dtype=torch.complex64), torch.float32),
            (lambda w: torch.tensor(w, dtype=torch.complex128), torch.float64),
            (lambda w: np.array(w, np.complex64), np.float32),
            (lambda w: np.array(w, np.complex128), np.float64),
        ],
    )
    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_complex_uses_magnitude(self, penalty, make, dtype):
        w = make([3 + 4j, -5j, 0.6 - 0.8j, 0j])
        size = [5.0, 5.0, 1.0, 0.0]
        factor = penalty.factor(w, 0.1)
        assert factor.dtype == dtype
        np.testing.assert_allclose(factor, penalty.factor(np.array(size), 0.1), rtol=1e-6)
        np.testing.assert_allclose(penalty.value(w), penalty.value(np.array(size)), rtol=1e-6)

    @pytest.mark.parametrize(
        "w", [[1, -2, 0], (1.0, -2.0, 0.0), np.array([1, -2, 0]), torch.tensor([1, -2, 0])]
    )
    def test_lists_and_integers_compute_in_float64(self, w):
        factor = Lp(1, 0.1).factor(w, 1.0)
        assert str(factor.dtype).endswith("float64")
        np.testing.assert_allclose(factor, [1 / 1.1, 1 / 1.05, 0], rtol=1e-15)
        assert float(Lp(1, 0.1).value(w)) == pytest.approx(0.3)

    @pytest.mark.parametrize(
        "w", [-2, -2.0, np.float64(-2), np.array(-2.0), torch.tensor(-2.0)], ids=repr
    )
    def test_accepts_scalars(self, w):
        penalty = Lp(1, 0.1) + Lp(2, 0.3)
        assert float(penalty.factor(w, 1.0)) == pytest.approx(1 / 1.35)
        assert float(penalty.value(w)) == pytest.approx(0.8)
        assert float(penalty.s(w)) == pytest.approx((0.1 * 0.5 + 0.3) / 0.4)
        assert np.shape(penalty.factor(w, 1.0)) == ()

    @pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 3), (), (1,), (1, 1), (2, 3, 4)])
    @pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["numpy", "torch"])
    def test_shape_is_kept(self, make, shape):
        penalty = Lp(1, 0.1) + Lp(3, 0.1)
        for lr in (0.0, 0.1):
            assert penalty.factor(make(shape), lr).shape == shape
        assert penalty.s(make(shape)).shape == shape

    @pytest.mark.parametrize(
        "view", [lambda w: w.T, lambda w: w[:, ::2], lambda w: w[1:, 1:]], ids=["T", "::2", "1:"]
    )
    @pytest.mark.parametrize("framework", ["numpy", "torch"])
    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_accepts_non_contiguous_arrays(self, penalty, framework, view):
        base = np.random.default_rng(0).normal(size=(4, 6))
        w = view(base if framework == "numpy" else torch.from_numpy(base))
        dense = np.ascontiguousarray(view(base))
        np.testing.assert_allclose(penalty.factor(w, 0.1), penalty.factor(dense, 0.1), rtol=1e-14)
        np.testing.assert_allclose(penalty.value(w), penalty.value(dense), rtol=1e-14)

    @pytest.mark.parametrize(
        "w",
        [
            np.array([*W, 0.0, -0.0, 1e-310]),
            np.array(W, np.float16),
            np.array([1, -2, 0]),
            torch.tensor([*W, 0.0, 1e-40]),
            torch.tensor(W, dtype=torch.bfloat16),
            torch.tensor([3 + 4j, 0]),
            torch.tensor([1, 2, 3]),
        ],
        ids=lambda w: f"{type(w).__name__}-{w.dtype}",
    )
    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_input_is_never_changed(self, penalty, w):
        before = w.copy() if isinstance(w, np.ndarray) else w.clone()
        for lr in (0.0, 0.1, torch.tensor(0.1)):
            if isinstance(w, np.ndarray) and isinstance(lr, torch.Tensor):
                continue
            result = penalty.factor(w, lr)
            assert result is not w
        penalty.s(w)
        penalty.value(w)
        assert (w == before).all()
        assert magnitude(w) is not w

    def test_result_does_not_share_memory_with_positive_input(self):
        w = torch.rand(3) + 1
        for result in (Lp(1, 0.1).factor(w, 0.1), Lp(1, 0.1).factor(w, 0.0), Lp(1, 0.1).s(w)):
            assert result.data_ptr() != w.data_ptr()

    @pytest.mark.parametrize(
        ("w", "expected"),
        [
            (torch.tensor([1e-39, 2e-38]), [0, 2e-38]),
            (np.array([1e-310, 3e-308]), [0, 3e-308]),
            (torch.tensor([6e-8, 1e-5], dtype=torch.float16), [5.9604645e-08, 1.001358e-05]),
        ],
        ids=["float32", "float64", "float16 is normal in float32"],
    )
    def test_subnormal_numbers_count_as_zero(self, w, expected):
        np.testing.assert_allclose(magnitude(w), expected, rtol=1e-6)
