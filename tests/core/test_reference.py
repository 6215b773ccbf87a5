import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from pdecay import PSGD, Lp, PAdam
from pdecay._core.penalty import as_penalty
from pdecay._core.reference import (
    AdamUpdate,
    Listing1,
    SGDUpdate,
    algorithm_1,
    extended_penalty,
    pwd,
    pwd_step,
    toy,
)

PENALTIES = [
    Lp(0, 0.01),
    Lp(0.5, 0.1),
    Lp(1, 0.1),
    Lp(1.3, 0.2),
    Lp(2, 0.4),
    Lp(3, 0.1),
    Lp(0.8, 1e-2) + Lp(2, 0.1) + Lp(3, 0.2),
]
penalties = pytest.mark.parametrize("penalty", PENALTIES, ids=repr)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def quadratic(shape=(3, 4)):
    """Return the gradient of the loss ``sum a (w - b)^2 / 2``, and initial weights."""
    torch.manual_seed(0)
    a, b, w = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    return (lambda w: (a.abs() + 0.1) * (w - b)), w


def walk(optimizer, w, gradient, steps, scheduler=None):
    for _ in range(steps):
        w.grad = gradient(w.detach())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return w.detach()


class TestStep:
    @pytest.mark.parametrize(
        ("w_tilde", "w_old", "pairs", "lr", "expected"),
        [
            (2.0, 0.1, [[1, 0.1]], 1.0, 1.0),  # 0.1 / (0.1 + 0.1)
            (-3.0, -4.0, [[0.5, 8]], 0.5, -2.0),  # 8 / (8 + 4)
            (1.0, 5.0, [[2, 3]], 1.0, 0.25),
            (1.0, 2.0, [[3, 0.5]], 1.0, 0.5),
            (1.0, 0.5, [[0, 0.25]], 1.0, 0.5),
            (7.0, 0.5, [[1, 1], [2, 3]], 0.5, 2.0),  # 1 + 0.5 * (2 + 3)
            (1.0, 0.0, [[1, 0.1]], 1.0, 0.0),
            (1.0, 0.0, [[2, 1]], 1.0, 0.5),
            (1.0, 0.0, [[3, 1]], 1.0, 1.0),
            (1.0, 0.0, [[1, 0.1]], 0.0, 1.0),
            (1.0, 0.0, [[1, 0.0]], 1.0, 1.0),
            (1.0, 0.0, [[1, 0.0], [2, 1]], 1.0, 0.5),
            (1.0, 3.0, [], 1.0, 1.0),
        ],
    )
    def test_matches_hand_computed_values(self, w_tilde, w_old, pairs, lr, expected):
        assert pwd_step(w_tilde, w_old, pairs, lr) == pytest.approx(expected, rel=1e-15)

    @penalties
    @pytest.mark.parametrize("lr", [0.0, 1e-3, 0.5])
    def test_equals_the_factor(self, penalty, lr):
        """The forms of the equation with and without q agree."""
        w_old = vector(0, -0.0, 1e-200, 1e-9, -0.3, 1, 7, -1e6)
        w_tilde = vector(1, 2, 3, -4, 5, -6, 7, 8)
        expected = w_tilde * penalty.factor(w_old, lr)
        torch.testing.assert_close(
            pwd(w_tilde, w_old, penalty, lr), expected, rtol=1e-14, atol=1e-300
        )

    def test_returns_double_precision_in_same_shape(self):
        w = torch.ones(2, 3, dtype=torch.float32)
        new = pwd(w, w, Lp(1, 0.1), 1.0)
        assert new.dtype == torch.float64
        assert new.shape == (2, 3)
        assert new.unique().item() == 1 / 1.1


