"""Hooks, parameters, checkpoints and invalid arguments of both pruning classes."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from pdecay import GradualMagnitudePruning, Lp, MagnitudePruning, attach
from pdecay._sparsity.ranking import count_zeros
from tests.sparsity.pruning import (
    network,
    optimizers,
    train,
    unmoved,
    weights_of,
    zeros_of,
)

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
    pruning = kind(optimizer, 0.1, total_steps=10)
    train(model, optimizer, 8)
    state = optimizer.state_dict()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    again = kind(optimizer, 0.1, total_steps=10)
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
