"""The settings of attach: learning rates, groups, checkpoints, detach and wrong arguments."""

from __future__ import annotations

import copy
import io

import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import pdecay
from pdecay import Lp, attach

from .attaching import DECAY, LR, decayed, everything, sgd_step, weight, with_gradient


class TestLearningRate:
    def test_lr_may_be_a_tensor(self, exact, same):
        param = weight()
        with_gradient(param)
        expected = decayed(sgd_step(param), param, lr=float(torch.tensor(LR)))
        optimizer = SGD([param], lr=torch.tensor(LR))
        attach(optimizer, DECAY, **exact)
        optimizer.step()
        assert same(param.detach(), expected)
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)

    def test_scheduler_may_change_a_tensor_lr(self, exact, same):
        param = weight()
        optimizer = SGD([param], lr=torch.tensor(LR))
        attach(optimizer, DECAY, **exact)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        for lr in (torch.tensor(LR), torch.tensor(LR) / 2):
            with_gradient(param)
            expected = decayed(
                param.detach().add(param.grad, alpha=-lr.item()), param, lr=lr.item()
            )
            optimizer.step()
            scheduler.step()
            assert same(param.detach(), expected)

    @pytest.mark.parametrize(
        ("lr", "rate"),
        [
            (0.25, 0.25),
            (0, 0.0),
            (lambda group: group["lr"] * group["found"], 0.3),
            (lambda group: torch.tensor(0.5), 0.5),
        ],
        ids=["number", "zero", "function", "function that returns a tensor"],
    )
    def test_decay_may_have_its_own_lr(self, lr, rate, exact, same):
        param = weight()
        with_gradient(param)
        expected = decayed(sgd_step(param), param, lr=rate)
        optimizer = SGD([{"params": [param], "found": 3.0}], lr=LR)
        attach(optimizer, DECAY, lr=lr, **exact)
        optimizer.step()
        assert same(param.detach(), expected)

    @pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf"), "0.1", True])
    def test_invalid_lr_raises(self, bad, same):
        optimizer = SGD([weight()], lr=LR)
        before = everything(optimizer)
        with pytest.raises((TypeError, ValueError), match=rf"lr must be .*{bad}"):
            attach(optimizer, DECAY, lr=bad)
        assert same(everything(optimizer), before)

    @pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
    @pytest.mark.parametrize("where", ["group", "tensor", "function"])
    def test_lr_that_becomes_invalid_moves_no_weight(self, bad, where, exact, same):
        first, second = weight(seed=1), weight(seed=2)
        with_gradient(first, second)
        optimizer = SGD([{"params": [first]}, {"params": [second]}], lr=LR, momentum=0.9)
        function = (lambda group: group["own"]) if where == "function" else None
        for group in optimizer.param_groups:
            group["own"] = LR
        attach(optimizer, DECAY, lr=function, **exact)
        key = "own" if where == "function" else "lr"
        optimizer.param_groups[1][key] = torch.tensor(bad) if where == "tensor" else bad
        before = everything(optimizer)
        with pytest.raises(ValueError, match=rf"lr must be finite and >= 0, got {bad}"):
            optimizer.step()
        assert same(everything(optimizer), before)

    def test_lr_function_that_returns_none_raises(self, exact, same):
        param = weight()
        with_gradient(param)
        optimizer = SGD([param], lr=LR)
        attach(optimizer, DECAY, lr=lambda group: None, **exact)
        before = param.detach().clone()
        with pytest.raises(TypeError, match="function passed as lr must return a number, got None"):
            optimizer.step()
        assert same(param.detach(), before)

    def test_optimizer_without_lr_requires_one(self):
        optimizer = pytorch_optimizer.A2Grad([weight()])
        with pytest.raises(ValueError, match=r"A2Grad has no group\['lr'\].*pass lr="):
            attach(optimizer, DECAY)
        assert "decay" not in optimizer.param_groups[0]


