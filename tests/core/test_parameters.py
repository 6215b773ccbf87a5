import warnings

import pytest
import torch
from torch import nn

from pdecay import (
    PSGD,
    Every,
    Lp,
    PAdam,
    Slow,
    attach,
    param_groups,
)
from pdecay._core.parameters import decays_by_default, is_norm, is_zero, owners_of

FROZEN = "all zero and would never change"


def split(model, **options):
    """Return the names of the decayed and the other parameters, in the model's order."""
    names = {param: name for name, param in model.named_parameters()}
    return [[names[param] for param in group["params"]] for group in param_groups(model, **options)]


def norm(name, shape=(4, 4)):
    """Return a norm as in other packages: recognisable only by its class name."""
    module = type(name, (nn.Module,), {})()
    module.weight = nn.Parameter(torch.ones(shape))
    return module


def attached(optimizer, decay):
    attach(optimizer, decay)
    return optimizer


def small():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight


class TestByDimension:
    def test_matrices_decay_and_vectors_do_not(self):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.PReLU(8), nn.Embedding(5, 8))
        decayed, others = split(model)
        assert decayed == ["0.weight", "1.weight", "3.weight"]
        assert others == ["0.bias", "1.bias", "2.weight"]

    def test_scalars_do_not_decay(self):
        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.tensor(1.0))
                self.weight = nn.Parameter(torch.ones(2, 2))

        assert split(Scale()) == [["weight"], ["scale"]]

    def test_vectors_that_broadcast_do_not_decay(self):
        class Block(nn.Module):
            """Parameters as in ConvNeXt and vision transformers."""

            def __init__(self):
                super().__init__()
                self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3))
                self.head = nn.Conv2d(8, 1, 1)
                self.layer_scale = nn.Parameter(1e-6 * torch.ones(8, 1, 1))
                self.class_token = nn.Parameter(torch.ones(1, 1, 8))
                self.positions = nn.Parameter(torch.ones(1, 4, 8))
                self.lora = nn.Parameter(torch.ones(1, 8))

        decayed, others = split(Block())
        weight = "conv.parametrizations.weight.original"
        assert decayed == ["positions", "lora", f"{weight}1", "head.weight"]
        assert others == ["layer_scale", "class_token", "conv.bias", f"{weight}0", "head.bias"]

    def test_attention_and_recurrent_layers(self):
        decayed, others = split(nn.ModuleList([nn.LSTM(3, 4), nn.MultiheadAttention(4, 2)]))
        assert all("weight" in name for name in decayed)
        assert all("bias" in name for name in others)
        assert len(decayed) == len(others) == 4

    def test_each_parameter_is_listed_once_and_in_order(self):
        model = nn.TransformerEncoderLayer(8, 2, 16)
        decayed, others = split(model)
        names = [name for name, _ in model.named_parameters()]
        assert sorted(decayed + others) == sorted(names)
        assert decayed == [name for name in names if name in decayed]
        assert others == [name for name in names if name in others]


