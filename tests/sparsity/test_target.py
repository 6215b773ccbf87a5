import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

import pdecay
from pdecay import (
    PSGD,
    Every,
    Lp,
    PAdam,
    PSchedule,
    SparsityTarget,
    attach,
    freeze_zeros,
    param_groups,
)
from tests.sparsity import training
from tests.sparsity.training import STEPS, build, padam, train, weights


def zero_share(params):
    return sum(int((w == 0).sum()) for w in params) / sum(w.numel() for w in params)


def psgd(model, decay):
    return PSGD(model.parameters(), lr=0.05, momentum=0.9, decay=decay)


def attached(model, decay):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    attach(optimizer, decay)
    return optimizer


def other_rate(model, decay):
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "d": 10.0}], lr=1e-3)
    attach(optimizer, decay, lr=lambda group: group["d"] * group["lr"])
    return optimizer


MAKERS = [padam, psgd, attached, other_rate]
DECAYS = [Lp(0, 1.0), Lp(0.5, 1.0), Lp(0.8, 1e-3), Lp(1, 1.0), Lp(1.2, 7.0), Lp(0.8, 1) + Lp(2, 1)]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("decay", DECAYS, ids=str)
@pytest.mark.parametrize("asked", [0.5, 0.9])
def test_ends_at_the_target(make, decay, asked):
    model = build()
    optimizer = make(model, decay)
    target = SparsityTarget(optimizer, asked, STEPS)
    train(model, optimizer)
    one_weight = 1 / sum(w.numel() for w in weights(model))
    assert zero_share(weights(model)) == pytest.approx(asked, abs=one_weight)
    assert target.sparsity == zero_share(weights(model))
    assert pdecay.sparsity(model).total == target.sparsity


def test_norms_and_biases_are_not_pruned():
    model = build()
    optimizer = padam(model, Lp(0.8, 1))
    SparsityTarget(optimizer, 0.95, STEPS)
    train(model, optimizer)
    assert all(zero_share([p]) == 0 for p in model.parameters() if p.ndim < 2)


