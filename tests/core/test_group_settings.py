from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pdecay import Every, Lp, Slow
from pdecay._core.group_settings import (
    DECAY_KEYS,
    Defaults,
    complete_checkpoint,
    decayed_params,
    groups_with_settings,
    penalty_of,
    scale_of,
    write_settings,
)
from pdecay._core.penalty import Sum

ELASTIC = Lp(0.8, 0.1) + Lp(2, 0.2)
PLAIN = {
    "decay": [[0.8, 0.1], [2.0, 0.2]],
    "decay_scale": 1.0,
    "decay_lr": None,
    "decay_1d": False,
    "decay_auxiliary": [],
}


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (2, 3)))


def written(group, penalty=None, auxiliary=()):
    write_settings(group, Defaults(penalty, list(auxiliary)))
    return group


class TestWrite:
    def test_group_without_decay_gets_the_default(self):
        assert written({"lr": 0.1}, ELASTIC) == {"lr": 0.1, **PLAIN}

    def test_writes_all_keys(self):
        assert written({}).keys() == set(DECAY_KEYS)

    def test_no_default_means_no_decay(self):
        assert written({})["decay"] == []

    @pytest.mark.parametrize(
        ("own", "plain"),
        [
            (Lp(1, 1), [[1.0, 1.0]]),
            (ELASTIC, PLAIN["decay"]),
            ([[1, 1]], [[1.0, 1.0]]),
            (((1, 1), (2, 0)), [[1.0, 1.0], [2.0, 0.0]]),
            ([], []),
            (None, []),
        ],
    )
    def test_own_decay_becomes_plain_numbers(self, own, plain):
        group = written({"decay": own}, Lp(3, 3))
        assert group["decay"] == plain
        assert all(type(number) is float for pair in group["decay"] for number in pair)

    def test_vectors_decay_only_with_own_decay(self):
        assert written({}, ELASTIC)["decay_1d"] is False
        assert written({"decay": ELASTIC})["decay_1d"] is True
        assert written({"decay_1d": True}, ELASTIC)["decay_1d"] is True
        assert written({"decay": ELASTIC, "decay_1d": False})["decay_1d"] is False

    def test_writing_is_idempotent(self):
        once = written({"lr": 0.1}, ELASTIC)
        assert written(dict(once), Lp(3, 3), Every(2).plain()) == once

    def test_auxiliary_becomes_plain_numbers(self):
        assert written({}, ELASTIC, Every(3).plain())["decay_auxiliary"] == [3, 1.0, 1.0]
        own = written({"decay_auxiliary": Slow(0.5)}, ELASTIC, Every(3).plain())
        assert own["decay_auxiliary"] == [1, 0.5, 1.0]
        assert written({"decay_auxiliary": None}, ELASTIC, [3, 1.0, 1.0])["decay_auxiliary"] == []

    @pytest.mark.parametrize(
        ("bad", "error", "message"),
        [
            ({"decay": "a lot"}, TypeError, "'a lot'"),
            ({"decay": 0.8}, TypeError, "0.8"),
            ({"decay": [[1, -1]]}, ValueError, "lam must be finite and >= 0, got -1"),
            ({"decay": [[float("nan"), 1]]}, ValueError, "p must be finite and >= 0, got nan"),
            ({"decay_scale": -0.5}, ValueError, "decay_scale must be finite and >= 0, got -0.5"),
            ({"decay_scale": "1"}, TypeError, "decay_scale must be a number, got '1'"),
            ({"params": [1], "decay_scale": [1, -1]}, ValueError, "must have one number for each"),
            ({"params": [1], "decay_scale": [-1]}, ValueError, "decay_scale must be .* got -1"),
            ({"decay_lr": -0.5}, ValueError, "decay_lr must be finite and >= 0, got -0.5"),
            ({"decay_lr": float("nan")}, ValueError, "decay_lr must be finite and >= 0, got nan"),
            (
                {"decay_auxiliary": [0, 1.0, 1.0]},
                ValueError,
                "n must be a whole number >= 1, got 0",
            ),
            ({"decay_auxiliary": "slow"}, TypeError, "auxiliary must be .*'slow'"),
            ({"decay_1d": "no"}, TypeError, "decay_1d must be True or False, got 'no'"),
        ],
        ids=str,
    )
    def test_invalid_value_leaves_group_unchanged(self, bad, error, message):
        group = {"decay": ELASTIC, "lr": 0.1, **bad}
        before = dict(group)
        with pytest.raises(error, match=message):
            written(group, ELASTIC)
        assert group == before
        assert list(group) == list(before)


