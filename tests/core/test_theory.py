"""Tests of the paper's theorems: sections 3 and 4, and appendices A to D."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from pdecay import PSGD, Lp
from pdecay._core.reference import extended_penalty, toy

settings.register_profile("theory", deadline=None, max_examples=60)
theory = settings.get_profile("theory")

p_below_2 = st.floats(0.05, 1.95)
seeds = st.integers(0, 2**32 - 1)


def log_uniform(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


def signed(low, high):
    return st.builds(
        lambda size, sign: sign * size, log_uniform(low, high), st.sampled_from([-1, 1])
    )


def vectors(low=1e-3, high=1e3):
    return st.lists(signed(low, high), min_size=1, max_size=5).map(double)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def descend(loss, start, penalty, lr, steps):
    """Run gradient descent with the decay step; return the initial weights and each step's."""
    w = nn.Parameter(start.clone())
    optimizer = PSGD([{"params": [w], "decay": penalty}], lr=lr, foreach=False)
    path = [start]
    for _ in range(steps):
        optimizer.zero_grad()
        loss(w).backward()
        optimizer.step()
        path.append(w.detach().clone())
    return path


class TestExtendedProblem:
    """Section 3 and appendix A: R(w) is the minimum of R(w, s) over s > 0."""

    @given(vectors(), p_below_2, log_uniform(1e-3, 10))
    @theory
    def test_optimal_s_gives_the_penalty(self, w, p, lam):
        penalty = Lp(p, lam)
        torch.testing.assert_close(
            extended_penalty(w, penalty.s(w), p, lam), penalty.value(w), rtol=1e-10, atol=0
        )

    @given(vectors(), p_below_2, log_uniform(1e-3, 10), st.data())
    @theory
    def test_optimal_s_is_the_minimum(self, w, p, lam, data):
        penalty = Lp(p, lam)
        away = double([data.draw(log_uniform(0.1, 10)) for _ in w])
        other = extended_penalty(w, away * penalty.s(w), p, lam)
        assert other >= penalty.value(w) * (1 - 1e-10)
        if (away.log().abs() > 0.01).any() and len(w) == 1:
            assert other > penalty.value(w)

    @given(signed(1e-3, 1e3), p_below_2, log_uniform(0.1, 10), log_uniform(0.1, 10))
    @theory
    def test_convex_in_s(self, w, p, a, b):
        s = Lp(p, 1).s(double([w]))
        ends = [extended_penalty(double([w]), s * x, p, 1) for x in (a, b)]
        middle = extended_penalty(double([w]), s * (a + b) / 2, p, 1)
        assert middle <= sum(ends) / 2 * (1 + 1e-12)

    @given(signed(1e-2, 1e2), p_below_2, log_uniform(1e-3, 10))
    @theory
    def test_stationary_in_s_and_in_w(self, w, p, lam):
        """dR/ds = 0 at the optimal s, where dR/dw is the gradient of the penalty itself."""
        penalty = Lp(p, lam)
        w = double([w]).requires_grad_()
        s = penalty.s(w.detach()).requires_grad_()
        by_w, by_s = torch.autograd.grad(extended_penalty(w, s, p, lam), [w, s])
        (gradient,) = torch.autograd.grad(penalty.value(w), w)
        torch.testing.assert_close(by_w, gradient, rtol=1e-12, atol=0)
        assert by_s.abs() <= 1e-10 * lam * w.square()


def one_dimensional(p, lam, depth):
    """Generate ``a`` and the local minimum w* > 0 of ``(w-a)^2/2 + (lam/p) w^p``."""
    lowest = (lam * (1 - p)) ** (1 / (2 - p)) if p < 1 else 1e-12  # of w + lam w^(p-1)
    a = (lowest + lam * lowest ** (p - 1)) * (1 + depth) if p < 1 else lam + depth
    low, high = lowest, a
    for _ in range(200):
        w = (low + high) / 2
        low, high = (low, w) if w + lam * w ** (p - 1) > a else (w, high)
    return a, w


