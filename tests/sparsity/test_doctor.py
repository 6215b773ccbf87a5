import copy
import warnings

import pytest
import torch
from torch import nn

from pdecay import (
    PSGD,
    Lp,
    PAdam,
    attach,
    doctor,
    param_groups,
)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def found(model, optimizer):
    return [(finding.level, finding.message) for finding in doctor(model, optimizer)]


def the_finding(model, optimizer, words):
    matching = [finding for finding in doctor(model, optimizer) if words in finding.message]
    assert len(matching) == 1, [str(finding) for finding in doctor(model, optimizer)]
    return matching[0]


@pytest.mark.parametrize("cls", [PAdam, PSGD])
def test_correct_setup_has_no_findings(cls):
    model = small_model()
    assert found(model, cls(param_groups(model), lr=1e-3, decay=Lp(0.8, 1e-3))) == []


def test_correct_attachment_has_no_findings():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    attach(optimizer, Lp(1, 1e-3))
    assert found(model, optimizer) == []


def test_reports_optimizer_without_decay():
    model = small_model()
    finding = the_finding(model, torch.optim.SGD(model.parameters(), lr=0.1), "nothing decays")
    assert finding.level == "error"
    assert "attach" in finding.cure


def test_reports_hooks_lost_in_a_deepcopy():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(optimizer, Lp(1, 1e-3))
    model, optimizer = copy.deepcopy((model, optimizer))
    assert "deepcopy and pickle drop hooks" in the_finding(model, optimizer, "nothing").message


def test_reports_groups_without_decayed_parameters():
    model = small_model()
    biases = [param for param in model.parameters() if param.ndim < 2]
    optimizer = PAdam(biases)
    assert the_finding(model, optimizer, "nothing decays").level == "error"


def test_names_zero_initialised_tensors():
    model = small_model()
    nn.init.zeros_(model[2].weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = PAdam(model.parameters(), decay=Lp(0.5, 1e-3))
    finding = the_finding(model, optimizer, "zero is a fixed point")
    assert finding.level == "error"
    assert "2.weight" in finding.message
    assert "0.weight" not in finding.message


def test_accepts_zero_tensors_for_p_2():
    model = small_model()
    nn.init.zeros_(model[2].weight)
    optimizer = PAdam(model.parameters(), decay=Lp(2, 1e-3))
    assert not any("fixed point" in message for _, message in found(model, optimizer))


def test_reports_decayed_norms_and_biases():
    model = small_model()
    groups = [{"params": list(model.parameters()), "decay": Lp(2, 1e-3)}]
    finding = the_finding(model, PAdam(groups), "biases, norms or scales decay")
    assert "1.weight" in finding.message
    assert "0.bias" in finding.message
    assert "0.weight" not in finding.message


def test_reports_zero_lr_and_zero_lam():
    model = small_model()
    optimizer = PAdam(model.parameters(), lr=0.0, decay=Lp(1, 1e-3))
    assert the_finding(model, optimizer, "lr is 0").level == "hint"
    optimizer = PAdam(model.parameters(), decay=Lp(1, 0.0))
    assert the_finding(model, optimizer, "lam or decay_scale is 0").level == "warning"
    optimizer = PAdam(model.parameters(), decay=Lp(1, 1e-3))
    optimizer.param_groups[0]["decay_scale"] = 0.0
    assert the_finding(model, optimizer, "lam or decay_scale is 0")


def test_reports_p_above_one():
    model = small_model()
    assert the_finding(model, PAdam(model.parameters(), decay=Lp(1.2, 1e-3)), "p = 1.2 > 1")


def test_reports_double_l2():
    model = small_model()
    optimizer = PAdam(model.parameters(), decay=Lp(1, 1e-3) + Lp(2, 1e-2), weight_decay=1e-2)
    assert the_finding(model, optimizer, "both shrink")


def test_reports_coupled_l2():
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=1e-2)
    attach(optimizer, Lp(1, 1e-3))
    assert the_finding(model, optimizer, "adds weight_decay")


def test_reports_adaptive_step_size():
    model = small_model()
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "d": 1e-6}], lr=1.0)
    attach(optimizer, Lp(1, 1e-3))
    assert "lr=" in the_finding(model, optimizer, "adapts its own step size").cure


def test_reports_too_strong_decay():
    model = small_model()
    finding = the_finding(model, PAdam(model.parameters(), decay=Lp(1, 1e3)), "halves")
    assert "0.weight" in finding.message


def test_reports_parameters_missing_from_optimizer_or_model():
    model = small_model()
    finding = the_finding(model, PAdam(model[0].parameters(), decay=Lp(1, 1e-3)), "not in the opt")
    assert "2.weight" in finding.message
    stranger = copy.deepcopy(model)
    finding = the_finding(stranger, PAdam(model.parameters()), "are not in this model")
    assert finding.level == "error"


def test_reports_non_finite_and_half_precision_weights():
    model = small_model()
    model[0].weight.data[0, 0] = float("nan")
    assert "0.weight" in the_finding(model, PAdam(model.parameters()), "not finite").message
    model = small_model().to(torch.bfloat16)
    assert the_finding(model, PAdam(model.parameters()), "bfloat16, where").level == "hint"
    rounded = PAdam(model.parameters(), stochastic_rounding=True)
    assert not [finding for finding in doctor(model, rounded) if "bfloat16" in finding.message]
    model = small_model().half()
    finding = the_finding(model, PAdam(model.parameters()), "In float16, squared gradients")
    assert finding.level == "warning"
    assert "16-mixed" in finding.cure


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_skips_weights_on_meta_and_sparse_ones(kind):
    weight = torch.empty(4, 4, device="meta") if kind == "meta" else torch.eye(4).to_sparse()
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    assert doctor(model, PAdam(model.parameters())) == []


def test_sorts_errors_first_and_gives_cures():
    model = small_model()
    model[0].weight.data[0, 0] = float("nan")
    findings = doctor(model, PAdam(model.parameters(), lr=0.0, decay=Lp(1.5, 1e3)))
    order = ["error", "warning", "hint"]
    levels = [order.index(finding.level) for finding in findings]
    assert len(levels) >= 3
    assert levels == sorted(levels)
    assert all("cure: " in str(finding) and finding.cure for finding in findings)


def test_changes_nothing():
    model = small_model()
    optimizer = PAdam(model.parameters())
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    doctor(model, optimizer)
    torch.testing.assert_close(model.state_dict(), weights)
    assert optimizer.state_dict() == state


def test_rejects_bad_arguments():
    model = small_model()
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module"):
        doctor([], PAdam(model.parameters()))
    with pytest.raises(TypeError, match=r"needs a torch\.optim\.Optimizer"):
        doctor(model, model)


@pytest.mark.parametrize(
    ("weight_norm", "names"),
    [(nn.utils.parametrizations.weight_norm, "*original?"), (nn.utils.weight_norm, "*weight_[gv]")],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_reports_weight_norm_whose_rows_can_become_zero(weight_norm, names):
    model = nn.Sequential(weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2))
    assert the_finding(model, PAdam(param_groups(model)), "weight_norm").level == "warning"
    assert found(model, PAdam(param_groups(model, exclude=names))) == []
    direction = [param for param in model.parameters() if param.shape == (3, 4)]
    with torch.no_grad():
        direction[0][0] = 0
    assert model[0](torch.ones(1, 4)).isnan().any()