class TestWithSettings:
    @pytest.mark.parametrize("given", ["list", "generator", "groups", "one tensor in a group"])
    def test_accepts_parameters_in_any_form(self, given):
        a, b = weight(), weight(3)
        forms = {
            "list": ([a, b], [[a, b]]),
            "generator": (iter([a, b]), [[a, b]]),
            "groups": ([{"params": [a]}, {"params": iter([b])}], [[a], [b]]),
            "one tensor in a group": ([{"params": a}], [[a]]),
        }
        params, expected = forms[given]
        groups = groups_with_settings(params, Defaults(ELASTIC))
        assert len(groups) == len(expected)
        for group, members in zip(groups, expected, strict=True):
            assert all(x is y for x, y in zip(group["params"], members, strict=True))
            assert {k: v for k, v in group.items() if k != "params"} == PLAIN

    def test_accepts_named_parameters(self):
        a = weight()
        (group,) = groups_with_settings([("a", a)], Defaults(ELASTIC))
        assert group["params"] == [("a", a)]

    def test_does_not_change_its_input(self):
        given = [{"params": [weight()], "decay": ELASTIC, "name": "head"}]
        before = dict(given[0])
        (group,) = groups_with_settings(given, Defaults(None))
        assert given[0] == before
        assert group["name"] == "head"

    @pytest.mark.parametrize("nothing", [[], iter(())])
    def test_no_parameters_raises(self, nothing):
        with pytest.raises(ValueError, match="nothing to optimize: the parameter list is empty"):
            groups_with_settings(nothing, Defaults(ELASTIC))

    def test_one_empty_group_is_allowed(self):
        groups = [{"params": []}, {"params": [weight()]}]
        assert len(groups_with_settings(groups, Defaults(ELASTIC))) == 2


class TestPenaltyOf:
    def test_restores_the_penalty(self):
        penalty = penalty_of(dict(PLAIN))
        assert isinstance(penalty, Sum)
        assert penalty.terms == ELASTIC.terms

    def test_is_none_without_decay(self):
        assert penalty_of({**PLAIN, "decay": []}) is None


class TestScaleOf:
    @pytest.mark.parametrize(
        ("shape", "by_default"), [((), 0.0), ((3,), 0.0), ((2, 3), 0.5), ((2, 3, 1, 1), 0.5)]
    )
    def test_is_zero_for_excluded_parameters(self, shape, by_default):
        param = nn.Parameter(torch.ones(shape))
        group = {**PLAIN, "decay_scale": 0.5}
        assert scale_of(param, 0, group) == by_default
        assert scale_of(param, 0, {**group, "decay_1d": True}) == 0.5
        assert scale_of(param, 0, {**group, "decay_1d": True, "decay": []}) == 0.0

    def test_may_differ_between_parameters(self):
        group = {**PLAIN, "params": [weight(), weight(3)], "decay_scale": [0.25, 0.75]}
        assert scale_of(group["params"][0], 0, group) == 0.25
        assert scale_of(group["params"][1], 1, group) == 0.0
        assert scale_of(group["params"][1], 1, {**group, "decay_1d": True}) == 0.75

    def test_lazy_parameters_decay(self):
        lazy = nn.LazyLinear(3).weight
        assert scale_of(lazy, 0, PLAIN) == 1.0
        assert scale_of(lazy, 0, {**PLAIN, "decay": []}) == 0.0


@pytest.mark.parametrize("scale", [1.0, 0.0, [0.0, 0.5, 1.0]])
def test_decayed_params_ignore_the_scale(scale):
    matrix, bias, kernel = weight(), weight(3), weight(2, 3, 1, 1)
    group = {**PLAIN, "params": [matrix, bias, kernel], "decay_scale": scale}
    assert [id(param) for param in decayed_params(group)] == [id(matrix), id(kernel)]
    assert len(decayed_params({**group, "decay_1d": True})) == 3
    assert decayed_params({**group, "decay": []}) == []


class TestCompleted:
    def checkpoint(self, *groups):
        return {"state": {0: {"step": 1}}, "param_groups": [{"params": [0], **g} for g in groups]}

    def test_adds_missing_settings(self):
        current = {"params": [0], **PLAIN, "decay_scale": 0.5, "lr": 0.1}
        saved = self.checkpoint({"lr": 0.2, "name": "head"})
        before = copy.deepcopy(saved)
        (group,) = complete_checkpoint(saved, [current])["param_groups"]
        assert group == {"params": [0], **PLAIN, "decay_scale": 0.5, "lr": 0.2, "name": "head"}
        assert saved == before

    def test_settings_of_the_checkpoint_win(self):
        own = {**PLAIN, "decay": [[1.0, 0.5]], "decay_scale": 0.25, "decay_1d": True}
        completed = complete_checkpoint(self.checkpoint(own), [{"params": [0], **PLAIN}])
        assert completed["param_groups"] == [{"params": [0], **own}]

    def test_keeps_other_keys(self):
        saved = {**self.checkpoint(PLAIN), "version": 3}
        completed = complete_checkpoint(saved, [{"params": [0], **PLAIN}])
        assert completed["version"] == 3
        assert completed["state"] is saved["state"]

    def test_error_names_the_invalid_group(self):
        saved = self.checkpoint(PLAIN, {**PLAIN, "decay": [[-1.0, 0.1]]})
        before = copy.deepcopy(saved)
        rule = "p must be finite and >= 0, got -1.0"
        with pytest.raises(ValueError, match=f"invalid decay setting in parameter group 1.*{rule}"):
            complete_checkpoint(saved, [{"params": [0], **PLAIN}] * 2)
        assert saved == before

    def test_different_number_of_groups_is_left_to_torch(self):
        saved = self.checkpoint(PLAIN, PLAIN)
        assert complete_checkpoint(saved, [{"params": [0], **PLAIN}]) is saved
