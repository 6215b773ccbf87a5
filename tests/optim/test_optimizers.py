from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import pdecay
from pdecay import PSGD, Lp, PAdam
from tests.optim.stepping import (
    BOTH,
    DECAY,
    PATHS,
    SHAPES,
    everything,
    parameters,
    steps,
)

ELASTIC = Lp(0.5, 0.1) + Lp(2, 0.3)


def weights_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


def through_a_file(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class TestEqualsAttach:
    """Weights and state are bit-identical for every flag, with torch's own operations."""

    ADAM_FLAGS = (
        {},
        {"amsgrad": True},
        {"maximize": True},
        {"weight_decay": 0.1},
        {"betas": (0.8, 0.9), "eps": 1e-3},
        {"amsgrad": True, "maximize": True, "weight_decay": 0.1},
    )
    SGD_FLAGS = (
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1},
        {"maximize": True},
        {"momentum": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.1},
    )
    CASES = (
        *(pytest.param(PAdam, AdamW, flags, id=f"PAdam-{flags}") for flags in ADAM_FLAGS),
        *(pytest.param(PSGD, SGD, flags, id=f"PSGD-{flags}") for flags in SGD_FLAGS),
    )

    def compare(self, ours, theirs, same, n=8):
        for t in range(n):
            steps(ours, 1, start=t)
            steps(theirs, 1, start=t)
            assert same(weights_of(ours), weights_of(theirs)), f"differs after step {t}"
        assert same(ours.state_dict()["state"], theirs.state_dict()["state"])

    def pair(self, cls, plain, exact, decay=DECAY, params=parameters, **flags):
        plain_flags = {"weight_decay": 0.0, **flags}
        ours = cls(params(), decay=decay, **exact, **flags)
        theirs = plain(params(), **plain_flags)
        pdecay.attach(theirs, decay, **exact)
        return ours, theirs

    @PATHS
    @pytest.mark.parametrize("decay", [DECAY, ELASTIC, Lp(0, 0.01), Lp(1, 0.2), Lp(3, 1.0), None])
    @pytest.mark.parametrize(("cls", "plain", "flags"), CASES)
    def test_with_every_flag(self, cls, plain, flags, decay, foreach, exact, same):
        ours, theirs = self.pair(cls, plain, exact, decay, lr=0.05, foreach=foreach, **flags)
        self.compare(ours, theirs, same)

    @PATHS
    @pytest.mark.parametrize(
        "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64]
    )
    @pytest.mark.parametrize(("cls", "plain"), [(PAdam, AdamW), (PSGD, SGD)])
    def test_with_other_dtypes(self, cls, plain, dtype, foreach, exact, same):
        ours, theirs = self.pair(
            cls, plain, exact, params=lambda: parameters(dtype), lr=0.05, foreach=foreach
        )
        self.compare(ours, theirs, same)
        undecayed = plain(parameters(dtype), lr=0.05, weight_decay=0.0, foreach=foreach)
        steps(undecayed, 8)
        assert not same(weights_of(ours), weights_of(undecayed))

    @PATHS
    @pytest.mark.parametrize(("cls", "plain"), [(PAdam, AdamW), (PSGD, SGD)])
    def test_with_mixed_dtypes(self, cls, plain, foreach, exact, same):
        def params():
            return [*parameters(), *parameters(torch.bfloat16), *parameters(torch.float64)]

        self.compare(*self.pair(cls, plain, exact, params=params, lr=0.05, foreach=foreach), same)

    @PATHS
    @pytest.mark.parametrize(("cls", "plain"), [(PAdam, AdamW), (PSGD, SGD)])
    def test_with_empty_tensors(self, cls, plain, foreach, exact, same):
        def params():
            return [nn.Parameter(torch.empty(0, 3)), *parameters()]

        self.compare(*self.pair(cls, plain, exact, params=params, lr=0.05, foreach=foreach), same)

    @PATHS
    @pytest.mark.parametrize(("cls", "plain"), [(PAdam, AdamW), (PSGD, SGD)])
    def test_with_tensor_learning_rate(self, cls, plain, foreach, exact, same):
        if cls is PAdam and foreach:
            with pytest.raises(ValueError, match="lr as a Tensor is not supported"):
                PAdam(parameters(), lr=torch.tensor(0.05), foreach=True)
            return
        self.compare(*self.pair(cls, plain, exact, lr=torch.tensor(0.05), foreach=foreach), same)

    @pytest.mark.parametrize(("cls", "plain"), [(PAdam, AdamW), (PSGD, SGD)])
    def test_with_sparse_gradients_if_torch_supports_them(self, cls, plain, exact, same):
        ours, theirs = self.pair(cls, plain, exact, lr=0.05, foreach=False)
        for optimizer in (ours, theirs):
            (table, *_) = optimizer.param_groups[0]["params"]
            nn.functional.embedding(torch.tensor([0, 2]), table, sparse=True).sum().backward()
        if cls is PAdam:
            before = [weight.clone() for weight in weights_of(ours)]
            with pytest.raises(RuntimeError, match="sparse"):
                ours.step()
            assert same(weights_of(ours), before)
            return
        ours.step()
        theirs.step()
        assert same(weights_of(ours), weights_of(theirs))

    @pytest.mark.parametrize(("cls", "plain"), [(PAdam, AdamW), (PSGD, SGD)])
    def test_with_named_parameters(self, cls, plain, exact, same):
        def params():
            return [(f"layer.{i}", param) for i, param in enumerate(parameters())]

        ours, theirs = self.pair(cls, plain, exact, params=params, lr=0.05, foreach=False)
        assert ours.param_groups[0]["param_names"] == [f"layer.{i}" for i in range(len(SHAPES))]
        self.compare(ours, theirs, same)

    @PATHS
    @pytest.mark.parametrize(("cls", "plain"), [(PAdam, AdamW), (PSGD, SGD)])
    def test_with_a_closure_and_missing_gradients(self, cls, plain, foreach, exact, same):
        ours, theirs = self.pair(cls, plain, exact, lr=0.05, foreach=foreach)
        start = [weight.clone() for weight in weights_of(ours)]
        losses = []
        for optimizer in (ours, theirs):
            first, bias, _, last = optimizer.param_groups[0]["params"]

            def closure(optimizer=optimizer, used=(first, bias, last)):
                optimizer.zero_grad()
                loss = sum((param**2).sum() for param in used)
                loss.backward()
                return loss

            losses.append([optimizer.step(closure).item() for _ in range(3)])
        assert losses[0] == losses[1]
        assert same(weights_of(ours), weights_of(theirs))
        assert same(weights_of(ours)[2], start[2])  # no gradient, no decay

    def test_capturable_is_passed_to_torch(self, exact, same):
        ours, theirs = self.pair(PAdam, AdamW, exact, lr=0.05, capturable=True, foreach=False)
        assert ours.param_groups[0]["capturable"] is True
        try:
            steps(theirs, 1)
        except AssertionError as refusal:
            pytest.skip(f"torch refuses capturable on the CPU: {refusal}")
        steps(ours, 1)
        self.compare(ours, theirs, same)

    @pytest.mark.parametrize("fused", [None, False])
    def test_foreach_equals_the_for_loop(self, fused):
        """Equal up to rounding: torch's own two implementations differ in the last bits."""
        for cls in (PAdam, PSGD):
            one = cls(parameters(), lr=0.05, decay=ELASTIC, foreach=False)
            other = cls(parameters(), lr=0.05, decay=ELASTIC, foreach=True, fused=fused)
            steps(one, 8)
            steps(other, 8)
            for a, b in zip(weights_of(one), weights_of(other), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


class TestCopies:
    @BOTH
    @PATHS
    @pytest.mark.parametrize(
        "copied",
        [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))],
        ids=["deepcopy", "pickle"],
    )
    def test_copies_keep_decaying(self, cls, foreach, copied, same):
        optimizer = cls(parameters(), lr=0.05, decay=ELASTIC, foreach=foreach)
        optimizer.param_groups[0]["decay_scale"] = 0.5
        steps(optimizer, 3)
        twin = copied(optimizer)
        assert same(weights_of(twin), weights_of(optimizer))
        steps(optimizer, 3, start=3)
        steps(twin, 3, start=3)
        assert same(weights_of(twin), weights_of(optimizer))
        assert same(everything(twin), everything(optimizer))

    @BOTH
    def test_new_groups_of_copies_get_the_default(self, cls):
        twin = copy.deepcopy(cls(parameters(), decay=ELASTIC))
        twin.add_param_group({"params": parameters()})
        assert twin.param_groups[1]["decay"] == ELASTIC.pairs()
        with pytest.raises(ValueError, match="already has p-norm weight decay"):
            pdecay.attach(twin, DECAY)