class TestAlgorithm1:
    def test_two_steps_by_hand(self):
        """p = 1, lam = 1, alpha = 1/2, eta = 1 then 1/2, on (w-a)^2/2 with a = (3, 0, 1)."""
        a = vector(3, 0, 1)
        # t = 1: w_tilde = (w + a)/2 = (2, -1/2, 1/2); factor |w|/(|w| + 1/2) = 2/3, 2/3, 0
        # t = 2: w_tilde = (3w + a)/4 = (7/4, -1/4, 1/4); factor |w|/(|w| + 1/4) = 16/19, 4/7, 0
        steps = [vector(4 / 3, -1 / 3, 0), vector(28 / 19, -1 / 7, 0)]
        for t, expected in enumerate(steps, 1):
            w = algorithm_1(
                vector(1, -1, 0),
                gradient=lambda w: w - a,
                update=lambda g, t: g,
                penalty=Lp(1, 1),
                lr=0.5,
                schedule=lambda t: 1 / t,
                steps=t,
            )
            torch.testing.assert_close(w, expected, rtol=1e-15, atol=0)

    def test_time_starts_at_one_and_input_is_unchanged(self):
        seen = []
        w = vector(1.0)
        algorithm_1(
            w,
            gradient=lambda w: w,
            update=lambda g, t: seen.append(("update", t)) or g,
            penalty=Lp(1, 1),
            lr=0.1,
            schedule=lambda t: seen.append(("schedule", t)) or 1.0,
            steps=2,
        )
        assert seen == [("update", 1), ("schedule", 1), ("update", 2), ("schedule", 2)]
        assert w.item() == 1

    @penalties
    @pytest.mark.parametrize("foreach", [False, True])
    def test_padam_with_schedule_matches(self, penalty, foreach):
        gradient, start = quadratic()
        start[0, 0] = 0  # lr = 0 at the first step must not turn it into NaN

        def schedule(epoch):  # a warm-up from 0, then a decay
            return min(epoch / 10, 1.0) * (1 - epoch / 100)

        expected = algorithm_1(
            start, gradient, AdamUpdate(), penalty, 0.05, lambda t: schedule(t - 1), steps=60
        )
        w = nn.Parameter(start.clone())
        optimizer = PAdam([w], lr=0.05, decay=penalty, foreach=foreach)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        walked = walk(optimizer, w, gradient, 60, scheduler)
        torch.testing.assert_close(walked, expected, rtol=1e-12, atol=1e-12)
        assert (walked - start).abs().max() > 0.1

    @penalties
    @pytest.mark.parametrize("nesterov", [False, True])
    def test_psgd_with_momentum_matches(self, penalty, nesterov):
        gradient, start = quadratic()
        expected = algorithm_1(
            start, gradient, SGDUpdate(0.8, 0, nesterov), penalty, 0.05, lambda t: 1.0, steps=60
        )
        w = nn.Parameter(start.clone())
        optimizer = PSGD(
            [w], lr=0.05, momentum=0.8, nesterov=nesterov, decay=penalty, foreach=False
        )
        walked = walk(optimizer, w, gradient, 60)
        torch.testing.assert_close(walked, expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("amsgrad", [False, True])
    @pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.7), (0.0, 0.9)])
    def test_adam_update_equals_torch(self, betas, amsgrad):
        gradient, start = quadratic()
        noise = torch.randn(60, *start.shape, dtype=torch.float64)
        noises = iter(noise), iter(noise)
        expected = algorithm_1(
            start,
            lambda w: gradient(w) + next(noises[0]),
            AdamUpdate(betas, 1e-6, amsgrad),
            Lp(1, 0),
            0.05,
            lambda t: 1.0,
            steps=60,
        )
        w = nn.Parameter(start.clone())
        adam = torch.optim.Adam([w], 0.05, betas, 1e-6, amsgrad=amsgrad)
        walked = walk(adam, w, lambda w: gradient(w) + next(noises[1]), 60)
        torch.testing.assert_close(walked, expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize(
        ("momentum", "dampening", "nesterov"),
        [(0, 0, False), (0.9, 0, False), (0.9, 0, True), (0.7, 0.4, False)],
    )
    def test_sgd_update_equals_torch(self, momentum, dampening, nesterov):
        gradient, start = quadratic()
        expected = algorithm_1(
            start,
            gradient,
            SGDUpdate(momentum, dampening, nesterov),
            Lp(1, 0),
            0.05,
            lambda t: 1.0,
            steps=60,
        )
        w = nn.Parameter(start.clone())
        sgd = torch.optim.SGD([w], 0.05, momentum, dampening, nesterov=nesterov)
        walked = walk(sgd, w, gradient, 60)
        torch.testing.assert_close(walked, expected, rtol=1e-12, atol=1e-12)


class TestListing1:
    @pytest.mark.parametrize("p", [0.2, 0.5, 1, 1.2, 1.8, 2])
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=str
    )
    def test_equals_padam_with_lam_p_times_lambda(self, p, dtype, tolerance):
        gradient, start = quadratic()
        lambda_p = 0.1
        walked = []
        for make in (
            lambda w: Listing1([w], 0.05, lambda_p=lambda_p, p_norm=p),
            lambda w: PAdam([w], 0.05, decay=Lp(p, p * lambda_p), foreach=False),
            lambda w: PAdam([w], 0.05, decay=Lp(p, lambda_p), foreach=False),
        ):
            w = nn.Parameter(start.to(dtype, copy=True))
            walked.append(walk(make(w), w, lambda w: gradient(w.double()).to(dtype), 60))
        listing, converted, unconverted = walked
        torch.testing.assert_close(converted, listing, rtol=tolerance, atol=tolerance)
        if p != 1:
            assert (unconverted - listing).abs().max() > 100 * tolerance

    def test_gives_nan_at_zero_weight_with_zero_lr(self):
        w = nn.Parameter(torch.tensor([[0.0, 1.0]]))
        walk(Listing1([w], 0.0, lambda_p=0.1, p_norm=1), w, torch.ones_like, 1)
        assert w.isnan().tolist() == [[True, False]]
        ours = nn.Parameter(torch.tensor([[0.0, 1.0]]))
        walk(PAdam([ours], 0.0, decay=Lp(1, 0.1), foreach=False), ours, torch.ones_like, 1)
        assert ours.tolist() == [[0, 1]]

    def test_settings_are_lost_in_checkpoints_and_copies(self):
        """The settings of PAdam are in both."""
        w = nn.Parameter(torch.ones(1, 2))
        listing = Listing1([w], 0.1, lambda_p=0.123, p_norm=0.456)
        ours = PAdam([w], 0.1, decay=Lp(0.456, 0.123), foreach=False)
        assert "0.123" not in str(listing.state_dict())
        assert "0.456" not in str(listing.state_dict())
        assert "[[0.456, 0.123]]" in str(ours.state_dict())
        assert not hasattr(copy.deepcopy(listing), "p_norm")
        assert copy.deepcopy(ours).param_groups[0]["decay"] == [[0.456, 0.123]]

        other = Listing1([w], 0.1, lambda_p=9.0, p_norm=1)
        other.load_state_dict(_through_a_file(listing.state_dict()))
        assert (other.lambda_p, other.p_norm) == (9.0, 1)
        theirs = PAdam([w], 0.1, decay=Lp(1, 9), foreach=False)
        theirs.load_state_dict(_through_a_file(ours.state_dict()))
        assert as_penalty(theirs.param_groups[0]["decay"]).terms == (Lp(0.456, 0.123),)

    def test_zero_lambda_is_plain_adam(self):
        """The listing decays only if lambda_p > 0, so zero weights stay finite."""
        w, plain = (nn.Parameter(torch.tensor([[0.0, 1.0]])) for _ in range(2))
        walk(Listing1([w], 0.1, lambda_p=0, p_norm=0.5), w, torch.ones_like, 3)
        walk(torch.optim.AdamW([plain], 0.1, weight_decay=0), plain, torch.ones_like, 3)
        assert torch.equal(w, plain)

    def test_group_may_have_its_own_lambda(self):
        weights = [nn.Parameter(torch.ones(1, 1)) for _ in range(4)]
        groups = [{"params": weights[:1]}, {"params": weights[1:2], "lambda_p": 0.5}]
        listing = Listing1(groups, 0.1, lambda_p=0.1, p_norm=1)
        ours = [
            PAdam(weights[2:3], 0.1, decay=Lp(1, 0.1), foreach=False),
            PAdam(weights[3:4], 0.1, decay=Lp(1, 0.5), foreach=False),
        ]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        for optimizer in (listing, *ours):
            optimizer.step()
        torch.testing.assert_close(weights[0].detach(), weights[2].detach())
        torch.testing.assert_close(weights[1].detach(), weights[3].detach())

    def test_accepts_missing_gradients_and_closures(self):
        w, other = (nn.Parameter(torch.ones(1, 2)) for _ in range(2))
        w.grad = torch.ones_like(w)
        listing = Listing1([w, other], 0.1, lambda_p=0.1, p_norm=1)
        assert listing.step(lambda: 5.0) == 5.0
        assert (w < 0.9).all()
        assert (other == 1).all()