class TestGroups:
    @pytest.mark.parametrize(
        ("key", "value", "rule"),
        [
            ("decay_1d", 1.0, "decay_1d must be True or False, got 1.0"),
            ("decay_scale", True, "decay_scale must be a number, got True"),
            ("decay_scale", torch.tensor(1.0), "decay_scale must be a number"),
            ("decay", [[0.8, True]], "lam must be a number, got True"),
            ("decay_lr", float("nan"), "decay_lr must be finite"),
        ],
    )
    def test_invalid_setting_raises_at_the_next_step(self, key, value, rule):
        param = weight()
        with_gradient(param)
        optimizer = SGD([{"params": [param], "decay": Lp(0.8, 1.0)}], lr=LR)
        attach(optimizer, DECAY)
        optimizer.step()
        before = param.detach().clone()
        optimizer.param_groups[0][key] = value
        with pytest.raises((TypeError, ValueError), match=rule):
            optimizer.step()
        assert torch.equal(param, before)

    def test_settings_are_plain_numbers(self):
        optimizer = SGD([weight()], lr=LR)
        attach(optimizer, Lp(0.8, 1e-3) + Lp(2, 2e-3))
        (group,) = optimizer.param_groups
        assert group["decay"] == [[0.8, 1e-3], [2.0, 2e-3]]
        assert group["decay_scale"] == 1.0
        assert group["decay_1d"] is False

    def test_own_decay_overrides_and_includes_vectors(self, exact, same):
        matrix, vector = weight(seed=1), weight(4, seed=2)
        with_gradient(matrix, vector)
        own = Lp(1, 0.25)
        expected = [decayed(sgd_step(matrix), matrix), decayed(sgd_step(vector), vector, own)]
        optimizer = SGD([{"params": [matrix]}, {"params": [vector], "decay": own}], lr=LR)
        attach(optimizer, DECAY, **exact)
        optimizer.step()
        assert same([matrix.detach(), vector.detach()], expected)

    @pytest.mark.parametrize("own", [DECAY, DECAY.pairs()], ids=["same object", "equal pairs"])
    def test_own_decay_includes_vectors_if_it_equals_the_default(self, own, exact, same):
        vector = weight(4)
        with_gradient(vector)
        expected = decayed(sgd_step(vector), vector)
        optimizer = SGD([{"params": [vector], "decay": own}], lr=LR)
        attach(optimizer, DECAY, **exact)
        optimizer.step()
        assert same([vector.detach()], [expected])

    @pytest.mark.parametrize("none", [None, []])
    def test_none_means_no_decay(self, none, exact, same):
        param = weight()
        with_gradient(param)
        expected = sgd_step(param)
        optimizer = SGD([{"params": [param], "decay": none}], lr=LR)
        attach(optimizer, DECAY, **exact)
        optimizer.step()
        assert same(param.detach(), expected)
        assert optimizer.param_groups[0]["decay"] == []

    def test_decay_may_be_none_for_all_groups(self, exact, same):
        param = weight()
        with_gradient(param)
        expected = sgd_step(param)
        optimizer = SGD([param], lr=LR)
        attach(optimizer, None, **exact)
        optimizer.step()
        assert same(param.detach(), expected)

    def test_scale_multiplies_every_lam(self, exact, same):
        param = weight()
        with_gradient(param)
        elastic = Lp(0.5, 0.25) + Lp(2, 0.5)
        expected = decayed(sgd_step(param), param, elastic, lr=LR * 3.0)
        optimizer = SGD([param], lr=LR)
        attach(optimizer, elastic, **exact)
        optimizer.param_groups[0]["decay_scale"] = 3.0
        optimizer.step()
        assert same(param.detach(), expected)

    @pytest.mark.parametrize("own", [{}, {"decay": Lp(1, 0.25)}, {"decay": None}])
    def test_group_added_later_decays(self, own, exact, same):
        optimizer = SGD([weight()], lr=LR)
        attach(optimizer, DECAY, **exact)
        param = weight(seed=5)
        with_gradient(param)
        decay = own.get("decay", DECAY)
        expected = decayed(sgd_step(param), param, decay) if decay else sgd_step(param)
        optimizer.add_param_group({"params": [param], **own})
        optimizer.step()
        assert same(param.detach(), expected)
        assert optimizer.param_groups[1]["decay"] == (decay.pairs() if decay else [])

    def test_group_added_later_is_in_the_checkpoint(self):
        optimizer = SGD([weight()], lr=LR)
        attach(optimizer, DECAY)
        optimizer.add_param_group({"params": [weight()]})
        saved = optimizer.state_dict()["param_groups"]
        assert [group["decay"] for group in saved] == [DECAY.pairs()] * 2

    @pytest.mark.parametrize("bad", ["strong", 0.1, [[0.8]], [[-1, 0.1]], [[1, float("nan")]]])
    def test_invalid_group_added_later_moves_no_weight(self, bad, exact, same):
        first, second = weight(seed=1), weight(seed=2)
        optimizer = SGD([first], lr=LR, momentum=0.9)
        attach(optimizer, DECAY, **exact)
        optimizer.add_param_group({"params": [second], "decay": bad})
        with_gradient(first, second)
        before = [first.detach().clone(), second.detach().clone()]
        with pytest.raises((TypeError, ValueError), match="must be"):
            optimizer.step()
        assert same([first.detach(), second.detach()], before)

    def test_unknown_keys_are_unchanged(self, exact):
        theirs = {"initial_lr": 0.5, "name": "head", "layers": [1, 2]}
        optimizer = SGD([{"params": [weight()], **theirs}], lr=LR)
        handle = attach(optimizer, DECAY, **exact)
        with_gradient(*optimizer.param_groups[0]["params"])
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert theirs.items() <= optimizer.param_groups[0].items()
        handle.detach()
        assert theirs.items() <= optimizer.param_groups[0].items()