class TestLocalMinima:
    """Theorem of appendix A, on ``F = (w-a)^2/2 + R``: the minima of both problems coincide."""

    @given(p_below_2, st.floats(0.1, 2), st.floats(0.1, 2))
    @theory
    def test_minima_of_penalised_loss_are_minima_of_extended(self, p, lam, depth):
        a, w = one_dimensional(p, lam, depth)
        at = double([w, Lp(p, lam).s(double(w))])

        def extended(ws):
            return (ws[0] - a) ** 2 / 2 + extended_penalty(ws[0], ws[1], p, lam)

        gradient = torch.autograd.functional.jacobian(extended, at)
        (ww, ws), (_, ss) = torch.autograd.functional.hessian(extended, at).tolist()
        assert gradient.abs().max() < 1e-8
        # Positive definite; with s eliminated its curvature is that of F(w).
        assert ss > 0
        curvature = 1 + lam * (p - 1) * w ** (p - 2)
        assert curvature > 0
        assert ww - ws**2 / ss == pytest.approx(curvature, rel=1e-6)

    @given(p_below_2, st.floats(0.1, 2), st.floats(0.1, 2), st.floats(1, 1.5))
    @theory
    def test_minima_of_extended_are_minima_of_penalised_loss(self, p, lam, depth, away):
        """Alternating convex search on F(w, s) converges to the local minimum of F(w)."""
        a, expected = one_dimensional(p, lam, depth)
        w = expected * away
        for _ in range(3000):
            s = w ** (p - 2)
            w = a / (1 + lam * s)
        assert w == pytest.approx(expected, rel=1e-6)

    @given(
        p_below_2, st.floats(0.1, 2), st.floats(0.1, 2), signed(1e-3, 10), log_uniform(1e-3, 1e3)
    )
    @theory
    def test_extended_loss_is_never_below_the_global_minimum(self, p, lam, depth, w, s):
        a, local = one_dimensional(p, lam, depth)
        lowest = min(a**2 / 2, (local - a) ** 2 / 2 + Lp(p, lam).value(double(local)))
        value = (w - a) ** 2 / 2 + extended_penalty(double(w), double(s), p, lam)
        assert value >= lowest * (1 - 1e-9)


class TestProximalStep:
    """Section 4.1 and appendix B."""

    @given(vectors(), p_below_2, log_uniform(1e-3, 10), log_uniform(1e-3, 10), st.data())
    @theory
    def test_decay_is_the_proximal_operator_at_fixed_s(self, w_old, p, lam, lr, data):
        penalty = Lp(p, lam)
        s = penalty.s(w_old)
        w_tilde = double([data.draw(signed(1e-3, 1e3)) for _ in w_old])
        step = w_tilde * penalty.factor(w_old, lr)

        def objective(u):
            return lr * lam / 2 * s * u**2 + (u - w_tilde) ** 2 / 2

        away = double([data.draw(signed(1e-4, 10)) for _ in w_old]) * w_tilde
        assert (objective(step + away) >= objective(step) * (1 - 1e-12)).all()

    @given(vectors(1e-30, 1e30), log_uniform(1e-6, 1e3), log_uniform(1e-6, 10))
    @theory
    def test_p_2_has_closed_form(self, w, lam, lr):
        step = w * Lp(2, lam).factor(w, lr)
        torch.testing.assert_close(step, w / (1 + lr * lam), rtol=5e-16, atol=0)

    @given(vectors(1e-3, 1e3), log_uniform(1e-3, 1e2), log_uniform(1e-6, 10))
    @theory
    def test_psgd_step_with_p_2(self, w, lam, lr):
        (_, stepped) = descend(lambda w: (w * 3).sum(), w, Lp(2, lam), lr, 1)
        expected = (w - lr * 3) / (1 + lr * lam)
        torch.testing.assert_close(stepped, expected, rtol=1e-15, atol=1e-15 * lr)

    @given(signed(1e-3, 1e3), p_below_2, log_uniform(1e-2, 10))
    @theory
    def test_small_steps_approximate_decoupled_weight_decay(self, w, p, lam):
        """eq. 8: for lr * lam * s << 1 the factor is 1 - lr * lam * s, to second order."""
        s = Lp(p, lam).s(double([w]))
        lr = 1e-5 / (lam * s.item())
        assert (Lp(p, lam).factor(double([w]), lr) - (1 - 1e-5)).abs() < 2e-10