class TestCheckpoint:
    @BOTH
    @PATHS
    def test_has_settings_and_loads_with_weights_only(self, cls, foreach, same):
        optimizer = cls(parameters(), lr=0.05, decay=ELASTIC, foreach=foreach)
        optimizer.param_groups[0]["decay_scale"] = 0.25
        steps(optimizer, 3)
        saved = through_a_file(optimizer.state_dict())
        loading = cls(parameters(), lr=1.0, decay=Lp(3, 1.0), foreach=foreach)
        loading.load_state_dict(saved)
        assert same(loading.state_dict(), optimizer.state_dict())
        assert loading.param_groups[0]["decay"] == ELASTIC.pairs()
        assert loading.param_groups[0]["decay_scale"] == 0.25

    @pytest.mark.parametrize(
        ("cls", "plain"),
        [
            (PAdam, lambda p: AdamW(p, lr=0.05)),
            (PAdam, lambda p: AdamW(p, lr=0.05, fused=True)),
            (PAdam, lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True)),
            (PSGD, lambda p: SGD(p, lr=0.05, momentum=0.9)),
            (PSGD, lambda p: SGD(p, lr=0.05, momentum=0.9, fused=True)),
        ],
        ids=["AdamW", "fused AdamW", "Adam", "SGD", "fused SGD"],
    )
    def test_checkpoint_of_plain_optimizer_keeps_the_decay(self, cls, plain, same):
        theirs = plain(parameters())
        steps(theirs, 3)
        saved = through_a_file(theirs.state_dict())
        untouched = copy.deepcopy(saved)
        ours = cls(parameters(), decay=ELASTIC, foreach=False)
        ours.param_groups[0]["decay_scale"] = 0.25
        ours.load_state_dict(saved)
        group = ours.param_groups[0]
        assert (group["decay"], group["decay_scale"]) == (ELASTIC.pairs(), 0.25)
        assert group["decay_1d"] is False
        assert group["lr"] == 0.05
        assert same(ours.state_dict()["state"], saved["state"])
        assert same(saved, untouched)
        before = [weight.clone() for weight in weights_of(ours)]
        steps(ours, 1, start=3)
        assert not same(weights_of(ours)[0], before[0])
        assert all(weight.isfinite().all() for weight in weights_of(ours))

    @pytest.mark.parametrize(("cls", "plain"), [(PAdam, AdamW), (PSGD, SGD)])
    def test_loads_into_the_plain_optimizer(self, cls, plain, same):
        ours = cls(parameters(), lr=0.05, decay=DECAY)
        steps(ours, 2)
        theirs = plain(parameters())
        theirs.load_state_dict(through_a_file(ours.state_dict()))
        steps(theirs, 1)
        assert theirs.param_groups[0]["lr"] == 0.05

    @BOTH
    @pytest.mark.parametrize("fused", [None, True, False])
    def test_state_of_a_transposed_weight_raises(self, cls, fused):
        def start(shape):
            options = {"momentum": 0.9} if cls is PSGD else {}
            param = nn.Parameter(torch.ones(shape))
            param.grad = torch.ones(shape)
            return cls([param], lr=0.05, decay=DECAY, fused=fused, **options), param

        theirs, _ = start((3, 4))
        theirs.step()
        optimizer, weight = start((4, 3))  # as many weights as in the checkpoint
        optimizer.load_state_dict(theirs.state_dict())
        with pytest.raises((RuntimeError, ValueError), match=r"size of tensor|shape of their"):
            optimizer.step()
        assert torch.equal(weight, torch.ones(4, 3))

    @BOTH
    @pytest.mark.parametrize(
        ("key", "value", "rule"),
        [
            ("decay", "strong", "a decay must be .*'strong'"),
            ("decay", [[0.8, -0.1]], "lam must be finite and >= 0, got -0.1"),
            ("decay", [[float("nan"), 0.1]], "p must be finite and >= 0, got nan"),
            ("decay", [[0.8, 0.1, 0.2]], "a decay must be"),
            ("decay_scale", float("inf"), "decay_scale must be finite and >= 0, got inf"),
        ],
    )
    def test_invalid_checkpoint_changes_nothing(self, cls, key, value, rule, same):
        params = parameters()
        optimizer = cls([{"params": params[:2]}, {"params": params[2:]}], lr=0.05, decay=DECAY)
        steps(optimizer, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][1][key] = value
        saved["param_groups"][0]["lr"] = 0.5
        before, untouched = everything(optimizer), copy.deepcopy(saved)
        with pytest.raises((TypeError, ValueError), match=rf"checkpoint.*group 1: .*{rule}"):
            optimizer.load_state_dict(saved)
        assert same(everything(optimizer), before)
        assert same(saved, untouched)


