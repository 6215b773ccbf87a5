"""The step benchmark on small tensors. No times are asserted."""

import contextlib
import io
import json
import os
import sys

import pytest
from rich.console import Console

from pdecay.lab.bench import steps as bench
from pdecay.lab.bench import steps_report as bench_report
from pdecay.lab.bench.steps import Cost, Method
from pdecay.lab.data.sources import DataError
from pdecay.lab.models import MLP

CHOSEN = ("AdamW fused", "the paper's listing", "attach to AdamW fused", "PAdam fused")


@pytest.fixture
def small(monkeypatch):
    """A small model, and few methods on it, without new processes."""

    def methods():
        return ({name: bench.adam_methods()[name] for name in CHOSEN},)

    monkeypatch.setattr(bench, "MODELS", {"nanoGPT": lambda: MLP(20, [30], 5)})
    monkeypatch.setitem(bench.METHODS, "steps", methods)
    monkeypatch.setattr(bench, "_output_of", lambda code, variables: run_and_capture(code))


def run_and_capture(code):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {})
    return output.getvalue()


def test_steps_measures_every_method_and_norm(small):
    costs = bench.steps("steps", {"nanoGPT": 3}, processes=2)
    assert [(cost.method, cost.norm) for cost in costs[:3]] == [
        ("AdamW fused", ""),
        ("the paper's listing", "0.8"),
        ("attach to AdamW fused", "0.8"),
    ]
    assert [cost.norm for cost in costs[3:]] == list(bench.NORMS)
    assert costs[0].ratio == 1
    assert all(cost.weights == 20 * 30 + 30 + 30 * 5 + 5 for cost in costs)
    assert all(cost.milliseconds > 0 and cost.extra_bytes >= 0 for cost in costs)


def test_steps_reports_the_median_of_processes_in_turns(monkeypatch):
    ratios = {"MLP": [1.0, 5.0, 2.0], "GPT-2": [3.0, 4.0, 9.0]}
    calls = []

    def costs(function, arguments, variables):
        calls.append((function, *arguments))
        _, model, _ = arguments
        ratio = ratios[model][sum(call[2] == model for call in calls) - 1]
        return [Cost(model, 10, "PAdam fused", "1", 2 * ratio, ratio, 10 - ratio)]

    monkeypatch.setattr(bench, "_in_process", costs)
    first, second = bench.steps("steps", {"MLP": 7, "GPT-2": 8}, processes=3)
    assert first == Cost("MLP", 10, "PAdam fused", "1", 4.0, 2.0, 8.0, [1.0, 5.0, 2.0])
    assert second == Cost("GPT-2", 10, "PAdam fused", "1", 8.0, 4.0, 6.0, [3.0, 4.0, 9.0])
    assert (
        calls == [("measure_steps", "steps", "MLP", 7), ("measure_steps", "steps", "GPT-2", 8)] * 3
    )


def test_sgd_is_measured(monkeypatch):
    monkeypatch.setattr(bench, "MODELS", {"nanoGPT": lambda: MLP(20, [30], 5)})
    methods = bench.sgd_methods()
    del methods["PSGD compiled"]
    monkeypatch.setitem(bench.METHODS, "steps", lambda: (methods,))
    assert len(bench.measure_steps("steps", "nanoGPT", 2)) == 1 + len(bench.NORMS)


def test_growth_has_given_sizes():
    grown = bench.growth([1_000, 10_000], rounds=2, processes=1)
    assert [size for size, _ in grown] == [1_000, 1_000, 10_000, 10_000]
    assert all(abs(cost.weights / size - 1) < 0.1 for size, cost in grown)


def test_avx2_is_measured_in_a_process_without_avx512(small, monkeypatch):
    asked = []

    def run(code, variables):
        asked.append(variables)
        return run_and_capture(code)

    monkeypatch.setattr(bench, "_output_of", run)
    costs = bench.steps("steps_with_avx2", {"nanoGPT": 2}, processes=1)
    assert asked == [bench.AVX2]
    assert [*dict.fromkeys(cost.method for cost in costs)] == [*bench.methods_with_avx2()]
    assert [cost.norm for cost in costs if cost.method == "PAdam fused"] == list(bench.NORMS)


def test_a_process_with_avx2_has_no_avx512():
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    assert bench._output_of(code, bench.AVX2).strip() in ("AVX2", "DEFAULT")


def test_a_process_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "sched.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*filter(os.path.isabs, sys.path), "/of/this/process"])
    code = "import sched, sys; print(sys.path[-1])"
    assert bench._output_of(code, {}).strip() == "/of/this/process"


def test_share_of_the_target_is_measured():
    assert 0 < bench.target_share("char-GPT", (1, 8), 6) < 100


def test_first_use_has_cold_and_cached_times():
    assert set(bench.first_use()) == {"cold", "from the cache"}


def test_report_is_complete_without_training_data(tmp_path, monkeypatch):
    def costs(key, rounds, processes, say):
        return [
            Cost(model, 1_000_000, name, norm, 1.5, 0.75, 0.0, [0.75] * processes)
            for model in rounds
            for methods in bench.METHODS[key]()
            for name in methods
            for norm in methods[name].norms
        ]

    def no_data(iterations, say):
        raise DataError("no text here. Put it there.")

    monkeypatch.setattr(bench, "steps", costs)
    monkeypatch.setattr(bench, "training", no_data)
    console = Console(record=True, width=100)
    bench_report.run(tmp_path, ["step", "train"], quick=False, console=console)
    shown = console.export_text()
    assert "training is skipped: no text here. Put it there." in shown
    assert "PAdam fused" in shown
    assert "0.75" in shown
    written = json.loads((tmp_path / "bench.json").read_text())
    assert len(written["steps"]) == len(bench.MODELS) * sum(
        len(method.norms)
        for methods in (bench.adam_methods(), bench.sgd_methods())
        for method in methods.values()
    )
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_compiled_method_uses_compiled_kernel():
    assert isinstance(bench.adam_methods()["PAdam compiled"], Method)
    assert bench.adam_methods()["PAdam compiled"].path == "compiled"