class TestDetach:
    def test_restores_everything(self, exact, same):
        optimizer = AdamW([{"params": [weight()], "name": "a"}, {"params": [weight(4)]}], lr=LR)
        before = everything(optimizer)
        attach(optimizer, DECAY, **exact).detach()
        assert same(everything(optimizer), before)

    def test_restores_a_groups_own_decay(self, exact):
        optimizer = SGD([{"params": [weight()], "decay": DECAY}], lr=LR)
        before = dict(optimizer.param_groups[0])
        attach(optimizer, None, **exact).detach()
        after = optimizer.param_groups[0]
        assert after.keys() == before.keys()
        assert after["decay"] == DECAY or after["decay"] == DECAY.pairs()

    def test_second_detach_does_nothing(self, exact):
        optimizer = SGD([weight()], lr=LR)
        handle = attach(optimizer, DECAY, **exact)
        handle.detach()
        other = attach(optimizer, Lp(1, 0.25), **exact)
        handle.detach()
        assert optimizer.param_groups[0]["decay"] == [[1.0, 0.25]]
        other.detach()
        assert "decay" not in optimizer.param_groups[0]

    def test_attach_works_after_detach(self, exact, same):
        param = weight()
        with_gradient(param)
        optimizer = SGD([param], lr=LR)
        attach(optimizer, DECAY, **exact).detach()
        attach(optimizer, Lp(1, 0.25), **exact)
        expected = decayed(sgd_step(param), param, Lp(1, 0.25))
        optimizer.step()
        assert same(param.detach(), expected)

    def test_restores_groups_added_later(self, exact):
        optimizer = SGD([weight()], lr=LR)
        handle = attach(optimizer, DECAY, **exact)
        optimizer.add_param_group({"params": [weight()]})
        optimizer.state_dict()
        handle.detach()
        assert all(not any("decay" in k[:5] for k in group) for group in optimizer.param_groups)

    def test_restores_after_loading_a_checkpoint(self, exact, same):
        optimizer = SGD([weight()], lr=LR)
        before = everything(optimizer)
        handle = attach(optimizer, DECAY, **exact)
        optimizer.load_state_dict(optimizer.state_dict())
        handle.detach()
        assert same(everything(optimizer), before)