SCHEDULERS = {
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=8),
    "SequentialLR": lambda o: SequentialLR(
        o, [ConstantLR(o, 0.5, 3), CosineAnnealingLR(o, 5)], milestones=[3]
    ),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=0, factor=0.5),
    "warm-up from 0 to 0": lambda o: LambdaLR(o, [0.0, 0.5, 1.0, 0.5, 0.0, 0.0].__getitem__),
}


class TestSchedulers:
    @pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
    @pytest.mark.parametrize(("cls", "plain"), [(PAdam, AdamW), (PSGD, SGD)])
    def test_schedulers_change_the_decay(self, cls, plain, make, exact, same):
        momentum = {"momentum": 0.9} if cls is PSGD else {}  # required by OneCycleLR
        ours = cls(parameters(), lr=0.05, decay=ELASTIC, foreach=False, **momentum)
        theirs = plain(parameters(), lr=0.05, weight_decay=0.0, foreach=False, **momentum)
        pdecay.attach(theirs, ELASTIC, **exact)
        schedulers = [make(ours), make(theirs)]
        rates = set()
        for t in range(5):
            rates.add(ours.param_groups[0]["lr"])
            for optimizer, scheduler in zip((ours, theirs), schedulers, strict=True):
                before = [weight.clone() for weight in weights_of(optimizer)]
                steps(optimizer, 1, start=t)
                if not optimizer.param_groups[0]["lr"]:
                    assert same(weights_of(optimizer), before)
                scheduler.step(*[1.0] * isinstance(scheduler, ReduceLROnPlateau))
            assert same(weights_of(ours), weights_of(theirs))
        assert len(rates) > 1
        assert all(weight.isfinite().all() for weight in weights_of(ours))


