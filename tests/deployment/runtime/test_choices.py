"""deploy: which layers and which model it chooses, plans, and the report."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.deployment.layers.modules import SparseLinear
from pdecay.deployment.runtime import pipeline
from pdecay.deployment.runtime.pipeline import deploy
from pdecay.lab.models import CNN, MLP
from tests.deployment.networks import assert_same, mostly_zero, with_batch_statistics

pytestmark = pytest.mark.skipif(bool(layers_kernel.available()), reason="no compiler")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.called = nn.Linear(8, 8), nn.Linear(8, 8)
        self.unused, self.hooked = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scaled, self.short = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()
        self.named = nn.Linear(8, 8)
        self.full, self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight

    def forward(self, x):
        x = nn.functional.linear(self.called(x), self.read.weight) + self.read(x)
        x = self.scaled(self.hooked(self.named(input=x)))
        x = self.full(x) + self.short(x.bfloat16()).float()
        return self.two(self.one(x)).to(self.called.weight.dtype)


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_report_gives_reason_for_each_dense_layer(clock):
    model = mostly_zero(Reads(), 0.7)
    nn.init.normal_(model.full.weight)
    model.hooked.register_forward_hook(lambda module, args, output: output + 1)
    parametrize.register_parametrization(model.scaled, "weight", Double())
    x = torch.randn(3, 8)
    deployed = deploy(model, x)
    why = {layer.name: (layer.choice, layer.why) for layer in deployed.report.layers}
    assert why["called"] == ("sparse", "2.0x")
    assert why["read"] == ("dense", "its weight is read by the model")
    assert why["unused"] == ("dense", "not called on the example")
    assert why["named"] == ("dense", "called with something else than one tensor")
    assert why["hooked"] == ("dense", "has hooks")
    assert why["scaled"] == ("dense", "a ParametrizedLinear")
    assert why["short"] == ("dense", "of dtype bfloat16")
    assert why["full"] == ("dense", "few zeros")
    assert why["one"] == ("dense", "a weight shared by one.weight, two.weight")
    assert_same(deployed, model, x)


def test_layer_stays_dense_unless_sparse_is_clearly_faster(clock):
    clock.sparse = 1.9
    deployed = deploy(mostly_zero(MLP(64, (32,), 10)), torch.randn(3, 64))
    assert {layer.choice for layer in deployed.report.layers} == {"dense"}
    assert {layer.why for layer in deployed.report.layers} == {"faster"}
    assert deployed.report.chosen == "dense"  # compaction removes nothing


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ([1.0, 1.0, 2.0], "smaller"),
        ([1.0, 1.5, 2.0], "dense"),
        ([2.0, 1.0, 1.01], "sparse"),
        ([1.0, 1.01, 1.005], "dense"),
        ([1.0, 0.5, 0.9], "smaller"),
    ],
)
def test_fastest_model_is_returned(clock, times, chosen):
    clock.model = times
    model = mostly_zero(MLP(64, (32,), 10))
    model.layers[-1].weight.data[:, 0] = 0  # a dead unit: the smaller model is another one
    deployed = deploy(model, torch.randn(3, 64))
    report = deployed.report
    assert report.chosen == chosen
    assert report.dense_time == times[0]
    assert report.deployed_time == times[["dense", "smaller", "sparse"].index(chosen)]
    is_sparse = isinstance(deployed.layers[1], SparseLinear)
    assert is_sparse == (chosen == "sparse")
    if chosen != "sparse":
        assert {layer.why for layer in report.layers} == {"the whole model is not faster"}
        assert {layer.choice for layer in report.layers} == {"dense"}
        assert "no layer is sparse" in str(report)
    assert not {p.data_ptr() for p in deployed.parameters()} & {
        p.data_ptr() for p in model.parameters()
    }


def test_layer_time_sums_over_all_calls(clock):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(self.layer(x)) + self.layer(x[:1])

    deployed = deploy(mostly_zero(Twice(), 0.6), torch.randn(3, 8))
    (layer,) = deployed.report.layers
    assert (layer.dense_time, layer.sparse_time) == (6.0, 3.0)  # two calls of one shape, one more


def test_report_is_table_and_plain_data_and_pickles(clock):
    model = with_batch_statistics(
        mostly_zero(CNN(1, 16, (4, 8), 16, 10)), torch.randn(3, 1, 16, 16)
    )
    deployed = deploy(model, torch.randn(3, 1, 16, 16))
    report = deployed.report
    shown = str(report)
    assert "features.0" in shown
    assert "sparse: 2.0x" in shown
    assert "3.00 times as fast with batch size 3, 1 thread" in shown
    assert "folded into the layer before: features.1" in shown
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["speedup"] == 3.0
    assert plain["layers"][0]["choice"] == "sparse"
    assert report.dense_bytes == sum(
        tensor.nbytes for tensor in (*model.parameters(), *model.buffers())
    )
    assert 0 < report.deployed_bytes < report.dense_bytes
    again = pickle.loads(pickle.dumps(deployed))
    assert str(again.report) == shown
    x = torch.randn(3, 1, 16, 16)
    assert torch.equal(again(x), deployed(x))


def test_real_timing():
    deployed = deploy(mostly_zero(MLP(64, (256,), 10), 0.95), torch.randn(1, 64))
    first = deployed.report.layers[0]
    assert first.dense_time > 0
    assert first.sparse_time > 0
    assert deployed.report.dense_time > 0
    assert deployed.report.deployed_time <= deployed.report.dense_time


def test_choose_sparse_and_dense(clock):
    clock.model = [1.0, 2.0, 3.0]  # sparse is the slowest
    model, x = mostly_zero(MLP(64, (32,), 10)), torch.randn(3, 64)
    model.layers[-1].weight.data[:, 0] = 0  # a dead unit
    sparse = deploy(model, x, choose="sparse")
    assert sparse.report.chosen == "sparse"
    assert {layer.why for layer in sparse.report.layers} == {"as asked"}
    dense = deploy(model, x, choose="dense")
    assert dense.report.chosen == "smaller"
    assert not any(isinstance(module, SparseLinear) for module in dense.modules())
    assert_same(sparse, model, x)
    assert_same(dense, model, x)


def test_plan_repeats_choices(clock):
    model, x = mostly_zero(MLP(64, (32,), 10)), torch.randn(3, 64)
    plan = json.loads(json.dumps(deploy(model, x).report.plan))
    assert plan["batch"] == 3
    plan["sparse"].pop("layers.1")
    again = deploy(model, x, choose=plan)
    assert [layer.choice for layer in again.report.layers] == ["dense", "sparse"]
    assert again.report.plan["sparse"] == plan["sparse"]
    plan["sparse"]["layers.3"] = [10, 31]
    with pytest.raises(ValueError, match=r"shape \[10, 31\], which has shape \[10, 32\]"):
        deploy(model, x, choose=plan)
    plan["sparse"] = {"head": [1, 2]}
    with pytest.raises(ValueError, match="which this model does not have"):
        deploy(model, x, choose=plan)


def test_invalid_choices_are_rejected():
    model, x = nn.Linear(2, 2), torch.randn(1, 2)
    with pytest.raises(ValueError, match="choose must be 'measured', 'sparse', 'dense' or a plan"):
        deploy(model, x, choose="fast")
    with pytest.raises(ValueError, match="choose is a dict without 'chosen'"):
        deploy(model, x, choose={})
    damaged = [("fast", {}), (None, {}), ("sparse", []), ("sparse", None), ("sparse", {"": 1})]
    for chosen, sparse in damaged:
        with pytest.raises(ValueError, match="choose is a damaged plan"):
            deploy(model, x, choose={"chosen": chosen, "sparse": sparse})
    with pytest.raises(ValueError, match="seconds must be at least 0"):
        deploy(model, x, seconds=-1)


def test_report_separates_folding_from_zeros(clock):
    model = with_batch_statistics(
        mostly_zero(CNN(1, 16, (4, 8), 16, 10)), torch.randn(3, 1, 16, 16)
    )
    second = [one for one in model.modules() if isinstance(one, nn.Conv2d)][1]
    second.weight.data[:, :1] = 0  # a dead unit, so that the folded model is another one
    report = deploy(model, torch.randn(3, 1, 16, 16)).report
    assert report.removed == 1
    assert report.folded_time == 2.5
    assert "dense, batch norms folded" in str(report)
    assert report.batch == 3
    without = deploy(mostly_zero(MLP(8, (8,), 2), 0.6), torch.randn(2, 8)).report
    assert without.folded_time is None
    assert "batch norms folded" not in str(without)


def test_time_budget_and_progress(capsys):
    model, x = mostly_zero(MLP(64, (32,), 10)), torch.randn(3, 64)
    deployed = deploy(model, x, seconds=0, progress=True)
    assert deployed.report.dense_time > 0
    shown = capsys.readouterr().err
    assert "layer layers.1 (1 of 2)" in shown
    assert "the whole model" in shown
    assert shown.endswith("\r\033[K")
    deploy(model, x, seconds=0)
    assert capsys.readouterr().err == ""


def test_disturbed_measurement_is_reported(clock):
    clock.is_uncertain, clock.spread = True, 0.4
    report = deploy(mostly_zero(MLP(64, (32,), 10)), torch.randn(3, 64)).report
    assert "times varied by 40%, probably because of other processes" in str(report)


def test_gain_of_the_median_call_is_reported(clock):
    model, x = mostly_zero(MLP(64, (32,), 10)), torch.randn(3, 64)
    assert "median" not in str(deploy(model, x).report)
    clock.slowdown = 1.5
    report = deploy(model, x).report
    assert report.median_speedup == pytest.approx(1.5 * report.speedup)
    assert f"{report.median_speedup:.2f} times for the median call" in str(report)


def test_one_thread_on_a_busy_machine_is_reported(clock, monkeypatch):
    model, x = mostly_zero(MLP(64, (32,), 10)), torch.randn(3, 64)
    monkeypatch.setattr(pipeline.torch, "get_num_threads", lambda: 2)
    clock.threads = 2
    assert not deploy(model, x).report.notes
    clock.threads = 1
    assert "2 threads wait for each other: times are of 1 thread" in str(deploy(model, x).report)