class TestNonIncreasingLoss:
    """Appendix C: F falls by ``(1 - lr L)/(2 lr) |w+ - w|^2`` at least, for every lr <= 1/L."""

    penalties = st.one_of(
        st.builds(Lp, p_below_2, log_uniform(1e-3, 10)),
        st.builds(Lp, st.sampled_from([0.01, 0.05, 0.5, 1.0, 1.5, 2.0]), log_uniform(1e-3, 10)),
        st.builds(
            lambda p, lam: Lp(p, lam) + Lp(1.5, lam) + Lp(2, 0.1), p_below_2, st.floats(0, 1)
        ),
    )
    fractions = st.one_of(st.floats(0.01, 1), st.just(1.0))

    @staticmethod
    def check(loss, start, penalty, lr, smoothness, steps=25):
        path = descend(loss, start, penalty, lr, steps)
        objective = [loss(w) + penalty.value(w) for w in path]
        for t in range(steps):
            fall = (1 - lr * smoothness) / (2 * lr) * (path[t + 1] - path[t]).square().sum()
            assert objective[t + 1] <= objective[t] - fall + 1e-12 * (1 + objective[t])
        return path

    @given(seeds, st.integers(1, 8), penalties, fractions, log_uniform(0.01, 100))
    @theory
    def test_loss_of_quadratics_decreases(self, seed, n, penalty, fraction, scale):
        rng = np.random.default_rng(seed)
        root = rng.normal(size=(n, n)) * scale
        hessian, b = double(root @ root.T), double(rng.normal(size=n))
        smoothness = torch.linalg.eigvalsh(hessian)[-1].item()
        start = double(rng.normal(size=n) * (rng.random(n) < 0.8))  # some weights are zero
        assume(start.any())
        path = self.check(
            lambda w: (w - b) @ hessian @ (w - b) / 2,
            start,
            penalty,
            fraction / smoothness,
            smoothness,
        )
        # if lr * lam underflows to 0, nothing changes, not even zeros
        if any(p < 2 and fraction / smoothness * lam for p, lam in penalty.pairs()):
            assert (path[-1][start == 0] == 0).all()

    @given(seeds, penalties, fractions)
    @theory
    def test_loss_of_logistic_regressions_decreases(self, seed, penalty, fraction):
        rng = np.random.default_rng(seed)
        x, sign = double(rng.normal(size=(20, 5))), double(rng.choice([-1, 1], 20))
        smoothness = torch.linalg.matrix_norm(x, 2).item() ** 2 / (4 * len(x))
        self.check(
            lambda w: nn.functional.softplus(-sign * (x @ w), threshold=1e6).mean(),
            double(rng.normal(size=5)),
            penalty,
            fraction / smoothness,
            smoothness,
        )

    def test_loss_increases_beyond_the_lr_bound(self):
        """The loss increases for lr > 2/L, so the tests above are not vacuous."""

        def loss(w):
            return (w**2).sum() / 2

        penalty = Lp(1, 1e-3)
        before, after = descend(loss, double([1.0]), penalty, 2.5, 1)
        assert loss(after) + penalty.value(after) > loss(before) + penalty.value(before)


