import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from pdecay import PSGD, Lp, PAdam, attach
from pdecay._core.ramp import cubic_ramp, linear_ramp
from pdecay._sparsity.pruning import GradualMagnitudePruning, MagnitudePruning
from pdecay._sparsity.ranking import count_zeros


def weight_of(values):
    return nn.Parameter(torch.tensor([values]))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def train(model, optimizer, steps, *, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 6, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()


def zeros_of(model):
    return count_zeros([param for param in model.parameters() if param.ndim >= 2])


def weights_of(model):
    return sum(param.numel() for param in model.parameters() if param.ndim >= 2)


def unmoved(values):
    """Return a parameter with zero gradient, so that only the pruning changes it."""
    param = weight_of(values)
    param.grad = torch.zeros_like(param)
    return param, torch.optim.SGD([param], lr=1.0)


OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02, fused=True),
    "PAdam": lambda model: PAdam(model.parameters(), lr=0.02, decay=Lp(0.8, 1e-3)),
    "PSGD": lambda model: PSGD(model.parameters(), lr=0.5, decay=Lp(1, 1e-4)),
    "attached": lambda model: attached(torch.optim.Adam(model.parameters(), lr=0.02)),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def attached(optimizer):
    attach(optimizer, Lp(0.8, 1e-3))
    return optimizer


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


BOTH = {
    "iterative": lambda optimizer, **kwargs: MagnitudePruning(optimizer, 0.15, 40, **kwargs),
    "gradual": lambda optimizer, **kwargs: GradualMagnitudePruning(optimizer, 0.8, 40, **kwargs),
}
both = pytest.mark.parametrize("prune", BOTH.values(), ids=BOTH.keys())