class TestByKind:
    @pytest.mark.parametrize(
        "module",
        [
            nn.BatchNorm1d(4),
            nn.BatchNorm2d(4),
            nn.BatchNorm3d(4),
            nn.SyncBatchNorm(4),
            nn.InstanceNorm1d(4, affine=True),
            nn.InstanceNorm2d(4, affine=True),
            nn.InstanceNorm3d(4, affine=True),
            nn.LayerNorm(4),
            nn.LayerNorm((4, 5)),
            nn.GroupNorm(2, 4),
            nn.RMSNorm(4),
            nn.RMSNorm((4, 5)),
            nn.LazyBatchNorm1d(),
            nn.LazyBatchNorm2d(),
            nn.LazyBatchNorm3d(),
            nn.LazyInstanceNorm1d(affine=True),
            nn.LazyInstanceNorm2d(affine=True),
            nn.LazyInstanceNorm3d(affine=True),
        ],
        ids=lambda module: type(module).__name__,
    )
    def test_torch_norms_are_excluded(self, module):
        assert is_norm(module)
        assert split(module)[0] == []
        assert not any(decays_by_default(param, owners) for param, owners in owners_of(module))

    @pytest.mark.parametrize(
        "module",
        [nn.BatchNorm1d(4), nn.LayerNorm((4, 4)), nn.GroupNorm(2, 4), nn.RMSNorm((4, 4))],
        ids=lambda module: type(module).__name__,
    )
    def test_subclasses_of_torch_norms_are_excluded(self, module):
        module.__class__ = type("Scale", (type(module),), {})
        assert is_norm(module)
        assert split(module)[0] == []

    @pytest.mark.parametrize(
        "name",
        [
            "LlamaRMSNorm",
            "MistralRMSNorm",
            "T5LayerNorm",
            "RmsNorm2d",
            "LayerNorm2d",
            "FusedLayerNorm",
            "FrozenBatchNorm2d",
            "BatchNormAct2d",
            "GroupNorm1",
            "AdaptiveInstanceNorm",
        ],
    )
    def test_norms_of_other_packages_are_excluded(self, name):
        model = nn.Sequential(nn.Linear(4, 4), norm(name))
        assert split(model) == [["0.weight"], ["0.bias", "1.weight"]]

    @pytest.mark.parametrize("name", ["Normalizer", "Enormous", "AbNormal", "Block"])
    def test_similar_names_are_not_norms(self, name):
        assert split(norm(name)) == [["weight"], []]

    def test_children_of_norms_follow_their_own_rules(self):
        class LayerNormBlock(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm((4, 4))
                self.linear = nn.Linear(4, 4)

        assert split(LayerNormBlock()) == [
            ["linear.weight"],
            ["norm.weight", "norm.bias", "linear.bias"],
        ]

    def test_weight_shared_with_a_norm_is_excluded(self):
        model = nn.Sequential(nn.Linear(4, 4), norm("LlamaRMSNorm"))
        model[0].weight = model[1].weight
        assert split(model) == [[], ["0.weight", "0.bias"]]


class TestByName:
    @pytest.mark.parametrize(
        ("exclude", "decayed"),
        [
            ("0.weight", ["2.weight"]),
            (["0.weight"], ["2.weight"]),
            ("0.*", ["2.weight"]),
            ("[02].*", []),
            (("*.weight",), []),
            ((pattern for pattern in ["0.*", "nothing"]), ["2.weight"]),
            ("?.bias", ["0.weight", "2.weight"]),
            ("weight", ["0.weight", "2.weight"]),  # the full name must match
            ("0.WEIGHT", ["0.weight", "2.weight"]),  # patterns are case-sensitive
            ("", ["0.weight", "2.weight"]),
            ([], ["0.weight", "2.weight"]),
        ],
    )
    @pytest.mark.filterwarnings("ignore:.*matches no parameter")
    def test_exclude_matches_full_names(self, exclude, decayed):
        assert split(small(), exclude=exclude)[0] == decayed

    def test_include_wins(self):
        model = small()
        assert split(model, exclude="*", include="0.weight")[0] == ["0.weight"]
        decayed, others = split(model, include=["1.weight", "[02].bias"], exclude="2.*")
        assert decayed == ["0.weight", "0.bias", "1.weight", "2.bias"]
        assert others == ["1.bias", "2.weight"]

    @pytest.mark.parametrize(
        "make",
        [
            lambda groups, decay: PAdam(groups, lr=0.1, decay=decay, foreach=False),
            lambda groups, decay: PAdam(groups, lr=0.1, decay=decay, foreach=True),
            lambda groups, decay: PSGD(groups, lr=0.1, decay=decay, foreach=False),
            lambda groups, decay: attached(torch.optim.SGD(groups, lr=0.1), decay),
        ],
        ids=["PAdam", "PAdam foreach", "PSGD", "attach"],
    )
    @pytest.mark.parametrize("where", ["optimizer", "group"])
    def test_included_vector_decays(self, make, where):
        model = small()
        penalty = Lp(1, 0.5)
        given = {"decay": penalty} if where == "group" else {}
        groups = param_groups(model, include=["0.bias", "1.weight"], **given)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        make(groups, penalty if where == "optimizer" else Lp(2, 7)).step()
        for name, param in model.named_parameters():
            decays = name in ("0.weight", "0.bias", "1.weight", "2.weight")
            factor = penalty.factor(before[name], 0.1) if decays else 1.0
            torch.testing.assert_close(param.detach(), before[name] * factor, rtol=1e-4, atol=1e-7)
        assert not torch.equal(model[0].bias, before["0.bias"])


class TestZeroTensors:
    def test_zero_tensors_are_excluded(self):
        model = small()
        nn.init.zeros_(model[2].weight)
        assert split(model) == [
            ["0.weight"],
            ["0.bias", "1.weight", "1.bias", "2.weight", "2.bias"],
        ]

    def test_one_nonzero_element_is_enough_to_decay(self):
        model = small()
        nn.init.zeros_(model[2].weight)
        model[2].weight.data[0, 0] = -1e-30
        assert "2.weight" in split(model)[0]

    @pytest.mark.parametrize(
        ("tensor", "zero"),
        [
            (torch.zeros(2, 2), True),
            (-torch.zeros(2, 2), True),
            (torch.zeros(2, 2, dtype=torch.bfloat16), True),
            (torch.zeros(2, 2, dtype=torch.complex64), True),
            (torch.tensor(0.0), True),
            (torch.eye(2), False),
            (torch.tensor([[0, 1j]]), False),
            (torch.tensor([[0, float("nan")]]), False),
            (torch.zeros(0, 2), False),
            (torch.zeros(2, 2, device="meta"), False),
        ],
    )
    def test_is_zero_detects_all_zero_tensors(self, tensor, zero):
        assert is_zero(nn.Parameter(tensor)) is zero

    def test_empty_and_meta_tensors_follow_the_other_rules(self):
        with torch.device("meta"):
            model = small()
        assert split(model)[0] == ["0.weight", "2.weight"]


class TestTiedWeights:
    def test_tied_weights_are_listed_once(self):
        model = Tied()
        groups = param_groups(model)
        params = [param for group in groups for param in group["params"]]
        assert len(params) == len(set(params)) == len(list(model.parameters())) == 4
        PAdam(groups, foreach=False)  # raises for duplicate parameters

    @pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
    def test_tied_weights_match_by_any_name(self, name):
        assert split(Tied(), exclude=name)[0] == ["body.weight"]
        assert split(Tied(), exclude="*", include=name)[0] == ["embedding.weight"]

    def test_shared_modules_are_listed_once(self):
        shared = nn.Linear(4, 4)
        model = nn.ModuleDict({"first": shared, "second": shared})
        assert split(model, exclude="second.*") == [[], ["first.weight", "first.bias"]]

    def test_owners_of_yields_all_names(self):
        names = [[name for name, _ in owners] for _, owners in owners_of(Tied())]
        assert ["embedding.weight", "head.weight"] in names
        assert sum(map(len, names)) == 5


class TestFrozenParameters:
    def test_parameters_without_gradient_are_omitted(self):
        model = small()
        model[0].weight.requires_grad_(False)
        model[1].requires_grad_(False)
        assert split(model, include="0.weight") == [["2.weight"], ["0.bias", "2.bias"]]

    def test_all_frozen_raises(self):
        with pytest.raises(ValueError, match="Sequential has no parameter that requires a grad"):
            param_groups(small().requires_grad_(False))

    def test_no_parameters_raises(self):
        with pytest.raises(ValueError, match="nothing to optimize: ReLU"):
            param_groups(nn.ReLU())


class TestLazyModules:
    def test_weights_decay_and_biases_do_not(self):
        model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyConv1d(4, 1))
        groups = param_groups(model, include="2.bias")
        assert groups[0]["params"] == [model[0].weight, model[2].weight, model[2].bias]
        assert groups[1]["params"] == [model[0].bias]

    def test_lazy_norms_are_excluded(self):
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
        decayed, others = param_groups(model)
        assert decayed["params"] == [model[0].weight]
        assert others["params"] == [model[0].bias, model[1].weight, model[1].bias]

    def test_lazy_weights_decay_after_materialisation(self):
        model = nn.Sequential(nn.LazyLinear(8))
        optimizer = PSGD(param_groups(model), lr=0.1, decay=Lp(1, 0.5), foreach=False)
        loss = model(torch.ones(2, 3)).sum() * 0
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        loss.backward()
        optimizer.step()
        expected = before["0.weight"] * Lp(1, 0.5).factor(before["0.weight"], 0.1)
        torch.testing.assert_close(model[0].weight.detach(), expected)
        assert torch.equal(model[0].bias, before["0.bias"])


