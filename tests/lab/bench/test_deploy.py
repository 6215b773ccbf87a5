"""The benchmark of sparse layers and deployed networks, at a small size. No times are asserted."""

import json

import pytest
import torch
from rich.console import Console

from pdecay.deployment.layers import kernel as layers_kernel
from pdecay.lab.bench import deploy as bench_deploy
from pdecay.lab.bench import deploy_report as bench_deploy_report
from pdecay.lab.data.sources import DataError

pytestmark = pytest.mark.skipif(bool(layers_kernel.available()), reason="no compiler")


@pytest.fixture
def digits():
    return bench_deploy.networks(quick=True)[0]


def test_layer_cases_have_required_speedups():
    cases = bench_deploy.layer_cases()
    assert len(cases) == 2 + 8 + 8
    aims = {(case.name.split(",")[0], case.input[0]): case.wanted for case in cases}
    assert aims["Conv2d 3x3", 1] == {0.9: 2.0, 0.95: 4.0, 0.99: 9.0}
    assert aims["Linear 1024x1024", 64] == {0.95: 5.0}


def test_network_is_trained_once(digits, tmp_path):
    messages = []
    first, result = bench_deploy.trained(digits, 0.9, tmp_path, messages.append)
    assert result["sparsity"] == pytest.approx(0.9, abs=0.02)
    assert messages
    messages.clear()
    second, same_result = bench_deploy.trained(digits, 0.9, tmp_path, messages.append)
    assert not messages
    assert same_result == result
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_report_prints_writes_and_draws(digits, tmp_path, monkeypatch):
    def no_data():
        raise DataError("no images here. Put them there.")

    missing = bench_deploy.Network("CIFAR-10 ResNet", no_data, 3.0)
    monkeypatch.setattr(bench_deploy, "networks", lambda quick: [digits, missing])
    monkeypatch.setattr(bench_deploy, "layer_cases", lambda: LINEAR)
    console = Console(record=True, width=140)
    before = torch.get_num_threads()
    bench_deploy_report.run(tmp_path, quick=True, console=console)
    shown = console.export_text()
    assert torch.get_num_threads() == before
    assert "CIFAR-10 ResNet is skipped: no images here. Put them there." in shown
    assert "Linear 1024x1024" in shown
    assert "digits MLP" in shown
    assert "other functions at 90% on 1 thread, batch 16: " in shown
    written = json.loads((tmp_path / "deploy.json").read_text())
    assert len(written["layers"]) == 1
    assert len(written["networks"]) == 4  # two sparsities, two batches
    assert all(one["deployed"] > 0 and one["ratio"] > 0 for one in written["networks"])
    assert all(taken > 0 for one in written["networks"] for _, taken in one["functions"])
    assert all(one["dense_file"] > 3 * one["file"] for one in written["networks"])
    tables = (tmp_path / "deploy.md").read_text().split("\n\n")
    assert tables[0].splitlines()[2].startswith("| Linear 1024x1024, 95 % | 1 | ")
    assert len(tables[1].splitlines()) == 2 + 4
    assert len({line.count("|") for line in tables[1].splitlines()}) == 1
    assert (tmp_path / "deploy.png").read_bytes().startswith(b"\x89PNG")


LINEAR = bench_deploy.layer_cases()[:1]
