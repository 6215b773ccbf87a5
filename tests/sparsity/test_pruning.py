import pytest
import torch
from torch import nn

from pdecay import PSGD, GradualMagnitudePruning, MagnitudePruning
from pdecay._core.ramp import cubic_ramp, linear_ramp
from pdecay._sparsity.ranking import count_zeros
from tests.sparsity.pruning import (
    network,
    optimizers,
    train,
    unmoved,
    weight_of,
    weights_of,
    zeros_of,
)


class TestSchedules:
    @pytest.mark.parametrize(
        ("step", "expected"),
        [(0, 0), (10, 0), (11, 0.04), (15, 0.2), (19, 0.36), (20, 0.4), (21, 0.4), (1000, 0.4)],
    )
    def test_threshold(self, step, expected):
        assert 0.4 * linear_ramp(step, 10, 20) == pytest.approx(expected, rel=1e-15)

    @pytest.mark.parametrize(
        ("step", "expected"),
        [
            (0, 0),
            (100, 0),
            (200, 0.8 * (1 - (5 / 6) ** 3)),
            (250, 0.8 * (1 - 0.75**3)),  # 0.4625
            (400, 0.7),  # 0.8 * (1 - 1/8)
            (550, 0.7875),  # 0.8 * (1 - 1/64)
            (700, 0.8),
            (701, 0.8),
        ],
    )
    def test_sparsity(self, step, expected):
        assert 0.8 * cubic_ramp(step, 100, 700) == pytest.approx(expected, rel=1e-15)

    def test_defaults_follow_the_paper(self):
        pruning = MagnitudePruning(unmoved([1.0])[1], 0.4, 100)
        assert pruning.every == 1
        thresholds = [pruning.threshold_at(step) for step in (0, 10, 15, 20, 100)]
        assert thresholds == pytest.approx([0, 0, 0.2, 0.4, 0.4])
        assert MagnitudePruning(unmoved([1.0])[1], 0.4, 5000).every == 50

    def test_no_ramp_is_a_jump(self):
        pruning = MagnitudePruning(unmoved([1.0])[1], 0.4, 100, start=0.5, ramp=0)
        assert [pruning.threshold_at(step) for step in (49, 50, 51)] == [0, 0, 0.4]


class TestMagnitudePruning:
    def test_known_values(self):
        param, optimizer = unmoved([0.05, -0.15, 0.25, -0.35, 0.5])
        MagnitudePruning(optimizer, 0.4, 20, every=1)  # 0 up to step 2, 0.2 at 3, 0.4 from 4 on
        seen = []
        for _ in range(4):
            optimizer.step()
            seen.append(count_zeros([param]))
        assert seen == [0, 0, 2, 4]
        assert param.tolist() == [[0, 0, 0, 0, 0.5]]

    def test_prunes_every_few_steps_and_at_the_last(self):
        param, optimizer = unmoved([0.1, 1.0])
        MagnitudePruning(optimizer, 0.4, 14, every=5, start=0, ramp=0)
        pruned = []
        for step in range(1, 22):
            with torch.no_grad():
                param[0, 0] = 0.1
            optimizer.step()
            if param[0, 0] == 0:
                pruned.append(step)
        assert pruned == [5, 10, 14, 15, 20]

    def test_weights_may_become_nonzero_again(self):
        param, optimizer = unmoved([0.1, 1.0])
        MagnitudePruning(optimizer, 0.4, 100, every=2, start=0, ramp=0)
        optimizer.step()
        optimizer.step()
        assert param.tolist() == [[0, 1]]
        param.grad = torch.tensor([[-0.3, 0.0]])
        optimizer.step()
        assert param[0, 0].item() == pytest.approx(0.3)  # not pruned yet ...
        optimizer.step()
        assert param[0, 0].item() == pytest.approx(0.6)  # ... and then above the threshold

    def test_weights_at_the_threshold_are_kept(self):
        param, optimizer = unmoved([0.5, -0.5, 0.25])
        MagnitudePruning(optimizer, 0.5, 10, every=1, start=0, ramp=0)
        optimizer.step()
        assert param.tolist() == [[0.5, -0.5, 0]]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
    def test_half_and_double_precision(self, dtype):
        param = nn.Parameter(torch.tensor([[1e-7, -1e-3, 1.0]], dtype=dtype))
        param.grad = torch.zeros_like(param)
        optimizer = torch.optim.SGD([param], lr=1.0)
        MagnitudePruning(optimizer, 1e-5, 10, every=1, start=0, ramp=0)
        optimizer.step()
        assert (param == 0).tolist() == [[True, False, False]]

    @optimizers
    def test_no_weight_below_the_threshold_remains(self, make):
        model = network()
        optimizer = make(model)
        pruning = MagnitudePruning(optimizer, 0.2, 45, every=10)
        train(model, optimizer, 45)
        weights = torch.cat([model[0].weight.flatten(), model[2].weight.flatten()]).abs()
        assert ((weights == 0) | (weights >= 0.2)).all()
        assert 0 < pruning.sparsity_now < 1
        assert pruning.sparsity_now == (weights == 0).double().mean().item()
        assert (model[0].bias != 0).all()