class TestDecay:
    def test_none_uses_the_optimizers_decay(self):
        decayed, others = param_groups(small())
        assert "decay" not in decayed
        assert others["decay"] is None
        optimizer = PAdam(param_groups(small()), decay=Lp(0.7, 0.3), foreach=False)
        assert [group["decay"] for group in optimizer.param_groups] == [[[0.7, 0.3]], []]

    @pytest.mark.parametrize("penalty", [Lp(0.8, 0.1), Lp(0.8, 0.1) + Lp(2, 0.3)], ids=repr)
    def test_own_decay_overrides_the_optimizers(self, penalty):
        groups = param_groups(small(), penalty)
        assert groups[0]["decay"] == penalty
        optimizer = PAdam(groups, decay=Lp(2, 7), foreach=False)
        assert [group["decay"] for group in optimizer.param_groups] == [penalty.pairs(), []]

    def test_accepts_pairs_of_a_checkpoint(self):
        assert param_groups(small(), [[1, 0.5]])[0]["decay"].terms == (Lp(1, 0.5),)

    def test_groups_work_with_any_torch_optimizer(self):
        torch.optim.RMSprop(param_groups(small(), Lp(1, 0.1)), lr=0.1)

    def test_one_group_may_be_empty(self):
        assert split(nn.Linear(3, 3, bias=False)) == [["weight"], []]
        assert split(nn.LayerNorm(3)) == [[], ["weight", "bias"]]
        PAdam(param_groups(nn.Linear(3, 3, bias=False)), foreach=False)
        PAdam(param_groups(nn.LayerNorm(3)), foreach=False)