class TestGroups:
    @BOTH
    def test_vectors_in_bare_parameters_do_not_decay(self, cls, same):
        ours, plain = (
            cls(
                [*parameters(), nn.Parameter(torch.tensor(2.0))],
                lr=0.05,
                decay=decay,
                foreach=False,
            )
            for decay in (DECAY, None)
        )
        steps(ours, 1)
        steps(plain, 1)
        unchanged = [same(a, b) for a, b in zip(weights_of(ours), weights_of(plain), strict=True)]
        assert unchanged == [False, True, False, False, True]

    @BOTH
    @PATHS
    def test_own_decay_overrides(self, cls, foreach, same):
        def groups():
            a, b, c, d = parameters()
            return [
                {"params": [a], "decay": Lp(1, 0.2)},
                {"params": [b], "decay": Lp(1, 0.2)},
                {"params": [c], "decay": None},
                {"params": d},
            ]

        ours = cls(groups(), lr=0.05, decay=ELASTIC, foreach=foreach, fused=False)
        assert [g["decay"] for g in ours.param_groups] == [
            [[1.0, 0.2]],
            [[1.0, 0.2]],
            [],
            ELASTIC.pairs(),
        ]
        undecayed = cls(parameters(), lr=0.05, decay=None, foreach=foreach)
        old = [weight.clone() for weight in weights_of(ours)]
        steps(ours, 1)
        steps(undecayed, 1)
        w_tilde = weights_of(undecayed)
        by = [Lp(1, 0.2), Lp(1, 0.2), None, ELASTIC]  # vectors too, if their group has a decay
        expected = [
            tilde * penalty.factor(w_old, 0.05) if penalty else tilde
            for tilde, w_old, penalty in zip(w_tilde, old, by, strict=True)
        ]
        assert same(weights_of(ours), expected)

    @BOTH
    def test_group_added_later_gets_settings(self, cls):
        optimizer = cls([parameters()[0]], decay=DECAY)
        given = {"params": parameters()[2:], "name": "late"}
        optimizer.add_param_group(given)
        optimizer.add_param_group({"params": parameters()[2:], "decay": Lp(1, 0.2)})
        assert [g["decay"] for g in optimizer.param_groups] == [
            DECAY.pairs(),
            DECAY.pairs(),
            [[1.0, 0.2]],
        ]
        assert "decay" not in given  # the caller's dict is unchanged

    @BOTH
    @pytest.mark.parametrize("bad", ["much", [[-1, 0.1]], [[1, float("inf")]]])
    def test_invalid_group_is_not_added(self, cls, bad, same):
        optimizer = cls([parameters()[0]], decay=DECAY)
        before = everything(optimizer)
        with pytest.raises((TypeError, ValueError), match="must be"):
            optimizer.add_param_group({"params": parameters()[2:], "decay": bad})
        assert same(everything(optimizer), before)

    @BOTH
    def test_given_dicts_are_not_changed(self, cls):
        given = [{"params": parameters(), "decay": DECAY}]
        keys = dict(given[0])
        cls(given)
        assert given[0].keys() == keys.keys()
        assert given[0]["decay"] is DECAY

    @BOTH
    def test_unknown_keys_are_kept(self, cls):
        theirs = {"initial_lr": 0.5, "name": "head", "layers": [1, 2]}
        optimizer = cls([{"params": parameters(), **theirs}], decay=DECAY)
        steps(optimizer, 1)
        optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
        optimizer = copy.deepcopy(optimizer)
        assert theirs.items() <= optimizer.param_groups[0].items()

    @BOTH
    def test_from_param_groups(self, cls, same):
        model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
        optimizer = cls(pdecay.param_groups(model), lr=0.05, decay=DECAY)
        decayed, others = optimizer.param_groups
        assert [p.shape for p in decayed["params"]] == [(3, 4), (2, 3)]
        assert (decayed["decay"], others["decay"]) == (DECAY.pairs(), [])

    @BOTH
    def test_settings_are_plain_numbers(self, cls):
        optimizer = cls(parameters(), decay=ELASTIC)
        group = optimizer.param_groups[0]
        assert group["decay"] == [[0.5, 0.1], [2.0, 0.3]]
        assert all(type(x) is float for pair in group["decay"] for x in pair)
        assert group["decay_scale"] == 1.0
        assert "0.5, 0.1" in repr(optimizer)

    @BOTH
    def test_manual_changes_take_effect(self, cls, same):
        by_hand = cls(parameters(), lr=0.05, decay=DECAY, foreach=False)
        by_hand.param_groups[0]["decay"] = [[1.0, 0.2]]
        built = cls(parameters(), lr=0.05, decay=Lp(1, 0.2), foreach=False)
        for optimizer in (by_hand, built):
            steps(optimizer, 2)
        assert same(weights_of(by_hand), weights_of(built))

    @BOTH
    def test_scale_zero_is_the_plain_optimizer(self, cls, same):
        off = cls(parameters(), lr=0.05, decay=DECAY, foreach=False)
        off.param_groups[0]["decay_scale"] = 0.0
        plain = cls(parameters(), lr=0.05, decay=None, foreach=False)
        for optimizer in (off, plain):
            steps(optimizer, 3)
        assert same(weights_of(off), weights_of(plain))


class TestDefaults:
    def test_defaults_of_padam(self):
        group = PAdam(parameters()).param_groups[0]
        expected = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "decay": [[1.0, 1e-2]]}
        expected |= {"weight_decay": 0.0, "amsgrad": False, "maximize": False, "capturable": False}
        assert expected.items() <= group.items()

    def test_defaults_of_psgd(self):
        group = PSGD(parameters()).param_groups[0]
        expected = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
        expected |= {"decay": [[1.0, 1e-2]], "weight_decay": 0.0, "maximize": False}
        assert expected.items() <= group.items()

    @pytest.mark.parametrize(("cls", "plain"), [(PAdam, AdamW), (PSGD, SGD)])
    def test_are_subclasses_of_torch_optimizers(self, cls, plain):
        """Code may rely on isinstance(optimizer, AdamW)."""
        assert isinstance(cls(parameters()), plain)

    def test_decay_comes_before_the_flags(self):
        assert PAdam(parameters(), 0.1, (0.8, 0.9), 1e-6, DECAY).param_groups[0]["decay"] == [
            [0.8, 0.3]
        ]