class TestGradualMagnitudePruning:
    def test_known_values(self):
        param, optimizer = unmoved([8.0, -1.0, 3.0, -6.0, 2.0, 7.0, 4.0, -5.0])
        GradualMagnitudePruning(optimizer, 0.5, 10, every=1, start=0.2, end=0.6)
        seen = []
        for _ in range(8):
            optimizer.step()
            seen.append(count_zeros([param]))
        # 8 * 0.5 * (1 - (1 - t/4)^3) for t = 1, 2, 3, 4: 2.3, 3.5, 3.9, 4
        assert seen == [0, 0, 2, 4, 4, 4, 4, 4]
        assert param.tolist() == [[8, 0, 0, -6, 0, 7, 0, -5]]

    def test_prunes_every_few_steps_and_at_the_end_of_the_ramp(self):
        param, optimizer = unmoved([float(i) for i in range(1, 1001)])
        GradualMagnitudePruning(optimizer, 0.9, 100, every=20, start=0.1, end=0.7)
        changes, before = [], 0
        for step in range(1, 101):
            optimizer.step()
            now = count_zeros([param])
            if now != before:
                changes.append((step, now))
            before = now
        asked = [round(900 * (1 - (1 - (step - 10) / 60) ** 3)) for step in (20, 40, 60)]
        assert changes == [*zip((20, 40, 60), asked, strict=True), (70, 900)]

    @optimizers
    @pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.77, 0.95, 0.999])
    def test_ends_at_the_given_sparsity(self, make, sparsity):
        model = network()
        optimizer = make(model)
        pruning = GradualMagnitudePruning(optimizer, sparsity, 40, every=3)
        train(model, optimizer, 28)
        assert zeros_of(model) == round(sparsity * weights_of(model))
        train(model, optimizer, 12, first=28)
        assert zeros_of(model) == round(sparsity * weights_of(model))
        assert abs(pruning.sparsity_now - sparsity) <= 0.5 / weights_of(model)

    @optimizers
    def test_zeros_stay_zero(self, make):
        model = network()
        optimizer = make(model)
        GradualMagnitudePruning(optimizer, 0.8, 50, every=4)
        dead = torch.zeros_like(model[0].weight, dtype=torch.bool)
        for step in range(50):
            train(model, optimizer, 1, first=step)
            now = model[0].weight == 0
            assert (now | ~dead).all()
            dead = now
        assert dead.any()
        assert optimizer.state or isinstance(optimizer, PSGD)

    def test_zeros_stay_zero_despite_momentum(self):
        param = weight_of([0.1, 5.0])
        optimizer = torch.optim.Adam([param], lr=0.1)
        GradualMagnitudePruning(optimizer, 0.5, 10, every=1, start=0.1, end=0.2)
        for step in range(10):
            param.grad = torch.tensor([[-1.0, -1.0]])
            optimizer.step()
            assert (param[0, 0] == 0) == (step >= 1)
        assert optimizer.state[param]["exp_avg"][0, 0] < 0
        assert param[0, 1] > 5.5

    def test_zeros_of_weights_that_were_frozen_stay_zero(self):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(8, 8)) for _ in range(2)]
        optimizer = torch.optim.Adam(weights, lr=1e-2)
        GradualMagnitudePruning(optimizer, sparsity=0.5, total_steps=20)
        for step in range(30):
            for weight in weights:
                weight.grad = torch.randn(8, 8)
            if step >= 20:  # as by zero_grad(set_to_none=False)
                weights[0].requires_grad_(False).grad.zero_()
            optimizer.step()
            if step == 19:
                pruned = weights[0] == 0
        assert pruned.any()
        assert torch.equal(weights[0] == 0, pruned)

    def test_ranks_all_weights_together(self):
        small, large = weight_of([0.1, 0.2, 0.3]), weight_of([1.0, 2.0, 3.0])
        small.grad, large.grad = torch.zeros_like(small), torch.zeros_like(large)
        optimizer = torch.optim.SGD([small, large], lr=1.0)
        GradualMagnitudePruning(optimizer, 0.5, 10, every=1)
        for _ in range(10):
            optimizer.step()
        assert [count_zeros([small]), count_zeros([large])] == [3, 0]

    def test_zero_tensor_can_train_before_the_ramp(self):
        # for example the second matrix of a low-rank adapter
        param = nn.Parameter(torch.zeros(4, 4))
        optimizer = torch.optim.SGD([param], lr=1.0)
        GradualMagnitudePruning(optimizer, 0.25, 20, every=1)
        for _ in range(20):
            param.grad = -torch.arange(1.0, 17.0).reshape(4, 4)
            optimizer.step()
        assert (param[0] == 0).all()
        assert (param[1:] > 0).all()

    def test_additional_zeros_are_kept(self):
        param, optimizer = unmoved([0.0, 0.0, 0.0, 1.0])
        GradualMagnitudePruning(optimizer, 0.25, 10, every=1)
        for _ in range(10):
            param.grad = torch.zeros_like(param)
            optimizer.step()
        assert count_zeros([param]) == 3