class TestExtendedPenalty:
    def test_matches_hand_computed_values(self):
        # p = 1: K(s) = 1/s, so (lam/2) * (s w^2 + 1/s)
        value = extended_penalty(vector(2, -1), vector(0.5, 4), p=1, lam=3)
        assert value.item() == pytest.approx(1.5 * ((2 + 2) + (4 + 0.25)))


class TestToy:
    def test_first_steps_by_hand(self):
        curves = toy(p=1, lam=1, lr=0.1, steps=2)
        # gradient: w - 0.1 * (w + sign(w) - 1)
        np.testing.assert_allclose(curves["gradient"], [1, 0.9, 0.81], rtol=1e-15)
        # s = 1/|w|: (w - 0.1 (w - 1)) / (1 + 0.1/w)
        second = (1 / 1.1 * 0.9 + 0.1) / (1 + 0.11)
        np.testing.assert_allclose(curves["s every step"], [1, 1 / 1.1, second], rtol=1e-15)
        # s = 0.1 until the 20th step
        second = (1 / 1.01 * 0.9 + 0.1) / 1.01
        np.testing.assert_allclose(curves["s every 20 steps"], [1, 1 / 1.01, second], rtol=1e-15)

    def test_s_is_updated_at_the_20th_step(self):
        w = toy(p=0.6, lam=1, lr=0.1, steps=21)["s every 20 steps"]
        assert w[20] == pytest.approx((0.9 * w[19] + 0.1) / 1.01, rel=1e-15)
        assert w[21] == pytest.approx((0.9 * w[20] + 0.1) / (1 + 0.1 * w[20] ** -1.4), rel=1e-15)


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
