"""Likely mistakes of users: each is an error before anything changes, or a warning."""

import gc
import io
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import pdecay
from pdecay import Lp


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))


def test_prune_with_a_share_is_an_error_and_changes_nothing():
    model = make_model()
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=r"threshold 0\.9 is too high: 100\.0% of the weights"):
        pdecay.prune_(model, 0.9)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "large",  # in the sum of all squares
    [lambda: nn.LayerNorm(500), lambda: nn.BatchNorm1d(500), lambda: nn.Embedding(500, 20)],
)
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_prune_with_a_share_is_an_error_in_models_with_norms_or_embeddings(large, share):
    model = nn.Sequential(large(), make_model())
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(ValueError, match="is too high"):
        pdecay.prune_(model, share)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_prune_removes_layers_that_are_dead_but_for_tiny_weights():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with torch.no_grad():
        for layer in model[:3]:
            layer.weight *= 1e-6
    pdecay.prune_(model, 1e-4)
    assert pdecay.sparsity(model, 0).total == 0.75


def test_prune_removes_most_weights_if_they_are_tiny():
    model = nn.Linear(100, 100, bias=False)
    with torch.no_grad():
        model.weight[5:] *= 1e-6
    assert pdecay.sparsity(pdecay.prune_(model, 1e-4)).total > 0.94


@pytest.mark.parametrize("weights", [0.0, 1e-20])
def test_prune_accepts_a_model_that_is_zero(weights):
    model = nn.Linear(4, 4)
    for param in model.parameters():
        nn.init.constant_(param, weights)
    pdecay.prune_(model)
    assert pdecay.sparsity(model, 0).total == 1


def test_swapped_p_and_lam_warn_at_the_user_s_line():
    with pytest.warns(UserWarning, match=r"write Lp\(0\.8, 0\.01\)") as caught:
        pdecay.PAdam(make_model().parameters(), decay=Lp(1e-2, 0.8))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("decay", [Lp(0, 1.0), Lp(0.05, 1e-3), Lp(0.8, 1e-2), Lp(0.8, 0.3)])
def test_usual_penalties_do_not_warn(decay):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdecay.PAdam(pdecay.param_groups(make_model(), decay))


@pytest.mark.parametrize("option", ["exclude", "include"])
def test_pattern_without_a_match_warns(option):
    with pytest.warns(UserWarning, match=r"'embeding' matches no parameter.*such as '0\.weight'"):
        pdecay.param_groups(make_model(), **{option: ["0.*", "embeding"]})


def test_pattern_that_matches_a_frozen_parameter_does_not_warn():
    model = make_model()
    model[0].weight.requires_grad_(False)
    pdecay.param_groups(model, exclude="0.weight")


@pytest.mark.parametrize("optimizer", [pdecay.PAdam, pdecay.PSGD])
def test_penalty_as_weight_decay_is_an_error(optimizer):
    with pytest.raises(TypeError, match=r"pass the penalty as decay=Lp\(p=0\.8, lam=0\.01\)"):
        optimizer(make_model().parameters(), weight_decay=Lp(0.8, 1e-2))


@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, 0.99, 0.999), "ab"])
def test_wrong_betas_are_an_error(betas):
    with pytest.raises(TypeError, match="betas must be two numbers"):
        pdecay.PAdam(make_model().parameters(), betas=betas)


def test_parameters_in_place_of_the_model_are_an_error():
    with pytest.raises(TypeError, match="got generator: pass the model, not its parameters"):
        pdecay.param_groups(make_model().parameters())


@pytest.mark.parametrize("model", [nn.Linear(2, 2), make_model()])
def test_model_instead_of_parameters_is_an_error(model):
    with pytest.raises(TypeError, match=r"pass model\.parameters\(\) or pdecay\.param_groups"):
        pdecay.PAdam(model)


def test_target_in_percent_names_the_share():
    with pytest.raises(ValueError, match=r"got 90; for 90 %, pass 0\.9"):
        pdecay.SparsityTarget(pdecay.PAdam(make_model().parameters()), 90, 100)