def test_follows_the_ramp_and_keeps_the_zeros():
    model = build()
    optimizer = padam(model, Lp(0.8, 1))
    target = SparsityTarget(optimizer, 0.8, STEPS, start=0.1, end=0.5)
    seen = []
    for step in range(STEPS):
        train(model, optimizer, steps=step + 1, start=step)
        seen.append(target.sparsity)
    assert seen[: STEPS // 10] == [0] * (STEPS // 10)
    assert all(later >= earlier for earlier, later in itertools.pairwise(seen))
    assert 0.2 < seen[STEPS // 4] < 0.8
    assert seen[STEPS // 2 - 1 :] == [seen[-1]] * (STEPS - STEPS // 2 + 1)


def test_no_decay_after_the_ramp():
    model = build()
    optimizer = padam(model, Lp(0.8, 1))
    SparsityTarget(optimizer, 0.5, STEPS)
    train(model, optimizer)
    before = copy.deepcopy(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["betas"] = (0.0, 0.999)  # without momentum only the decay could change a weight
    optimizer.step()
    for a, b in zip(before.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_ranks_globally_or_per_layer():
    shares = {}
    for per_layer in (False, True):
        model = build()
        with torch.no_grad():
            model[3].weight.mul_(20)  # large weights are kept by a common ranking
        optimizer = padam(model, Lp(0.8, 1))
        SparsityTarget(optimizer, 0.75, STEPS, per_layer=per_layer)
        train(model, optimizer)
        shares[per_layer] = [zero_share([w]) for w in weights(model)]
    assert shares[False][0] > 0.85
    assert shares[False][1] < 0.25
    assert shares[True] == pytest.approx([0.75, 0.75], abs=0.01)


def test_layers_can_have_their_own_targets():
    model = build()
    optimizer = padam(model, Lp(0.8, 1))
    first, last = weights(model)
    SparsityTarget(optimizer, 0.9, STEPS, per_layer={last: 0.25})
    train(model, optimizer)
    assert zero_share([last]) == pytest.approx(0.25, abs=0.01)
    assert zero_share([first]) == pytest.approx(0.9, abs=0.01)


def test_floor_is_kept_and_the_target_is_met():
    model = build()
    with torch.no_grad():
        model[3].weight.mul_(1e-3)  # a common ranking would remove all of it first
    optimizer = PSGD(model.parameters(), lr=1e-4, decay=Lp(0.8, 1))
    SparsityTarget(optimizer, 0.6, STEPS, floor=0.3)
    train(model, optimizer)
    assert zero_share([model[3].weight]) == pytest.approx(0.7, abs=0.01)
    assert zero_share(weights(model)) == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize("target", [0.8, 0.9, 0.95])
def test_target_is_met_exactly_if_the_floor_keeps_all_the_rest(target):
    # The share that a tensor keeps is no whole number of weights.
    sizes = [(7, 9), (5, 5), (1, 3)]
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(size)) for size in sizes]
    optimizer = PAdam(params, lr=1e-2, decay=Lp(0.8, 1))
    steered = SparsityTarget(optimizer, target, 20, floor=1 - target)
    for _ in range(20):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    total = sum(param.numel() for param in params)
    assert sum(int((param == 0).sum()) for param in params) == round(target * total)
    assert all(param.any() for param in params)
    assert steered.last_step == 20


@pytest.mark.parametrize("rank", ["adaptive", "magnitude"])
def test_floor_is_kept_among_equal_weights(rank):
    params = [nn.Parameter(torch.full(size, 0.5)) for size in [(10, 10), (6, 5), (2, 2)]]
    optimizer = PAdam(params, decay=Lp(0.8, 1))
    steered = SparsityTarget(optimizer, 0.7, 10, floor=0.1, rank=rank, pull=0)
    for _ in range(10):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
    assert [int((param == 0).sum()) for param in params] == [90, 4, 0]
    assert steered.last_step == 10


def test_floor_allows_zeros_that_are_there_already():
    params = [nn.Parameter(torch.ones(10, 10)), nn.Parameter(torch.ones(10, 10))]
    params[0].data[:, :9] = 0
    optimizer = PAdam(params, decay=Lp(0.8, 1))
    steered = SparsityTarget(optimizer, 0.6, 10, floor=0.2)
    for step in range(10):
        for param in params:
            random = torch.randn(10, 10, generator=torch.Generator().manual_seed(step))
            param.grad = random * (param != 0)
        optimizer.step()
    assert [int((param == 0).sum()) for param in params] == [90, 30]
    assert steered.last_step == 10


@pytest.mark.parametrize(
    "steer", [freeze_zeros, lambda optimizer: SparsityTarget(optimizer, 0.9, 5)]
)
def test_decay_with_a_learning_rate_of_0_is_refused(steer):
    attached = torch.optim.SGD(build().parameters(), lr=0.1)
    attach(attached, Lp(0.8, 1), lr=0.0)
    own = padam(build(), Lp(0.8, 1))
    own.param_groups[0]["decay_lr"] = 0.0
    for optimizer in (attached, own):
        with pytest.raises(ValueError, match=r"learning rate .* is 0, and only the decay keeps"):
            steer(optimizer)


@pytest.mark.parametrize("step", [10, STEPS])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay_lr": 0.0}, "only the decay keeps zeros at zero"),
        ({"decay": [[2.0, 0.1]]}, "zero is a fixed point only for some p < 2"),
        ({"decay": None}, "decay was set to None under a SparsityTarget"),
        ({"decay": []}, r"decay was set to \[\] under a SparsityTarget"),
    ],
)
def test_settings_that_would_release_the_zeros_are_refused(change, message, step):
    model = build()
    optimizer = padam(model, Lp(0.8, 1))
    SparsityTarget(optimizer, 0.9, STEPS)
    train(model, optimizer, step)
    before = zero_share(weights(model))
    optimizer.param_groups[0].update(change)
    with pytest.raises(ValueError, match=message):
        train(model, optimizer, step + 1, start=step)
    assert zero_share(weights(model)) == before


def test_schedule_of_p_that_releases_zeros_is_refused():
    model = build()
    optimizer = padam(model, Lp(0.8, 1))
    SparsityTarget(optimizer, 0.9, STEPS)
    PSchedule(optimizer, [(0, 2.0)])
    with pytest.raises(ValueError, match="SparsityTarget: zero is a fixed point only for some p"):
        train(model, optimizer)


def test_learning_rate_function_that_turns_the_decay_off_is_refused():
    model, rate = build(), [0.1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(optimizer, Lp(0.8, 1), lr=lambda group: rate[0])
    target = SparsityTarget(optimizer, 0.9, STEPS)
    train(model, optimizer, 20)
    before = target.sparsity
    rate[0] = 0.0
    with pytest.raises(ValueError, match="only the decay keeps zeros at zero"):
        train(model, optimizer, 21, start=20)
    assert target.sparsity == before
    optimizer.param_groups[0]["lr"] = 0.0  # such a step moves no weight
    train(model, optimizer, 21, start=20)
    assert target.last_step == 21


def test_parameters_that_were_replaced_are_missed_in_per_layer():
    model = build()
    optimizer = padam(model, Lp(0.8, 1))
    SparsityTarget(optimizer, 0.9, STEPS, per_layer={model[0].weight: 0.5})
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())  # as sharding does
    optimizer.param_groups[0]["params"][0] = model[0].weight
    with pytest.raises(RuntimeError, match="create the target after it, with the new ones"):
        train(model, optimizer)


@pytest.mark.parametrize("options", [{}, {"per_layer": True, "pull": 1.0}])
def test_turning_the_decay_off_after_the_ramp_is_refused(options):
    model = build()
    optimizer = padam(model, Lp(0.8, 1))
    target = SparsityTarget(optimizer, 0.9, STEPS, **options)
    train(model, optimizer, STEPS - 1)
    for group in optimizer.param_groups:
        group["decay_scale"] = 0.0
    before = target.sparsity
    with pytest.raises(ValueError, match="decay_scale was set to 0"):
        train(model, optimizer, STEPS, start=STEPS - 1)
    assert target.sparsity == before


@pytest.mark.parametrize("rank", ["adaptive", "magnitude"])
def test_zeros_that_were_frozen_stay_zero_before_the_ramp(rank):
    model = build()
    with torch.no_grad():
        for weight in weights(model):
            weight.masked_fill_(torch.rand_like(weight) < 0.5, 0.0)
    zeros = [weight == 0 for weight in weights(model)]
    optimizer = padam(model, Lp(0.8, 1))
    freeze_zeros(optimizer)
    SparsityTarget(optimizer, 0.9, STEPS, rank=rank)
    for step in range(STEPS):
        train(model, optimizer, step + 1, start=step)
        assert all(bool((w[z] == 0).all()) for w, z in zip(weights(model), zeros, strict=True))
    assert zero_share(weights(model)) == pytest.approx(0.9, abs=1e-3)


def test_checkpoint_without_a_target_warns_if_the_ramp_starts_over():
    model = build()
    optimizer = padam(model, Lp(0.8, 1))
    without = copy.deepcopy(optimizer.state_dict())
    target = SparsityTarget(optimizer, 0.9, STEPS)
    optimizer.load_state_dict(without)  # the usual order: nothing is lost
    train(model, optimizer, 20)
    with pytest.warns(UserWarning, match="its ramp starts over after 20 steps"):
        optimizer.load_state_dict(without)
    assert target.last_step == 0


def test_lost_zeros_are_reported_after_a_resume_past_the_ramp():
    model = build()
    optimizer = padam(model, Lp(0.8, 1))
    SparsityTarget(optimizer, 0.9, STEPS)
    train(model, optimizer)
    resumed = padam(model, Lp(0.8, 1))
    resumed.load_state_dict(optimizer.state_dict())
    SparsityTarget(resumed, 0.9, STEPS)
    train(model, resumed, STEPS + 2, start=STEPS)
    with torch.no_grad():
        model[0].weight += 0.1
    with pytest.warns(UserWarning, match="weights that were zero are not zero any more") as caught:
        train(model, resumed, STEPS + 3, start=STEPS + 2)
    assert caught[0].filename == training.__file__


def test_existing_zeros_count():
    model = build()
    with torch.no_grad():
        model[0].weight[:8].zero_()
    optimizer = padam(model, Lp(0.8, 1))
    target = SparsityTarget(optimizer, 0.6, STEPS)
    assert target.sparsity == pytest.approx(0.2)
    train(model, optimizer)
    assert target.sparsity == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize("make", [padam, psgd, attached])
@pytest.mark.parametrize("stop", [1, 20, 41, 50])
def test_resume_from_file_is_exact(make, stop, tmp_path):
    def fresh():
        model = build()
        optimizer = make(model, Lp(0.8, 1))
        return model, optimizer, SparsityTarget(optimizer, 0.9, STEPS)

    parts = fresh()
    train(*parts[:2], steps=stop)
    torch.save([part.state_dict() for part in parts], tmp_path / "checkpoint")
    train(*parts[:2], start=stop)
    resumed = fresh()
    saved = torch.load(tmp_path / "checkpoint", weights_only=True)
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    train(*resumed[:2], start=stop)
    for a, b in zip(parts[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": 1.0}, "target must be above 0 and below 1, got 1.0"),
        ({"target": 0.0}, "target must be above 0 and below 1, got 0.0"),
        ({"target": -0.5}, "target must be finite and >= 0, got -0.5"),
        ({"target": float("nan")}, "target must be finite"),
        ({"total_steps": 0}, "total_steps must be a whole number >= 1, got 0"),
        ({"total_steps": 10.5}, "total_steps must be a whole number >= 1, got 10.5"),
        ({"start": 0.8, "end": 0.7}, "0 <= start < end <= 1 must hold, got start=0.8"),
        ({"end": 1.5}, "0 <= start < end <= 1 must hold"),
        ({"floor": 0.2}, "target 0.9 keeps less than floor=0.2"),
        ({"per_layer": {nn.Parameter(torch.ones(3, 3)): 0.5}}, r"do not decay, of shapes \[\(3, 3"),
    ],
)
def test_rejects_bad_arguments_and_changes_nothing(arguments, message):
    model = build()
    optimizer = padam(model, Lp(0.8, 1))
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises((TypeError, ValueError), match=message):
        SparsityTarget(optimizer, **{"target": 0.9, "total_steps": STEPS, **arguments})
    torch.testing.assert_close(model.state_dict(), weights)
    assert optimizer.state_dict() == state


def test_rejects_target_below_the_current_sparsity():
    model = build()
    with torch.no_grad():
        model[0].weight[:16].zero_()
    with pytest.raises(ValueError, match=r"target 0.1 means 64 zeros, but 256 of the 640"):
        SparsityTarget(padam(model, Lp(0.8, 1)), 0.1, STEPS)


def test_rejects_optimizer_without_steerable_decay():
    model = build()
    biases = [param for param in model.parameters() if param.ndim < 2]
    with pytest.raises(ValueError, match="no decayed weights"):
        SparsityTarget(PAdam(biases), 0.5, STEPS)
    with pytest.raises(TypeError, match="needs an optimizer that decays"):
        SparsityTarget(torch.optim.SGD(model.parameters(), lr=0.1), 0.5, STEPS)
    with pytest.raises(ValueError, match="only for some p < 2"):
        SparsityTarget(PAdam(model.parameters(), decay=Lp(2, 1)), 0.5, STEPS)


@pytest.mark.parametrize("make", MAKERS)
def test_freeze_zeros_keeps_zeros_and_trains_the_rest(make):
    model, plain = build(), build()
    with torch.no_grad():
        for one in (model, plain):
            one[0].weight[::2].zero_()
    optimizer = make(model, Lp(0.5, 3.0) + Lp(2, 1.0))
    freeze_zeros(optimizer)
    free = make(plain, None)
    masks = [w != 0 for w in weights(plain)]
    for step in range(20):
        for one, opt in ((model, optimizer), (plain, free)):
            torch.manual_seed(step)
            x = torch.randn(8, 16)
            opt.zero_grad()
            one(x).square().mean().backward()
            opt.step()
        with torch.no_grad():  # a plain optimizer needs an explicit mask
            for w, mask in zip(weights(plain), masks, strict=True):
                w.mul_(mask)
    assert not model[0].weight[::2].any()
    torch.testing.assert_close(model[0].weight, plain[0].weight, rtol=1e-4, atol=1e-5)
    assert "mask" not in str(optimizer.state_dict())


def test_freeze_zeros_warns_of_zero_tensors_that_do_not_decay():
    model = build()
    first = nn.init.zeros_(model[0].weight)
    with pytest.warns(UserWarning, match=r"all zero, but do not decay.*0 of group 1.*requires_gra"):
        freeze_zeros(PAdam(param_groups(model)))
    first.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        freeze_zeros(PAdam(param_groups(model)))


@pytest.mark.parametrize("decay", [None, [], [[2.0, 0.1]], Lp(2, 0.1)])
@pytest.mark.parametrize("make", [padam, psgd, attached])
def test_decay_that_releases_frozen_zeros_is_refused(make, decay):
    model = build()
    with torch.no_grad():
        model[0].weight[:8] = 0
    optimizer = make(model, Lp(0.8, 1))
    freeze_zeros(optimizer)
    train(model, optimizer, 2)
    before = [param.detach().clone() for param in model.parameters()]
    group = optimizer.param_groups[0]
    group["decay"] = decay
    with pytest.raises(ValueError, match=r"keeps zeros at zero \(freeze_zeros"):
        train(model, optimizer, 3, start=2)
    assert all(map(torch.equal, before, model.parameters()))
    group["decay_scale"] = 1.0
    train(model, optimizer, 3, start=2)
    assert bool((model[0].weight[:8] != 0).any())


def test_freeze_zeros_rejects_p_2():
    model = build()
    with pytest.raises(ValueError, match="only for some p < 2"):
        freeze_zeros(PAdam(model.parameters(), decay=Lp(2, 1)))


def test_rejects_auxiliaries_that_let_weights_leave_zero():
    model = build()
    optimizer = PAdam(model.parameters(), decay=Lp(0.8, 1), auxiliary=Every(5))
    with pytest.raises(ValueError, match=r"zeros that stay zero, .* use Instant"):
        SparsityTarget(optimizer, 0.9, STEPS)
    with pytest.raises(ValueError, match="zeros that stay"):
        freeze_zeros(optimizer)


@pytest.mark.parametrize("per_layer", ["yes", 0.5, 1, {"0.weight": 0.5}], ids=str)
def test_per_layer_of_a_wrong_type_raises(per_layer):
    optimizer = PAdam(nn.Linear(4, 4).parameters())
    with pytest.raises(TypeError, match="per_layer must be True, False or a mapping from tensors"):
        SparsityTarget(optimizer, 0.5, 10, per_layer=per_layer)


def test_optimizer_listed_twice_raises():
    optimizer = PAdam(nn.Linear(4, 4).parameters())
    for call in (lambda o: SparsityTarget(o, 0.5, 10), freeze_zeros):
        with pytest.raises(ValueError, match="the list has an optimizer twice"):
            call([optimizer, optimizer])


def test_freeze_zeros_needs_a_decay():
    optimizer = PAdam([nn.Parameter(torch.ones(2, 2))], decay=None)
    with pytest.raises(ValueError, match="no parameter group decays"):
        freeze_zeros(optimizer)