class TestBadInput:
    def test_second_attach_raises(self, exact, same):
        param = weight()
        with_gradient(param)
        optimizer = SGD([param], lr=LR)
        attach(optimizer, DECAY, **exact)
        before = everything(optimizer)
        with pytest.raises(ValueError, match=r"SGD already has p-norm weight decay.*detach\(\)"):
            attach(optimizer, Lp(1, 0.25), **exact)
        assert same(everything(optimizer), before)

    @pytest.mark.parametrize("cls", [pdecay.PAdam, pdecay.PSGD])
    def test_attach_to_padam_or_psgd_raises(self, cls, same):
        optimizer = cls([weight()], decay=DECAY)
        before = everything(optimizer)
        with pytest.raises(ValueError, match=f"{cls.__name__} already has p-norm weight decay"):
            attach(optimizer, DECAY)
        assert same(everything(optimizer), before)

    @pytest.mark.parametrize("thing", [None, "AdamW", AdamW, nn.Linear(2, 2), [weight()]])
    def test_non_optimizer_raises(self, thing):
        with pytest.raises(
            TypeError, match=f"needs a torch.optim.Optimizer, .*{type(thing).__name__}"
        ):
            attach(thing, DECAY)

    @pytest.mark.parametrize(
        "wrapper",
        ["Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "TRAC", "Magma", "SafeFP16Optimizer"],
    )
    def test_wrapper_is_unwrapped(self, wrapper):
        inner = Adam([weight()], lr=LR)
        outer = getattr(pytorch_optimizer, wrapper)(inner)
        assert attach(outer, DECAY).optimizer is inner
        assert not any(getattr(outer, "_optimizer_step_pre_hooks", {}))

    @pytest.mark.parametrize("name", ["SAM", "FriendlySAM"])
    def test_sam_decays_with_a_closure_and_in_two_steps(self, name):
        def trained(in_two_steps):
            param = nn.Parameter(torch.linspace(-1, 1, 24).reshape(4, 6))
            param.grad = torch.linspace(1, 2, 24).reshape(4, 6)
            sam = getattr(pytorch_optimizer, name)([param], base_optimizer=SGD, lr=LR)
            attach(sam, DECAY)
            target = pdecay.SparsityTarget(sam, 0.5, total_steps=4)
            for _ in range(4):
                gradient = param.grad.clone()

                def closure(gradient=gradient):
                    param.grad = gradient

                if in_two_steps:
                    sam.first_step()
                    closure()
                    sam.second_step()
                else:
                    sam.step(closure)
            assert target.last_step == 4
            assert target.sparsity == pytest.approx(0.5, abs=0.1)
            return param

        assert torch.equal(trained(in_two_steps=True), trained(in_two_steps=False))

    def test_sam_that_moves_weights_after_its_base_optimizer_raises(self):
        model = nn.Linear(4, 2)
        wsam = pytorch_optimizer.WSAM(model, model.parameters(), SGD, lr=LR)
        with pytest.raises(TypeError, match=r"WSAM with decouple=True.*use decouple=False"):
            attach(wsam, DECAY)
        assert "decay" not in wsam.param_groups[0]

    def test_unknown_wrapper_raises(self, same):
        class Wrapper(Optimizer):
            def __init__(self, base):
                self.base = base

        inner = Adam([weight()], lr=LR)
        before = everything(inner)
        with pytest.raises(TypeError, match=r"Wrapper wraps another optimizer.*inner"):
            attach(Wrapper(inner), DECAY)
        assert same(everything(inner), before)

    @pytest.mark.parametrize("bad", ["0.8", 0.8, {"p": 1}, [0.8, 1e-3], [[1, 2, 3]], Lp])
    def test_invalid_decay_raises(self, bad, same):
        optimizer = SGD([weight()], lr=LR)
        before = everything(optimizer)
        with pytest.raises(TypeError, match="a decay must be an Lp, a sum of Lp, None or") as error:
            attach(optimizer, bad)
        assert repr(bad) in str(error.value)
        assert same(everything(optimizer), before)

    def test_invalid_decay_of_last_group_changes_no_other(self, same):
        optimizer = SGD([{"params": [weight()]}, {"params": [weight()], "decay": "much"}], lr=LR)
        before = everything(optimizer)
        with pytest.raises(TypeError, match=r"a decay must be .*'much'"):
            attach(optimizer, DECAY)
        assert same(everything(optimizer), before)

    @pytest.mark.parametrize("scale", [-1.0, float("nan"), "1"])
    def test_invalid_scale_raises(self, scale, same):
        optimizer = SGD([{"params": [weight()], "decay_scale": scale}], lr=LR)
        with pytest.raises((TypeError, ValueError), match=rf"decay_scale must be .*{scale}"):
            attach(optimizer, DECAY)
        assert "decay" not in optimizer.param_groups[0]


class TestCheckpoint:
    def test_checkpoint_from_before_attach_keeps_settings(self, exact, same):
        saved = SGD([{"params": [weight(4)]}, {"params": [weight()]}], lr=0.5).state_dict()
        untouched = copy.deepcopy(saved)
        optimizer = SGD([{"params": [weight(4)], "decay": None}, {"params": [weight()]}], lr=LR)
        attach(optimizer, DECAY, **exact)
        optimizer.param_groups[1]["decay_scale"] = 2.0
        optimizer.load_state_dict(saved)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
        assert [group["decay"] for group in optimizer.param_groups] == [[], DECAY.pairs()]
        assert [group["decay_scale"] for group in optimizer.param_groups] == [1.0, 2.0]
        assert [group["decay_1d"] for group in optimizer.param_groups] == [True, False]
        assert same(saved, untouched)

    def test_checkpoint_from_before_attach_gives_added_group_the_default(self, exact):
        plain = SGD([weight()], lr=LR)
        plain.add_param_group({"params": [weight()]})
        optimizer = SGD([weight()], lr=LR)
        attach(optimizer, DECAY, **exact)
        optimizer.add_param_group({"params": [weight()]})
        optimizer.load_state_dict(plain.state_dict())
        assert [group["decay"] for group in optimizer.param_groups] == [DECAY.pairs()] * 2

    def test_settings_of_the_checkpoint_win(self, exact):
        saving, loading = SGD([weight()], lr=LR), SGD([weight()], lr=LR)
        attach(saving, Lp(0.5, 0.25) + Lp(2, 0.5), **exact)
        saving.param_groups[0]["decay_scale"] = 0.5
        file = io.BytesIO()
        torch.save(saving.state_dict(), file)
        file.seek(0)
        attach(loading, DECAY, **exact)
        loading.load_state_dict(torch.load(file, weights_only=True))
        group = loading.param_groups[0]
        assert (group["decay"], group["decay_scale"]) == ([[0.5, 0.25], [2.0, 0.5]], 0.5)

    def test_loads_into_a_plain_optimizer(self, exact):
        saving, loading = SGD([weight()], lr=LR), SGD([weight()], lr=0.5)
        attach(saving, DECAY, **exact)
        loading.load_state_dict(saving.state_dict())
        assert loading.param_groups[0]["lr"] == LR

    @pytest.mark.parametrize(
        ("key", "value", "rule"),
        [
            ("decay", "strong", "a decay must be .*'strong'"),
            ("decay", [[0.8, -0.1]], "lam must be finite and >= 0, got -0.1"),
            ("decay", [[float("nan"), 0.1]], "p must be finite and >= 0, got nan"),
            ("decay", [[-1.0, 0.1]], "p must be finite and >= 0, got -1.0"),
            ("decay", [[0.8]], "a decay must be"),
            ("decay", [["0.8", 0.1]], "p must be a number, got '0.8'"),
            ("decay_scale", -1.0, "decay_scale must be finite and >= 0, got -1.0"),
            ("decay_scale", None, "decay_scale must be a number, got None"),
            ("decay_1d", "yes", "decay_1d must be .*'yes'"),
        ],
    )
    def test_invalid_checkpoint_changes_nothing(self, key, value, rule, exact, same):
        optimizer = AdamW([{"params": [weight(seed=1)]}, {"params": [weight(seed=2)]}], lr=LR)
        attach(optimizer, DECAY, **exact)
        for group in optimizer.param_groups:
            with_gradient(*group["params"])
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][1][key] = value
        saved["param_groups"][0]["lr"] = 0.5
        saved["state"][0]["exp_avg"] += 1
        before, untouched = everything(optimizer), copy.deepcopy(saved)
        with pytest.raises((TypeError, ValueError), match=rf"checkpoint.*group 1: .*{rule}"):
            optimizer.load_state_dict(saved)
        assert same(everything(optimizer), before)
        assert same(saved, untouched)

    def test_checkpoint_with_other_groups_raises_torchs_error(self, exact, same):
        optimizer = SGD([weight()], lr=LR)
        attach(optimizer, DECAY, **exact)
        before = everything(optimizer)
        other = SGD([{"params": [weight()]}, {"params": [weight()]}], lr=LR)
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict(other.state_dict())
        assert same(everything(optimizer), before)


class TestFrozenWarning:
    def test_warning_names_a_zero_tensor_once(self):
        zero = nn.Parameter(torch.zeros(3, 4))
        optimizer = SGD([("good", weight()), ("lora_b", zero)], lr=LR)
        with pytest.warns(UserWarning, match=r"all zero and would never.*: lora_b\.") as caught:
            handle = attach(optimizer, DECAY)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        handle.detach()
        attach(optimizer, DECAY)  # warnings are errors in the tests

    @pytest.mark.parametrize("harmless", [Lp(2, 0.1), Lp(3, 0.1), Lp(0.8, 0.0), None])
    def test_no_warning_if_nothing_freezes(self, harmless):
        attach(SGD([nn.Parameter(torch.zeros(3, 4))], lr=LR), harmless)

    def test_no_warning_for_excluded_tensors(self):
        zeros = [nn.Parameter(torch.zeros(s)) for s in [(4,), (2, 2), (0, 2)]]
        fixed = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        groups = [
            {"params": [zeros[0], zeros[2], fixed, weight()]},
            {"params": [zeros[1]], "decay": None},
        ]
        attach(SGD(groups, lr=LR), DECAY)
