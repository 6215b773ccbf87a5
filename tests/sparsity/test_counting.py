import json

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import pdecay
from pdecay import Lp, PAdam, SparseLinear, prune_, sparsity


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def by_name(report):
    return {layer.name: layer for layer in report.layers}


def test_counts_for_each_parameter_and_in_both_totals():
    model = small_model()
    model[0].weight.data[:, :3] = 0
    model[0].bias.data.zero_()
    report = sparsity(model)
    assert by_name(report)["0.weight"].zeros == 12
    assert by_name(report)["0.weight"].sparsity == 0.5
    assert report.total == 12 / (24 + 12)
    # the norm's bias starts at zero, so it counts among all
    assert report.total_all == (12 + 4 + 4) / (24 + 4 + 4 + 4 + 12 + 3)


def test_threshold_is_strict_and_sign_does_not_matter():
    model = nn.Linear(4, 1, bias=False)
    model.weight.data = torch.tensor([[1e-13, -0.9e-13, -0.0, 1.0]], dtype=torch.float64)
    assert sparsity(model).layers[0].zeros == 2
    assert sparsity(model, threshold=1e-12).layers[0].zeros == 3
    assert sparsity(model, threshold=0).layers[0].zeros == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_counts_zeros_in_every_dtype(dtype):
    model = nn.Linear(4, 4, bias=False, dtype=dtype)
    model.weight.data[1] = 0
    assert sparsity(model).total == 0.25
    assert sparsity(model, threshold=1e-50).total == 0.25  # rounds to 0 in single precision


def test_nan_is_not_counted_as_zero():
    model = nn.Linear(2, 2, bias=False)
    model.weight.data.fill_(float("nan"))
    assert sparsity(model).total == 0


def test_dead_units_are_rows_and_columns_that_are_all_zero():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    model[0].weight.data[[1, 3]] = 0
    model[1].weight.data[:, 1] = 0
    layers = by_name(sparsity(model))
    assert layers["0.weight"].dead_rows == (1, 3)
    assert layers["0.weight"].dead_columns == ()
    assert layers["1.weight"].dead_columns == (1,)
    assert sparsity(model).dead_units == {
        "0.weight": {"rows": (1, 3), "columns": ()},
        "1.weight": {"rows": (), "columns": (1,)},
    }


def test_tied_weight_is_counted_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    assert [layer.name for layer in sparsity(Tied()).layers] == ["embedding.weight"]


def test_masked_weight_counts_as_masked():
    model = nn.Linear(10, 10, bias=False)
    prune.random_unstructured(model, "weight", amount=0.3)
    assert sparsity(model).total == pytest.approx(0.3)


def test_all_zero_layer_counts_as_decayed():
    model = small_model()
    model[2].weight.data.zero_()
    assert by_name(sparsity(model))["2.weight"].decayed


def test_optimizer_defines_the_decayed_weights():
    model = small_model()
    model[0].weight.data.zero_()
    groups = [
        {"params": [model[2].weight], "decay": Lp(1, 0.1)},
        {"params": [*model[0].parameters(), *model[1].parameters()], "decay": None},
    ]
    report = sparsity(model, optimizer=PAdam(groups))
    assert [layer.name for layer in report.layers if layer.decayed] == ["2.weight"]
    assert report.total == 0


def test_table_and_dict():
    model = small_model()
    model[0].weight.data[0] = 0
    report = sparsity(model)
    table = str(report)
    assert "0.weight" in table
    assert "25.00%" in table
    assert "0.bias *" in table
    assert "* not decayed" in table
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["total"] == report.total
    assert plain["layers"][0] == {
        "name": "0.weight",
        "shape": [4, 6],
        "size": 24,
        "zeros": 6,
        "sparsity": 0.25,
        "decayed": True,
        "dead_rows": [0],
        "dead_columns": [],
    }


def test_empty_tensors():
    model = nn.ParameterDict({"empty": nn.Parameter(torch.empty(0, 3))})
    assert sparsity(model).total == 0


def test_prune_sets_exact_positive_zeros_and_nothing_else():
    model = nn.Linear(5, 1, bias=False)
    model.weight.data = torch.tensor([[1e-14, -1e-14, -0.0, 1e-12, -2.0]])
    assert prune_(model) is model
    assert torch.equal(model.weight, torch.tensor([[0.0, 0.0, 0.0, 1e-12, -2.0]]))
    assert not torch.signbit(model.weight[0, :3]).any()


def test_prune_with_threshold_zero_turns_negative_zeros_positive():
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[-0.0, 1e-40]])
    prune_(model, threshold=0)
    assert not torch.signbit(model.weight[0, 0])
    assert model.weight[0, 1] > 0


def test_prune_keeps_the_parameter_and_its_gradient_flag():
    model = small_model()
    before = list(model.parameters())
    prune_(model, threshold=0.1)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(param.requires_grad for param in model.parameters())
    assert sparsity(model).total > 0


@pytest.mark.parametrize("function", [sparsity, prune_])
@pytest.mark.parametrize("threshold", [-1e-3, float("nan"), float("inf")])
def test_rejects_bad_thresholds(function, threshold):
    with pytest.raises(ValueError, match="threshold must be finite and >= 0, got"):
        function(small_model(), threshold)


@pytest.mark.parametrize("function", [sparsity, prune_])
def test_rejects_other_objects_than_models(function):
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module, got Tensor"):
        function(torch.zeros(3))


def test_model_without_parameters():
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        pdecay.sparsity(nn.ReLU())


def test_optimizer_of_a_wrong_type_raises():
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="optimizer must be a torch optimizer, got Linear"):
        pdecay.sparsity(model, optimizer=model)


@pytest.mark.parametrize("function", [sparsity, prune_])
def test_deployed_models_are_refused(function):
    model = nn.Sequential(SparseLinear(nn.Linear(8, 8)), nn.Linear(8, 4))
    with pytest.raises(TypeError, match="Sequential has sparse layers, which store no zeros"):
        function(model)