@both
class TestBoth:
    @pytest.mark.parametrize("stop", [3, 17])
    @optimizers
    def test_resume_is_exact(self, prune, make, stop):
        model = network()
        optimizer = make(model)
        prune(optimizer, every=3)
        train(model, optimizer, 40)

        half = network()
        optimizer = make(half)
        pruning = prune(optimizer, every=3)
        train(half, optimizer, stop)
        file = io.BytesIO()
        torch.save([half.state_dict(), optimizer.state_dict(), pruning.state_dict()], file)
        file.seek(0)
        weights, state, pruned = torch.load(file, weights_only=True)

        again = network(seed=1)
        optimizer = make(again)
        pruning = prune(optimizer, every=7)  # the checkpoint replaces it, as in torch's schedulers
        again.load_state_dict(weights)
        optimizer.load_state_dict(state)
        pruning.load_state_dict(pruned)
        train(again, optimizer, 40 - stop, first=stop)
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, other)
        assert pruning.last_step == 40

    def test_works_before_and_after_attach(self, prune):
        for decay_first in (True, False):
            model = network()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
            if decay_first:
                attach(optimizer, Lp(0.8, 1e-3))
            pruning = prune(optimizer, every=2)
            if not decay_first:
                attach(optimizer, Lp(0.8, 1e-3))
            train(model, optimizer, 40)
            if isinstance(pruning, GradualMagnitudePruning):
                assert zeros_of(model) == round(0.8 * weights_of(model))
            assert 0.2 < pruning.sparsity_now < 1

    def test_nested_step_counts_once(self, prune):
        class Nested(torch.optim.SGD):
            def step(self, closure=None):
                return super().step(closure)

        model = network()
        optimizer = Nested(model.parameters(), lr=0.1)
        torch.optim.SGD(model.parameters(), lr=0.1)  # makes SGD's own step run hooks too
        pruning = prune(optimizer)
        train(model, optimizer, 3)
        assert pruning.last_step == 3

    def test_failed_step_does_not_count(self, prune):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruning = prune(optimizer)

        def fails():
            raise RuntimeError("out of data")

        train(model, optimizer, 1)
        with pytest.raises(RuntimeError, match="out of data"):
            optimizer.step(fails)
        assert pruning.last_step == 1
        train(model, optimizer, 2, first=1)
        assert pruning.last_step == 3

    def test_closures_count_one_step(self, prune):
        model = network()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        pruning = prune(optimizer, every=1)
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
            return loss

        for _ in range(30):
            optimizer.step(closure)
        assert pruning.last_step == 30
        assert pruning.sparsity_now > 0.2

    def test_detach_removes_the_hooks(self, prune):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        pruning = prune(optimizer, every=1)
        train(model, optimizer, 30)
        assert zeros_of(model) > 0
        pruning.detach()
        pruning.detach()
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        train(model, optimizer, 1, first=30)
        assert zeros_of(model) == 0
        assert pruning.last_step == 30

    def test_prunes_only_chosen_params(self, prune):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        pruning = prune(optimizer, every=1, params=iter([model[0].weight, model[0].bias]))
        train(model, optimizer, 40)
        assert count_zeros([model[2].weight, model[2].bias]) == 0
        assert pruning.sparsity_now > 0.2
        assert count_zeros([model[0].weight]) > 0

    def test_chosen_params_that_were_replaced_are_an_error(self, prune):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        prune(optimizer, params=[model[0].weight])
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())  # as sharding does
        optimizer.param_groups[0]["params"][0] = model[0].weight
        before = model[2].weight.detach().clone()
        with pytest.raises(RuntimeError, match="that the optimizer does not have any more"):
            train(model, optimizer, 1)
        assert torch.equal(before, model[2].weight)

    def test_prunes_added_groups(self, prune):
        model = network()
        optimizer = torch.optim.Adam(model[0].parameters(), lr=0.02)
        prune(optimizer, every=1)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        train(model, optimizer, 40)
        assert count_zeros([model[2].weight]) > 0
        assert count_zeros([model[2].bias, model[0].bias]) == 0

    def test_parameters_without_gradient(self, prune):
        model = network()
        model[0].weight.requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        prune(optimizer, every=1)
        train(model, optimizer, 40)
        assert count_zeros([model[0].weight]) == 0
        assert count_zeros([model[2].weight]) > 0

    def test_checkpoint_holds_plain_numbers(self, prune):
        pruning = prune(torch.optim.SGD(network().parameters()))
        state = pruning.state_dict()
        assert all(isinstance(value, int | float) for value in state.values())
        assert copy.deepcopy(state) == state

    @pytest.mark.parametrize("total_steps", [0, -5])
    def test_rejects_bad_total_steps(self, prune, total_steps):
        kind = type(prune(torch.optim.SGD(network().parameters())))
        optimizer = torch.optim.SGD(network().parameters())
        with pytest.raises(ValueError, match=f"whole number >= 1, got {total_steps}"):
            kind(optimizer, 0.5, total_steps)
        assert not optimizer._optimizer_step_post_hooks

    @pytest.mark.parametrize("count", [1.0, "3", True, math.nan])
    def test_rejects_counts_that_are_not_integers(self, prune, count):
        optimizer = torch.optim.SGD(network().parameters())
        with pytest.raises(TypeError, match="every must be a whole number"):
            prune(optimizer, every=count)
        with pytest.raises(TypeError, match="total_steps must be a whole number"):
            MagnitudePruning(optimizer, 0.5, count)

    def test_rejects_bad_every(self, prune):
        with pytest.raises(ValueError, match="every must be a whole number >= 1, got 0"):
            prune(torch.optim.SGD(network().parameters()), every=0)

    def test_rejects_nothing_to_prune(self, prune):
        with pytest.raises(ValueError, match="nothing to prune"):
            prune(torch.optim.SGD([nn.Parameter(torch.ones(3))]))
        with pytest.raises(ValueError, match="nothing to prune"):
            prune(torch.optim.SGD(network().parameters()), params=[])

    def test_rejects_unknown_params(self, prune):
        optimizer = torch.optim.SGD(network().parameters())
        with pytest.raises(ValueError, match=r"shape \(2, 3\) that the optimizer does not train"):
            prune(optimizer, params=[torch.ones(2, 3)])
        with pytest.raises(TypeError, match="params must hold tensors, got str"):
            prune(optimizer, params=["weight"])
        with pytest.raises(TypeError, match="a list of tensors, got one tensor"):
            prune(optimizer, params=optimizer.param_groups[0]["params"][0])

    def test_rejects_other_objects_than_optimizers(self, prune):
        with pytest.raises(TypeError, match=r"needs a torch\.optim\.Optimizer, got Sequential"):
            prune(network())

    def test_rejects_checkpoint_of_another_class(self, prune):
        pruning = prune(torch.optim.SGD(network().parameters()))
        with pytest.raises(ValueError, match="not a checkpoint of"):
            pruning.load_state_dict({"last_step": 3})