class TestStabilityOfZero:
    """Appendix D: the effect of one step on a weight of size epsilon with update dw."""

    strengths = log_uniform(0.01, 10)
    updates = signed(0.01, 100)

    @staticmethod
    def step(epsilon, dw, penalty, lr):
        return ((epsilon - lr * dw) * penalty.factor(double([epsilon]), lr)).item()

    @given(st.floats(0, 0.9), strengths, log_uniform(1e-3, 10), updates, st.floats(0.01, 0.99))
    @theory
    def test_p_below_1_shrinks_for_any_update(self, p, lam, lr, dw, part):
        epsilon = min((lam / abs(dw)) ** (1 / (1 - p)), lr * abs(dw)) * part
        assert abs(self.step(epsilon, dw, Lp(p, lam), lr)) < epsilon

    @given(st.floats(0, 0.8), strengths, updates, log_uniform(0.1, 10))
    @settings(theory, max_examples=30)
    def test_p_below_1_reaches_exact_zero(self, p, lam, dw, pace):
        w = (lam / abs(dw)) ** (1 / (1 - p)) / 2
        lr = pace * w / abs(dw)
        for _ in range(200):
            w = self.step(w, dw, Lp(p, lam), lr)
        assert w == 0

    @given(st.floats(1.1, 1.95), strengths, log_uniform(1e-3, 10), updates)
    @theory
    def test_p_above_1_grows_for_any_update(self, p, lam, lr, dw):
        # If the update points away from zero, it grows below (|dw|/lam)^(1/(p-1)); if the update
        # crosses zero, the bound is slightly lower.
        bound = min((abs(dw) / (4 * lam)) ** (1 / (p - 1)), lr * abs(dw) / 4)
        assume(bound > 1e-250)
        assert abs(self.step(bound / 2, dw, Lp(p, lam), lr)) > bound / 2

    @given(st.floats(1.2, 1.95), strengths, updates)
    @settings(theory, max_examples=30)
    def test_p_above_1_escapes_to_the_other_fixed_point(self, p, lam, dw):
        """A constant update dw balances the decay at |w| = (|dw|/lam)^(1/(p-1))."""
        expected = (abs(dw) / lam) ** (1 / (p - 1))
        lr = 0.5 * expected / abs(dw)
        w = 1e-3 * expected
        for _ in range(200):
            w = self.step(w, dw, Lp(p, lam), lr)
        assert w == pytest.approx(-math.copysign(expected, dw), rel=1e-4)

    @given(strengths, log_uniform(1e-3, 10), st.floats(1e-3, 0.999), log_uniform(1e-200, 1))
    @theory
    def test_p_1_shrinks_below_lam_and_grows_above(self, lam, lr, part, size):
        epsilon = size * lr * lam
        below, above = part * lam, lam / part
        assert 0 < self.step(epsilon, -below, Lp(1, lam), lr) < epsilon
        assert self.step(epsilon, -above, Lp(1, lam), lr) > epsilon
        assert abs(self.step(epsilon, below, Lp(1, lam), lr)) < epsilon

    @given(strengths, log_uniform(1e-3, 10), st.floats(0.1, 0.9))
    @settings(theory, max_examples=20)
    def test_p_1_has_its_threshold_at_lam(self, lam, lr, part):
        """Weights near 0 converge to 0 for |dw| < lam, and move away for |dw| > lam."""
        held = freed = 1e-9 * lr * lam
        for _ in range(300):
            held = self.step(held, -part * lam, Lp(1, lam), lr)
            freed = self.step(freed, -lam / part, Lp(1, lam), lr)
        assert held < 1e-20 * lr * lam
        assert freed > lr * lam

    @pytest.mark.parametrize("p", [0, 0.5, 1, 1.5, 1.99])
    @pytest.mark.parametrize("dw", [-1e6, 0.0, 1e6])
    def test_zero_is_a_fixed_point_for_p_below_2(self, p, dw):
        assert self.step(0.0, dw, Lp(p, 1e-6), 1e-3) == 0

    @pytest.mark.parametrize("p", [2, 2.5, 4])
    def test_zero_is_not_a_fixed_point_for_p_at_least_2(self, p):
        assert self.step(0.0, -1.0, Lp(p, 1.0), 0.1) > 0.09


