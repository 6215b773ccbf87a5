"""Tests of the arguments of PAdam and PSGD: errors and warnings."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import pdecay
from pdecay import PSGD, Lp, PAdam
from tests.optim.stepping import (
    BOTH,
    DECAY,
    PATHS,
    everything,
    parameters,
    set_gradients,
    steps,
)


class TestBadInput:
    @BOTH
    @pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
    @pytest.mark.parametrize("as_tensor", [False, True])
    def test_invalid_lr_raises(self, cls, bad, as_tensor):
        with pytest.raises(ValueError, match=rf"lr must be finite and >= 0, got {bad}"):
            cls(parameters(), lr=torch.tensor(bad) if as_tensor else bad)

    @BOTH
    @pytest.mark.parametrize("bad", ["0.1", None, [0.1], True])
    def test_non_numeric_lr_raises(self, cls, bad):
        with pytest.raises(TypeError, match="lr must be a number") as error:
            cls(parameters(), lr=bad)
        assert repr(bad) in str(error.value)

    @BOTH
    @PATHS
    @pytest.mark.parametrize("bad", [-0.1, float("nan")])
    def test_invalid_lr_of_one_group_moves_no_weight(self, cls, foreach, bad, same):
        a, _, c, _ = parameters()
        groups = [{"params": [a]}, {"params": [c]}]
        optimizer = cls(groups, lr=0.05, decay=DECAY, foreach=foreach)
        steps(optimizer, 1)
        optimizer.param_groups[1]["lr"] = bad
        set_gradients([a, c], 1)
        before = everything(optimizer)
        with pytest.raises(ValueError, match=rf"lr must be finite and >= 0, got {bad}"):
            optimizer.step()
        assert same(everything(optimizer), before)

    @BOTH
    def test_invalid_lr_of_a_new_group_raises(self, cls):
        a, _, c, _ = parameters()
        with pytest.raises(ValueError, match=r"lr must be finite and >= 0, got -0\.1"):
            cls([{"params": [a]}, {"params": [c], "lr": -0.1}])
        optimizer = cls([a])
        with pytest.raises(TypeError, match="lr must be a number, got 'fast'"):
            optimizer.add_param_group({"params": [c], "lr": "fast"})
        assert len(optimizer.param_groups) == 1

    @PATHS
    @pytest.mark.parametrize(
        ("name", "bad", "message"),
        [
            ("metric", "size", 'metric must be "magnitude" or "adaptive", got \'size\''),
            ("metric_mean", -1.0, "metric_mean must be finite and >= 0, got -1.0"),
            ("decay_1d", "no", "decay_1d must be True or False, got 'no'"),
        ],
    )
    def test_decay_setting_that_became_invalid_moves_no_weight(
        self, foreach, name, bad, message, same
    ):
        optimizer = PAdam(parameters(), lr=0.05, decay=DECAY, foreach=foreach)
        steps(optimizer, 2)
        optimizer.param_groups[0][name] = bad
        before = everything(optimizer)
        with pytest.raises((TypeError, ValueError), match=message):
            steps(optimizer, 1)
        assert same(everything(optimizer), before)

    def test_slow_auxiliary_variable_under_the_adaptive_metric_moves_no_weight(self, same):
        optimizer = PAdam(parameters(), lr=0.05, decay=DECAY, metric="adaptive")
        steps(optimizer, 2)
        optimizer.param_groups[0]["decay_auxiliary"] = [1, 0.1, 1.0]
        before = everything(optimizer)
        with pytest.raises(ValueError, match="supports no slow auxiliary variable"):
            steps(optimizer, 1)
        assert same(everything(optimizer), before)

    @BOTH
    @PATHS
    @pytest.mark.parametrize("name", ["found_inf", "grad_scale"])
    def test_attributes_of_a_scaler_raise(self, cls, foreach, name, same):
        optimizer = cls(parameters(), lr=0.05, decay=DECAY, foreach=foreach)
        steps(optimizer, 1)
        before = everything(optimizer)
        setattr(optimizer, name, torch.tensor(1.0))
        with pytest.raises(RuntimeError, match=f"{name} is set.*GradScaler.step"):
            steps(optimizer, 1)
        assert same(everything(optimizer), before)

    @pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf"), float("-inf")])
    def test_invalid_p_and_lam_raise(self, bad):
        with pytest.raises(ValueError, match=rf"p must be finite and >= 0, got {bad}"):
            Lp(bad, 0.1)
        with pytest.raises(ValueError, match=rf"lam must be finite and >= 0, got {bad}"):
            Lp(0.8, bad)

    @BOTH
    @pytest.mark.parametrize("bad", ["0.8", 0.8, {"p": 1}, [0.8, 1e-3], Lp, [[1, 2, 3]]])
    def test_invalid_decay_raises(self, cls, bad):
        with pytest.raises(TypeError, match="a decay must be an Lp, a sum of Lp, None or") as error:
            cls(parameters(), decay=bad)
        assert repr(bad) in str(error.value)

    @BOTH
    @pytest.mark.parametrize("bad", [0.8, "0.8"])
    def test_invalid_decay_of_a_group_raises(self, cls, bad):
        with pytest.raises(TypeError, match="a decay must be") as error:
            cls([{"params": parameters(), "decay": bad}])
        assert repr(bad) in str(error.value)

    @BOTH
    @pytest.mark.parametrize("bad", [-1.0, float("nan"), "1"])
    def test_invalid_scale_of_a_group_raises(self, cls, bad):
        with pytest.raises((TypeError, ValueError), match=f"decay_scale must be .*{bad}"):
            cls([{"params": parameters(), "decay_scale": bad}])

    @BOTH
    @pytest.mark.parametrize("nothing", [[], iter(())])
    def test_no_parameters_raises(self, cls, nothing):
        with pytest.raises(ValueError, match="nothing to optimize: the parameter list is empty"):
            cls(nothing)

    @BOTH
    @pytest.mark.parametrize("not_a_list", [torch.zeros(3, 3), {"a": 1}], ids=["tensor", "dict"])
    def test_non_list_parameters_raise(self, cls, not_a_list):
        with pytest.raises(TypeError, match="params"):
            cls(not_a_list)

    @BOTH
    def test_unordered_parameters_raise(self, cls):
        """As in torch: checkpoints rely on the order."""
        with pytest.raises(TypeError, match="ordered"):
            cls([{"params": set(parameters())}])

    @pytest.mark.parametrize(
        ("cls", "flag", "bad"),
        [
            (PAdam, "betas", (1.0, 0.9)),
            (PAdam, "eps", -1e-8),
            (PAdam, "weight_decay", -0.1),
            (PAdam, "weight_decay", float("nan")),
            (PSGD, "momentum", -0.9),
            (PSGD, "momentum", float("nan")),
            (PSGD, "weight_decay", -0.1),
            (PSGD, "weight_decay", float("nan")),
        ],
    )
    def test_invalid_flags_raise(self, cls, flag, bad):
        with pytest.raises(ValueError, match="beta" if flag == "betas" else f"{flag}|epsilon"):
            cls(parameters(), **{flag: bad})

    def test_nesterov_without_momentum_raises(self):
        with pytest.raises(ValueError, match="Nesterov momentum requires a momentum"):
            PSGD(parameters(), nesterov=True)

    @BOTH
    def test_unknown_flag_raises(self, cls):
        with pytest.raises(TypeError, match="lambda_p"):
            cls(parameters(), lambda_p=0.1)


class TestFrozenWarning:
    @BOTH
    def test_warning_names_a_zero_tensor_once(self, cls):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        nn.init.zeros_(model[1].weight)
        with pytest.warns(
            UserWarning, match=r"all zero and would never change.*: 1\.weight\."
        ) as caught:
            cls(model.named_parameters(), decay=DECAY)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        cls(model.named_parameters(), decay=DECAY)  # warnings are errors in the tests
        pdecay.attach(SGD(model.parameters(), lr=0.1), DECAY)

    @BOTH
    def test_warning_locates_an_unnamed_tensor(self, cls):
        zero = nn.Parameter(torch.zeros(2, 3))
        with pytest.warns(UserWarning, match=r"parameter 1 of group 1 \(2x3\)"):
            cls([{"params": parameters()}, {"params": [parameters()[0], zero]}], decay=DECAY)

    @BOTH
    def test_warns_for_groups_added_later(self, cls):
        optimizer = cls([("w", parameters()[0])], decay=DECAY)
        with pytest.warns(UserWarning, match=r"all zero.*lora_b"):
            optimizer.add_param_group({"params": [("lora_b", nn.Parameter(torch.zeros(2, 3)))]})

    @BOTH
    @pytest.mark.parametrize("harmless", [Lp(2, 0.1), Lp(3, 0.1), Lp(0.8, 0.0), None])
    def test_no_warning_if_nothing_freezes(self, cls, harmless):
        cls([nn.Parameter(torch.zeros(2, 3))], decay=harmless)


def test_float16_weights_are_reported():
    weight = torch.nn.Parameter(torch.randn(4, 4).half())
    with pytest.warns(UserWarning, match=r"1 parameters are float16, and eps = 1e-08\. .*are zero"):
        PAdam([weight])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PAdam([weight], eps=1e-6)
        PAdam([torch.nn.Parameter(torch.randn(4, 4).bfloat16())])


class TestFlags:
    @pytest.mark.parametrize("value", ["yes", "no", 1, 0.0])
    @pytest.mark.parametrize(
        ("cls", "name"),
        [
            *((PAdam, name) for name in ("amsgrad", "capturable")),
            *((PSGD, name) for name in ("nesterov",)),
            *(
                (cls, name)
                for cls in (PAdam, PSGD)
                for name in ("maximize", "foreach", "fused", "stochastic_rounding")
            ),
        ],
    )
    def test_other_values_than_bool_raise(self, cls, name, value):
        momentum = {"momentum": 0.9} if cls is PSGD else {}
        expected = "True, False or None" if name in ("foreach", "fused") else "True or False"
        message = f"{name} must be {expected}, got {value!r}"
        with pytest.raises(TypeError, match=message):
            cls(parameters(), **momentum, **{name: value})
        with pytest.raises(TypeError, match=message):
            cls([{"params": parameters(), name: value}], **momentum)

    @pytest.mark.parametrize("name", ["foreach", "fused"])
    def test_none_is_the_default(self, name):
        for cls in (PAdam, PSGD):
            cls(parameters(), **{name: None})

    def test_attach_and_functions_raise(self):
        with pytest.raises(TypeError, match="fused must be True, False or None, got 'yes'"):
            pdecay.attach(AdamW(parameters()), DECAY, fused="yes")
        w, g = torch.ones(2, 2), torch.ones(2, 2)
        for flags in ({"fused": "yes"}, {"nesterov": "no"}):
            with pytest.raises(TypeError, match="must be True"):
                pdecay.functional.psgd([w], [g], [], decay=DECAY, lr=0.1, **flags)


class TestSettingsChangedBetweenSteps:
    @pytest.mark.parametrize(
        ("cls", "name", "value", "message"),
        [
            *(
                (cls, *rest)
                for cls in (PAdam, PSGD)
                for rest in (
                    ("decay", 3, "got 3"),
                    ("decay", [[1, -1]], "lam must be finite and >= 0, got -1"),
                    ("decay_auxiliary", [0, 1.0, 1.0], "n must be a whole number >= 1, got 0"),
                    ("weight_decay", "a", "weight_decay must be a number, got 'a'"),
                    ("maximize", "a", "maximize must be True or False, got 'a'"),
                )
            ),
            (PAdam, "betas", 3, "betas must be two numbers"),
            (PAdam, "betas", (0.9, 1.0), "at index 1: 1.0, must be below 1"),
            (PAdam, "betas", ("a", 0.9), r"betas\[0\] must be a number, got 'a'"),
            (PAdam, "eps", None, "eps must be a number, got None"),
            (PSGD, "momentum", float("nan"), "momentum must be finite and >= 0, got nan"),
            (PSGD, "dampening", "a", "dampening must be a number, got 'a'"),
        ],
    )
    def test_error_comes_before_any_weight_changes(self, cls, name, value, message):
        params = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
        momentum = {"momentum": 0.9} if cls is PSGD else {}
        optimizer = cls([{"params": [param]} for param in params], lr=0.1, **momentum)
        for param in params:
            param.grad = torch.ones(2, 2)
        optimizer.step()
        before = [param.detach().clone() for param in params]
        optimizer.param_groups[1][name] = value
        with pytest.raises((TypeError, ValueError), match=message):
            optimizer.step()
        assert all(map(torch.equal, before, params))

    def test_values_that_change_in_place_are_checked_at_each_step(self):
        weight_decay, betas = torch.tensor(0.1), [0.9, 0.99]
        optimizer = PAdam(parameters(), weight_decay=weight_decay)
        for group in optimizer.param_groups:
            group["betas"] = betas
            set_gradients(group["params"], 0)
        optimizer.step()
        betas[1] = 2.0
        with pytest.raises(ValueError, match=r"at index 1: 2\.0, must be below 1"):
            optimizer.step()
        betas[1] = 0.99
        weight_decay.fill_(-1.0)
        with pytest.raises(ValueError, match=r"weight_decay must be finite and >= 0, got -1\.0"):
            optimizer.step()
