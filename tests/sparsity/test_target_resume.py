"""Tests of resumed runs with a SparsityTarget: checkpoints of all kinds, copies, other settings."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import pdecay
from pdecay import Lp, PAdam, SparsityTarget, attach
from pdecay._core.group_settings import HOLD
from tests.sparsity.training import (
    STEPS,
    assert_equal,
    attached,
    attached_groups,
    build,
    loss_of,
    padam,
    size,
    train,
    weights,
    zeros,
)

END = 42  # of the ramp


def test_checkpoint_by_names_with_changed_groups_is_refused():
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = PAdam(pdecay.param_groups(model), lr=1e-2, decay=Lp(0.8, 0.1))
    SparsityTarget(optimizer, 0.5, 40, rank="magnitude")
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    with torch.no_grad():
        model[2].weight.zero_()  # param_groups does not decay it any more
    optimizer = PAdam(pdecay.param_groups(model), lr=1e-2, decay=Lp(0.8, 0.1))
    SparsityTarget(optimizer, 0.5, 40, rank="magnitude")
    with pytest.raises(ValueError, match=r"at different steps: \[0, 3\].*before the weights are"):
        set_optimizer_state_dict(model, optimizer, saved, options=options)


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}])
@pytest.mark.parametrize("make", [padam, attached_groups])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (1, 0), (1, 1)])
def test_checkpoint_by_names_with_moved_tensors_is_refused(make, start, end, options):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def built(loaded):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        with torch.no_grad():  # one tensor is zero at the start, another one becomes zero
            model[1].weight.mul_(1 - start if not loaded else 1)
            model[2].weight.mul_(1 - end if loaded else 1)
        return model

    model = built(loaded=False)
    optimizer = make(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    settings = StateDictOptions(**options)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=settings))
    twin = built(loaded=False)  # groups of the same tensors
    set_optimizer_state_dict(twin, make(twin), copy.deepcopy(saved), options=settings)

    model = built(loaded=True)
    optimizer = make(model)
    moved = [index for index, moves in ((2, start), (4, end)) if moves]
    with pytest.raises(ValueError, match=rf"parameters \{moved} of the model.*include="):
        set_optimizer_state_dict(model, optimizer, saved, options=settings)


def test_frozen_tensors_and_other_models_do_not_count_as_moved():
    model = build()
    optimizer = padam(model)
    saved = optimizer.state_dict()
    split = saved["param_groups"][0]["decay_split"]
    assert split == saved["param_groups"][1]["decay_split"]
    assert set(split) == {"d", "n"}
    for accepted in (split.replace("d", "f"), split + "d", None):
        for group in saved["param_groups"]:
            group["decay_split"] = accepted
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["decay_split"] == split
        del saved["param_groups"][0]["decay_split"]  # of an older version
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["decay_split"] == split


class TestResume:
    @pytest.mark.parametrize("order", ["weights, target, state", "target, state", "state, target"])
    @pytest.mark.parametrize("stop", [1, 20, END, 50])
    @pytest.mark.parametrize(
        ("make", "options"),
        [(padam, {}), (attached, {}), (padam, {"per_layer": True}), (attached, {"floor": 0.05})],
    )
    def test_resume_is_exact(self, make, stop, order, options):
        whole = build()
        optimizer = make(whole)
        SparsityTarget(optimizer, 0.901, STEPS, **options)
        file = io.BytesIO()
        train(whole, optimizer, stop)
        torch.save([whole.state_dict(), optimizer.state_dict()], file)
        train(whole, optimizer, start=stop)

        file.seek(0)
        weights_state, optimizer_state = torch.load(file, weights_only=True)
        model = build()
        if order.startswith("weights"):  # as Lightning does
            model.load_state_dict(weights_state)
        optimizer = make(model)
        if order.endswith("target"):
            model.load_state_dict(weights_state)
            optimizer.load_state_dict(optimizer_state)
            target = SparsityTarget(optimizer, 0.901, STEPS, **options)
        else:
            target = SparsityTarget(optimizer, 0.901, STEPS, **options)
            model.load_state_dict(weights_state)
            optimizer.load_state_dict(optimizer_state)
        assert target.last_step == stop
        train(model, optimizer, start=stop)
        assert_equal(model, whole)
        assert zeros(weights(model)) == pytest.approx(0.901 * size(weights(model)), abs=1)

    def test_weights_with_rounded_up_zeros_are_accepted(self):
        model = build()
        optimizer = padam(model)
        SparsityTarget(optimizer, 0.9016, STEPS)  # 577.02 of 640 weights
        train(model, optimizer)
        with torch.no_grad():  # one more zero than asked for
            weights(model)[0][weights(model)[0] != 0][0] = 0
        for asked in (0.9008, 0.9016):  # 576.5 rounds to 576
            SparsityTarget(padam(model), asked, STEPS)

    def test_run_with_more_zeros_than_asked_for_continues(self):
        model = build()
        optimizer = padam(model)
        SparsityTarget(optimizer, 0.5, STEPS)
        train(model, optimizer, 20)
        with torch.no_grad():  # as if by decay
            weights(model)[0][:24] = 0
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = padam(model)
        optimizer.load_state_dict(saved)
        assert SparsityTarget(optimizer, 0.5, STEPS).last_step == 20
        with pytest.raises(ValueError, match="already zero"):
            SparsityTarget(padam(model), 0.5, STEPS)

    @pytest.mark.parametrize("make", [padam, attached])
    @pytest.mark.parametrize("options", [{}, {"update_power": 0.5}, {"rank": "magnitude"}])
    @pytest.mark.parametrize("target_first", [True, False])
    def test_deepcopy_with_the_optimizer_continues(self, make, options, target_first):
        model = build()
        optimizer = make(model)
        target = SparsityTarget(optimizer, 0.9, STEPS, **options)
        objects = [target, model, optimizer]
        train(model, optimizer, 20)
        copies = copy.deepcopy(objects if target_first else objects[::-1])
        twin, other, steered = copies if target_first else copies[::-1]
        assert twin.optimizers == [steered]
        train(model, optimizer, start=20)
        assert twin.last_step == 20
        train(other, steered, start=20)
        assert_equal(model, other)
        assert twin.sparsity == pytest.approx(0.9, abs=1e-3)

    def test_deepcopy_of_a_detached_target_and_of_one_without_optimizer(self):
        optimizer = attached(build())
        target = SparsityTarget(optimizer, 0.9, STEPS)
        target.detach()
        copied, _ = copy.deepcopy((optimizer, target))
        assert not copied._optimizer_step_pre_hooks
        del optimizer, copied
        assert "deleted optimizer" in repr(copy.deepcopy(target))

    @pytest.mark.parametrize("make", [padam, attached])
    @pytest.mark.parametrize("options", [{}, {"update_power": 0.5}])
    def test_parameters_appended_to_a_group_join_the_ramp(self, make, options):
        model = build()
        optimizer = make(model)
        target = SparsityTarget(optimizer, 0.9, STEPS, **options)
        train(model, optimizer, 20)
        model.append(nn.Linear(4, 4, bias=False))
        optimizer.param_groups[0]["params"].append(model[-1].weight)
        train(model, optimizer, start=20)
        assert target.sparsity == pytest.approx(0.9, abs=1e-3)
        assert zeros([model[-1].weight]) > 0

    @pytest.mark.parametrize("options", [{}, {"per_layer": True, "rank": "magnitude"}])
    def test_parameters_may_be_appended_and_removed(self, options):
        model = build()
        optimizer = padam(model)
        target = SparsityTarget(optimizer, 0.9, STEPS, **options)
        train(model, optimizer, 20)
        params = optimizer.param_groups[0]["params"]
        model.append(nn.Linear(4, 4, bias=False))
        params.append(model[-1].weight)
        assert 0 < target.sparsity < 0.9  # before the first step with it
        train(model, optimizer, 40, start=20)
        params.remove(model[0].weight)
        train(model, optimizer, start=40)
        assert target.sparsity == pytest.approx(0.9, abs=5e-3)

    def test_removed_parameters_take_their_initial_zeros_with_them(self):
        large, small = nn.Parameter(torch.zeros(40, 40)), nn.Parameter(torch.ones(4, 4))
        large.data[0] = 1.0
        optimizer = PAdam([{"params": [large, small], "decay": Lp(0.8, 1)}])
        target = SparsityTarget(optimizer, 0.99, 20, rank="magnitude")
        for step in range(20):
            for param in (large, small):
                param.grad = param.detach().clone()
            optimizer.step()
            if step == 5:
                del optimizer.param_groups[0]["params"][0]
        assert target.sparsity == 1.0  # 15.84 of 16

    def test_pickle_says_what_to_save(self):
        optimizer = padam(build())
        target = SparsityTarget(optimizer, 0.9, STEPS)
        with pytest.raises(TypeError, match=r"cannot be pickled: save the state_dict\(\)"):
            pickle.dumps((optimizer, target))

    def test_state_is_plain_numbers(self):
        optimizer = padam(build())
        SparsityTarget(optimizer, 0.9, STEPS)
        for group in optimizer.state_dict()["param_groups"]:
            for key in (key for key in group if key.startswith("target_")):
                values = group[key] if isinstance(group[key], list) else [group[key]]
                assert all(type(value) in (int, float) for value in values)

    def test_state_dict_is_a_snapshot(self):
        model = build()
        optimizer = padam(model)
        SparsityTarget(optimizer, 0.9, STEPS)
        train(model, optimizer, 3)
        groups = [dict(group) for group in optimizer.state_dict()["param_groups"]]
        initial = [list(group["target_initial"]) for group in groups]
        train(model, optimizer, 10, start=3)
        assert [group["target_initial"] for group in groups] == initial

    def test_checkpoint_without_a_target_starts_the_ramp(self):
        model = build()
        dense = padam(model)
        train(model, dense, 5)
        optimizer = padam(model)
        target = SparsityTarget(optimizer, 0.9, STEPS)
        optimizer.load_state_dict(dense.state_dict())
        assert optimizer.param_groups[0]["decay_scale"] == 0
        train(model, optimizer)
        assert target.last_step == STEPS
        assert target.sparsity == pytest.approx(0.9, abs=0.002)

    @pytest.mark.parametrize("every", [(1, 2), (2, 1), (3, 1)])
    @pytest.mark.parametrize("stop", [11, 12])
    def test_optimizers_with_different_frequencies_resume_exactly(self, every, stop):
        def start():
            model = build()
            optimizers = [PAdam([w], lr=1e-2, decay=Lp(0.8, 1)) for w in weights(model)]
            return model, optimizers, SparsityTarget(optimizers, 0.8, STEPS)

        def run(model, optimizers, steps):
            for step in steps:
                model.zero_grad()
                loss_of(model, step).backward()
                for optimizer, frequency in zip(optimizers, every, strict=True):
                    if step % frequency == 0:
                        optimizer.step()

        model, optimizers, target = start()
        run(model, optimizers, range(stop))
        saved = copy.deepcopy([model.state_dict(), *(one.state_dict() for one in optimizers)])
        run(model, optimizers, range(stop, STEPS))
        resumed, again, twin = start()
        for one, state in zip([resumed, *again], saved, strict=True):
            one.load_state_dict(state)
        run(resumed, again, range(stop, STEPS))
        assert twin.last_step == target.last_step
        assert_equal(resumed, model)

    @pytest.mark.parametrize("options", [{}, {"rank": "magnitude"}])
    def test_shorter_ramp_than_that_of_the_checkpoint_warns(self, options):
        model = build()
        optimizer = padam(model)
        SparsityTarget(optimizer, 0.9, STEPS, **options)
        train(model, optimizer, 30)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = padam(model)
        SparsityTarget(optimizer, 0.9, 30, **options)
        optimizer.load_state_dict(saved)
        with pytest.warns(UserWarning, match=r"from step 30, after the end of this ramp, step 26"):
            train(model, optimizer, 31, start=30)
        assert optimizer.param_groups[0]["decay_scale"] == HOLD
        train(model, optimizer, 33, start=31)  # warns once

    @pytest.mark.parametrize("stop", [51, 53])  # the ramp ends at step 51
    def test_finished_ramp_does_not_warn(self, stop):
        model = build()
        first = weights(model)[0]
        optimizer = padam(model)
        SparsityTarget(optimizer, 0.9, STEPS, per_layer={first: 0.5})
        train(model, optimizer, stop)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(40, 40))]})
        with pytest.warns(UserWarning, match="added after the end"):
            train(model, optimizer, stop + 1, start=stop)
        saved = copy.deepcopy(optimizer.state_dict())
        again = padam(model)
        first.requires_grad_(False)
        again.add_param_group({"params": [nn.Parameter(torch.ones(40, 40))]})
        again.load_state_dict(saved)
        SparsityTarget(again, 0.9, STEPS, per_layer={first: 0.5})
        train(model, again, stop + 3, start=stop + 1)

    @pytest.mark.parametrize("stop", [2, 20, END])
    @pytest.mark.parametrize(
        "options", [{}, {"rank": "magnitude"}, {"pull": 1, "per_layer": True}], ids=str
    )
    def test_state_that_a_distributed_checkpoint_did_not_load_is_reported(self, options, stop):
        model = build()
        optimizer = padam(model)
        SparsityTarget(optimizer, 0.9, STEPS, **options)
        train(model, optimizer, stop)
        saved = copy.deepcopy(optimizer.state_dict())
        for group in saved["param_groups"]:  # dcp.load reads the keys of the new optimizer only
            for key in [key for key in group if key.startswith("target_")]:
                del group[key]
        optimizer = padam(model)
        optimizer.load_state_dict(saved)
        with pytest.warns(UserWarning, match="create the target before get_optimizer_state_dict"):
            SparsityTarget(optimizer, 0.9, STEPS, **options)

    @pytest.mark.parametrize("stop", [2, 20, 51, 55])
    def test_full_state_dict_with_a_scale_for_each_tensor_resumes_exactly(self, stop):
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
            set_optimizer_state_dict,
        )

        options = StateDictOptions(full_state_dict=True)
        model = build()
        optimizer = padam(model)
        SparsityTarget(optimizer, 0.9, STEPS, per_layer=True, rank="magnitude")
        train(model, optimizer, stop)
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        resumed = copy.deepcopy(model)
        train(model, optimizer, start=stop)
        again = padam(resumed)
        SparsityTarget(again, 0.9, STEPS, per_layer=True, rank="magnitude")
        resumed.zero_grad()
        set_optimizer_state_dict(resumed, again, saved, options=options)
        train(resumed, again, start=stop)
        assert_equal(resumed, model)

    @pytest.mark.parametrize("stop", [2, 20, 51])
    @pytest.mark.parametrize("make", [torch.optim.SGD, pdecay.PSGD])
    def test_squares_of_an_optimizer_without_state_are_loaded(self, make, stop):
        from torch.distributed.checkpoint.state_dict import (
            get_optimizer_state_dict,
            set_optimizer_state_dict,
        )

        def steered(model):
            optimizer = make(model.parameters(), lr=0.05)  # no momentum: biases have no state
            if make is torch.optim.SGD:
                attach(optimizer, Lp(0.8, 1e-2))
            SparsityTarget(optimizer, 0.9, STEPS)
            return optimizer

        model = build()
        optimizer = steered(model)
        train(model, optimizer, stop)
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        resumed = copy.deepcopy(model)
        train(model, optimizer, start=stop)
        resumed.zero_grad()
        again = steered(resumed)
        set_optimizer_state_dict(resumed, again, saved)
        train(resumed, again, start=stop)
        assert_equal(resumed, model)

    def test_bias_of_an_optimizer_without_state_joins_the_ramp(self):
        model = build()
        optimizer = pdecay.PSGD(model.parameters(), lr=0.05)
        target = SparsityTarget(optimizer, 0.9, STEPS)
        train(model, optimizer, 3)
        optimizer.param_groups[0]["decay_1d"] = True
        train(model, optimizer, start=3)
        assert target.sparsity == pytest.approx(0.9, abs=1e-3)
        assert not model[3].bias.any()

    def test_squares_beside_the_first_state_of_adagrad_are_loaded(self):
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
            set_optimizer_state_dict,
        )

        def adagrad(model):
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)  # has state before a step
            attach(optimizer, Lp(0.8, 1e-2))
            SparsityTarget(optimizer, 0.9, STEPS)
            return optimizer

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model = build()
        optimizer = adagrad(model)
        train(model, optimizer, 20)
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        resumed = copy.deepcopy(model)
        train(model, optimizer, start=20)
        again = adagrad(resumed)
        set_optimizer_state_dict(resumed, again, saved, options=options)
        train(resumed, again, start=20)
        assert_equal(resumed, model)

    @pytest.mark.parametrize("built_first", [True, False])
    def test_checkpoint_of_another_target_starts_the_ramp_anew(self, built_first):
        model = build()
        optimizer = padam(model)
        SparsityTarget(optimizer, 0.5, STEPS)
        train(model, optimizer)
        state = optimizer.state_dict()
        optimizer = padam(model)
        warns = pytest.warns(UserWarning, match=r"another target, 0.5; the ramp to 0.9 starts over")
        if built_first:
            target = SparsityTarget(optimizer, 0.9, STEPS)
            with warns:
                optimizer.load_state_dict(state)
        else:
            optimizer.load_state_dict(state)
            with warns as caught:
                target = SparsityTarget(optimizer, 0.9, STEPS)
            assert caught[0].filename == __file__
        assert target.last_step == 0
        train(model, optimizer)
        assert target.sparsity == pytest.approx(0.9, abs=0.002)