class TestFixedPoints:
    """The fixed points of PSGD on ``(w - a)^2/2``, for many a at once."""

    a = torch.linspace(-3, 3, 61, dtype=torch.float64)

    def rest(self, penalty, lr, start, steps=1000):
        return descend(
            lambda w: ((w - self.a) ** 2).sum() / 2,
            torch.full_like(self.a, start),
            penalty,
            lr,
            steps,
        )[-1]

    def soft(self, lam):
        return self.a.sign() * (self.a.abs() - lam).clip(0)

    @pytest.mark.parametrize("start", [1.3, -0.1])
    @pytest.mark.parametrize(("lam", "lr"), [(0.05, 0.1), (0.77, 0.5), (1.55, 0.9), (5.0, 0.1)])
    def test_p_1_is_the_soft_threshold(self, lam, lr, start):
        # Every a of the grid is at least 0.02 from lam: at lam, convergence is not linear.
        torch.testing.assert_close(
            self.rest(Lp(1, lam), lr, start), self.soft(lam), rtol=1e-9, atol=1e-9
        )

    def test_elastic_is_the_soft_threshold_then_a_division(self):
        rest = self.rest(Lp(1, 0.77) + Lp(2, 0.5), 0.3, 1.0)
        torch.testing.assert_close(rest, self.soft(0.77) / 1.5, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("p", [0, 0.3, 0.7, 1, 1.5, 2, 2.5, 3, 4])
    def test_fixed_points_satisfy_the_gradient_equation(self, p):
        """Footnote 6: 0 = w - a + lam |w|^(p-2) w at every fixed point w != 0, for any p."""
        lam = 0.53
        w = self.rest(Lp(p, lam), 0.1, 2.0)
        rested = w.abs() > 1e-12
        residual = w - self.a + lam * w.sign() * w.abs() ** (p - 1)
        assert residual[rested].abs().max() < 1e-9
        assert rested.sum() >= 15
        if p < 1:
            assert (w[~rested] == 0).all()
            assert (~rested).sum() >= 10
        if p > 1:
            assert (rested | (self.a.abs() < 1e-12)).all()


class TestToyExample:
    """Section 4.2 and its figure: ``(w-1)^2/2 + |w|^p/p`` with p = 0.6, lr = 0.1, from w = 1."""

    curves = toy(p=0.6, lam=1.0, lr=0.1, steps=400)

    def test_plain_gradient_oscillates(self):
        w = np.array(self.curves["gradient"])
        changes = np.flatnonzero(np.diff(np.sign(w)))
        assert len(changes) > 10
        assert changes[-1] > 350, "it still changes sign at the end"
        for quarter in np.split(w[1:], 4):
            assert np.ptp(quarter) > 0.2, "it does not converge"

    @pytest.mark.parametrize("name", ["s every step", "s every 20 steps"])
    def test_decay_converges_monotonically(self, name):
        w = np.array(self.curves[name])
        assert (w >= 0).all(), "no change of sign"
        assert (np.diff(w) <= 0).all(), "monotone"
        assert w[-1] < 1e-12

    def test_s_every_20_steps_descends_in_stages(self):
        """The weight converges within 20 steps at fixed s, and drops when s is updated."""
        w = np.array(self.curves["s every 20 steps"])
        falls = -np.diff(w)
        for update in range(40, 140, 20):
            assert falls[update] > 10 * falls[update - 1]

    def test_s_every_step_equals_psgd(self):
        path = descend(
            lambda w: ((w - 1) ** 2).sum() / 2, double([[1.0]]), Lp(0.6, 1.0), 0.1, steps=400
        )
        np.testing.assert_allclose(
            [w.item() for w in path], self.curves["s every step"], rtol=1e-12, atol=1e-300
        )