class TestErrors:
    @pytest.mark.parametrize("sparsity", [1, 1.0, 1.5])
    def test_rejects_sparsity_of_one_and_above(self, sparsity):
        with pytest.raises(ValueError, match="sparsity must be below 1"):
            GradualMagnitudePruning(unmoved([1.0])[1], sparsity, 10)

    def test_percentage_is_recognised(self):
        with pytest.raises(ValueError, match=r"got 90; for 90 %, pass 0\.9"):
            GradualMagnitudePruning(unmoved([1.0])[1], 90, 10)

    @pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
    def test_rejects_bad_numbers(self, value):
        with pytest.raises(ValueError, match="sparsity must be finite and >= 0"):
            GradualMagnitudePruning(unmoved([1.0])[1], value, 10)
        with pytest.raises(ValueError, match="threshold must be finite and >= 0"):
            MagnitudePruning(unmoved([1.0])[1], value, 10)
        with pytest.raises(ValueError, match="start must be finite and >= 0"):
            MagnitudePruning(unmoved([1.0])[1], 0.5, 10, start=value)

    @pytest.mark.parametrize(("start", "end"), [(0.5, 0.5), (0.7, 0.1), (0.1, 1.1)])
    def test_gradual_rejects_bad_ramp(self, start, end):
        with pytest.raises(ValueError, match="start < end <= 1 must hold"):
            GradualMagnitudePruning(unmoved([1.0])[1], 0.5, 10, start=start, end=end)

    @pytest.mark.parametrize(("start", "ramp"), [(1.0, 0.0), (0.5, 0.6)])
    def test_iterative_rejects_bad_ramp(self, start, ramp):
        with pytest.raises(ValueError, match="must reach its final value"):
            MagnitudePruning(unmoved([1.0])[1], 0.5, 10, start=start, ramp=ramp)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])  # Adagrad has its state
def test_state_for_a_distributed_checkpoint_has_the_squares(kind):
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), 0.1)
    pruning = GradualMagnitudePruning(optimizer, 0.5, 10, rank="adaptive")
    state = get_optimizer_state_dict(model, optimizer)["state"]  # runs a step to create it
    assert pruning.last_step == 0
    assert torch.equal(state["weight"]["squared_gradient"], torch.zeros(4, 4))


@pytest.mark.parametrize("kind", [GradualMagnitudePruning, MagnitudePruning])
def test_resuming_without_the_state_of_the_pruning_warns(kind):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    pruning = kind(optimizer, 0.5, total_steps=10)
    train(model, optimizer, 8)
    state = optimizer.state_dict()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    again = kind(optimizer, 0.5, total_steps=10)
    optimizer.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"weights are zero, which may move .* state_dict\(\)"):
        train(model, optimizer, 1)
    train(model, optimizer, 1)  # warns once
    again.load_state_dict(pruning.state_dict())
    train(model, optimizer, 1)


def test_pruning_after_a_dense_training_does_not_warn():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    train(model, optimizer, 2)
    GradualMagnitudePruning(optimizer, 0.5, total_steps=10)
    train(model, optimizer, 10)
    assert zeros_of(model) == round(0.5 * weights_of(model))