def test_epochs_instead_of_steps_warn_once():
    model = make_model()
    optimizer = pdecay.PAdam(model.parameters())
    pdecay.SparsityTarget(optimizer, 0.5, total_steps=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for taken in range(1, 20):
            model(torch.randn(4, 20)).square().sum().backward()
            optimizer.step()
            assert len(caught) == (taken >= 10)
    assert "10 steps, twice total_steps = 5" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_magnitude_pruning_by_a_share_warns_once():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pdecay.MagnitudePruning(optimizer, 0.9, 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            model(torch.ones(1, 20)).sum().backward()
            optimizer.step()
    (warning,) = caught
    assert "all weights are below the threshold" in str(warning.message)
    assert warning.filename == __file__


def test_whole_numbers_of_numpy_are_accepted_and_stored_as_plain_numbers():
    steps, model = np.int64(40), make_model()
    optimizer = pdecay.PAdam(model.parameters(), decay=Lp(0.8, 1), auxiliary=pdecay.Every(steps))
    pruning = pdecay.GradualMagnitudePruning(optimizer, 0.5, steps, every=steps)
    schedule = pdecay.PSchedule(optimizer, [(steps - 40, 2.0), (steps, 0.8)])
    buffer = io.BytesIO()
    torch.save([optimizer.state_dict(), pruning.state_dict(), schedule.state_dict()], buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True)[1]["total_steps"] == 40
    target = pdecay.SparsityTarget(pdecay.PAdam(model.parameters()), 0.5, steps)
    assert type(target.total_steps) is int
    with pytest.raises(TypeError, match=r"total_steps must be a whole number >= 1, got 40\.0"):
        pdecay.GradualMagnitudePruning(optimizer, 0.5, 40.0)


def test_handle_of_attach_shows_its_decay_and_state():
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    handle = pdecay.attach(optimizer, Lp(0.8, 0.1))
    assert repr(handle) == "Attachment(SGD, decay=Lp(p=0.8, lam=0.1), step='decay')"
    handle.detach()
    assert repr(handle).endswith("detached)")


def test_target_without_its_optimizer_has_a_repr_and_says_what_is_missing():
    target = pdecay.SparsityTarget(pdecay.PAdam(make_model().parameters()), 0.9, 100)
    gc.collect()
    assert repr(target).endswith("deleted optimizer)")
    with pytest.raises(ReferenceError, match="the optimizer was deleted: keep a reference"):
        _ = target.sparsity


@pytest.mark.parametrize("make", [pdecay.PAdam, pdecay.PSGD])
@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("decay_scale", -1.0, "decay_scale must be finite and >= 0, got -1.0"),
        ("decay_scale", float("nan"), "decay_scale must be finite and >= 0, got nan"),
        ("decay_scale", None, "decay_scale must be a number, got None"),
        ("decay_scale", [1.0, 1.0, 1.0], "one number for each of the group's 2 parameters, got 3"),
        ("decay_auxiliary", 0.5, r"auxiliary must be Instant\(\), Every\(n\)"),
        ("differentiable", True, "does not support differentiable=True"),
    ],
)
def test_setting_of_one_group_changed_to_a_bad_value_moves_no_weight(make, key, value, rule):
    model = make_model()
    optimizer = make([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=0.1)
    model(torch.randn(4, 20)).sum().backward()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.param_groups[1][key] = value
    with pytest.raises((TypeError, ValueError), match=rule):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_decay_detached_under_a_target_is_an_error_before_zeros_are_lost():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = pdecay.attach(optimizer, Lp(0.8, 0.1))
    target = pdecay.SparsityTarget(optimizer, 0.5, total_steps=10)
    for _ in range(5):
        model(torch.randn(4, 20)).sum().backward()
        optimizer.step()
    zeros = pdecay.sparsity(model).total
    assert zeros > 0
    handle.detach()
    with pytest.raises(RuntimeError, match=r"call detach\(\) of the target as well"):
        optimizer.step()
    assert pdecay.sparsity(model).total == zeros
    target.detach()
    optimizer.step()