class TestErrors:
    @pytest.mark.parametrize("model", [None, "model", [], nn.Linear, torch.zeros(2, 2)], ids=str)
    def test_non_module_raises(self, model):
        with pytest.raises(TypeError, match=f"needs a torch.nn.Module, got {type(model).__name__}"):
            param_groups(model)

    def test_invalid_decay_raises(self):
        with pytest.raises(TypeError, match=r"must be an Lp, .* got 0.1"):
            param_groups(small(), 0.1)

    @pytest.mark.parametrize("name", ["exclude", "include"])
    @pytest.mark.parametrize("patterns", [[1], ["0.*", None], [b"0.*"], 3, None], ids=repr)
    def test_invalid_patterns_raise(self, name, patterns):
        with pytest.raises(TypeError, match=f"{name} must .*string"):
            param_groups(small(), **{name: patterns})


class TestWarning:
    """Decayed tensors that are initialised to zero are reported by name, once."""

    @staticmethod
    def zeroed():
        model = small()
        nn.init.zeros_(model[0].weight)
        nn.init.zeros_(model[2].weight)
        return model

    def test_param_groups_warns_with_every_name(self):
        with pytest.warns(UserWarning, match=FROZEN) as caught:
            param_groups(self.zeroed(), Lp(1, 0.1), include="*.weight")
        assert len(caught) == 1
        assert ": 0.weight, 2.weight." in str(caught[0].message)
        assert caught[0].filename == __file__

    @pytest.mark.parametrize(
        "make",
        [
            lambda params, decay: PAdam(params, decay=decay, foreach=False),
            lambda params, decay: PSGD(params, decay=decay, foreach=False),
            lambda params, decay: attach(torch.optim.SGD(params), decay),
        ],
        ids=["PAdam", "PSGD", "attach"],
    )
    def test_optimizers_warn(self, make):
        with pytest.warns(UserWarning, match=FROZEN) as caught:
            make(self.zeroed().named_parameters(), Lp(1, 0.1))
        assert len(caught) == 1
        assert ": 0.weight, 2.weight." in str(caught[0].message)
        assert caught[0].filename == __file__
        with pytest.warns(UserWarning, match=FROZEN) as caught:
            make(self.zeroed().parameters(), Lp(1, 0.1))
        message = str(caught[0].message)
        assert "parameter 0 of group 0 (8x4)" in message
        assert "parameter 4 of group 0 (2x8)" in message

    def test_each_tensor_is_reported_once(self):
        model = self.zeroed()
        with pytest.warns(UserWarning, match=FROZEN):
            groups = param_groups(model, Lp(1, 0.1), include="*.weight")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            param_groups(model, Lp(1, 0.1), include="*.weight")
            PAdam(groups, foreach=False)
            PSGD(model.parameters(), foreach=False)
            attach(torch.optim.SGD(model.parameters()), Lp(1, 0.1))

    def test_new_tensor_is_reported(self):
        model = self.zeroed()
        with pytest.warns(UserWarning, match=": 0.weight. "):
            param_groups(model, Lp(1, 0.1), include="0.weight")
        with pytest.warns(UserWarning, match=": 2.weight. "):
            param_groups(model, Lp(1, 0.1), include="*.weight")

    @pytest.mark.parametrize(
        ("decay", "options"),
        [
            (Lp(1, 0.1), {}),  # excluded
            (None, {}),
            (Lp(2, 0.1), {"include": "*.weight"}),  # zero is not a fixed point
            (Lp(3, 0.1) + Lp(1, 0), {"include": "*.weight"}),
        ],
    )
    def test_no_warning_if_nothing_would_freeze(self, decay, options):
        groups = param_groups(self.zeroed(), decay, **options)  # warnings are errors in the tests
        PAdam(groups, foreach=False)
        PAdam(self.zeroed().parameters(), decay=Lp(2, 0.1), foreach=False)
        PAdam(self.zeroed().parameters(), decay=None, foreach=False)

    def test_no_warning_with_a_slow_auxiliary(self):
        for auxiliary in (Every(10), Slow(0.1)):
            PAdam(self.zeroed().parameters(), auxiliary=auxiliary, foreach=False)

    def test_no_warning_for_excluded_zero_vectors(self):
        PAdam([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(2, 2))], foreach=False)

    def test_warns_for_zero_vector_in_group_with_own_decay(self):
        with pytest.warns(UserWarning, match=r"parameter 0 of group 0 \(3\)"):
            PAdam([{"params": [nn.Parameter(torch.zeros(3))], "decay": Lp(1, 1)}], foreach=False)


REMOVED = r"do not stay zero: 2\.weight"


def test_tensor_removed_by_earlier_training_is_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[:4] = 0
        model[2].weight.zero_()
    with pytest.warns(UserWarning, match=REMOVED):
        param_groups(model)
    model[2].weight.requires_grad_(False)
    param_groups(model)  # warnings are errors


def test_tensor_that_starts_at_zero_is_not_named_as_removed():
    model = nn.Sequential(nn.Embedding(100, 8, padding_idx=0), nn.Linear(8, 8), nn.Linear(8, 8))
    nn.init.zeros_(model[2].weight)
    assert split(model)[0] == ["0.weight", "1.weight"]
    with torch.no_grad():
        model[0].weight[:50] = 0
    assert "2.weight" in split(model, exclude="2.*")[1]
