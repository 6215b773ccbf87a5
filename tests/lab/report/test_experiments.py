from __future__ import annotations

import statistics

import pytest

from pdecay.lab.report import best
from pdecay.lab.report.experiments import experiments, text

from .synthetic import record


def test_records_are_grouped_by_task_scale_and_steps():
    made = [
        record(task="digits"),
        record(task="digits", scale="quick"),
        record(task="digits", steps=200),
        record(task="fashion"),
    ]
    found = experiments(made)
    assert [(s.task, s.scale, s.steps) for s in found] == [
        ("digits", "cpu", 200),
        ("digits", "cpu", 1500),
        ("digits", "quick", 1500),
        ("fashion", "cpu", 1500),
    ]
    assert all(len(s.runs) == 1 for s in found)


def test_seeds_are_averaged(experiment):
    runs = [record(p=0.8, lam=0.01, seed=seed, sparsity=0.5 + seed / 10) for seed in (2, 0, 1)]
    found = experiment(*runs, record(p=0.8, lam=0.03), record(p=0.8, lam=0.01, lr=1e-3))
    assert found.has_seeds
    assert len(found.singles) == 5
    point = next(point for point in found.means if len(point.runs) > 1)
    assert [run["settings"]["seed"] for run in point.runs] == [0, 1, 2]
    accuracies = [run["result"]["accuracy"] for run in runs]
    assert point.accuracy == pytest.approx(statistics.fmean(accuracies))
    assert point.deviation == pytest.approx(statistics.stdev(accuracies))
    assert point.sparsity == pytest.approx(0.6)
    assert point.tradeoff == pytest.approx(point.accuracy + 0.6)
    assert all(point.deviation is None for point in found.singles)


def test_diverged_seed_makes_setting_unreliable(experiment):
    found = experiment(
        record(p=0.8, lam=0.01, seed=0),
        record(p=0.8, lam=0.01, seed=1, diverged=True),
        record(p=0.8, lam=0.03, seed=0),
    )
    assert (len(found.runs), len(found.failed)) == (2, 1)
    assert {point.options["lam"]: point.reliable for point in found.means} == {
        0.01: False,
        0.03: True,
    }


def test_run_without_accuracy_counts_as_failed(experiment):
    broken = record()
    broken["result"]["accuracy"] = None
    found = experiment(broken)
    assert (len(found.runs), len(found.failed)) == (0, 1)


def test_latest_result_of_a_run_counts(experiment):
    older = record(accuracy=40.0, finished="2026-01-01T00:00:00+00:00")
    newer = record(accuracy=45.0, finished="2026-02-01T00:00:00+00:00")
    for runs in ((older, newer), (newer, older)):
        found = experiment(*runs)
        assert [run["result"]["accuracy"] for run in found.runs] == [45.0]
        assert found.superseded == 1


def test_names_show_distinguishing_options(experiment):
    found = experiment(
        record("padam", p=0.8, lam=0.01),
        record("elastic", p=0.8, lam=0.01, l2=2e-3),
        record("mine:M", speed=1, mode="a"),
        record("mine:M", speed=2, mode="a"),
    )
    assert [found.name(point) for point in found.means] == [
        "padam, p = 0.8, lam = 0.01, lr = 0.01",
        "elastic, p = 0.8, lam = 0.01, lr = 0.01",
        "mine:M, speed = 1, lr = 0.01",
        "mine:M, speed = 2, lr = 0.01",
    ]


def test_order_of_methods(experiment):
    found = experiment(
        *(record(name) for name in ("oto", "target", "mine:M", "padam", "adamw", "gmp"))
    )
    assert found.methods == ("adamw", "padam", "target", "gmp", "mine:M", "oto")


def test_keys_are_unique_file_names():
    tasks = ("../../etc/x", "..", "a b", "a-b", "é", 300 * "x", "y" + 300 * "x")
    made = [record(task=task) for task in tasks]
    keys = [found.key for found in experiments(made)]
    assert len(set(keys)) == len(keys)
    assert all(len(key) < 120 for key in keys)
    assert all(key.replace("-", "").isalnum() and key.isascii() for key in keys)


def test_format_of_values():
    assert [text(value) for value in (0.8, 1.0, 1e-5, 3, "fast", True, None, [1, 2])] == [
        "0.8",
        "1",
        "1e-05",
        "3",
        "fast",
        "true",
        "null",
        "[1, 2]",
    ]


def test_collapsed_network_is_never_recommended(experiment):
    found = experiment(
        record("adamw", accuracy=90.0, sparsity=0.0), record(p=0.8, accuracy=10.0, sparsity=0.99)
    )
    dense, collapsed = found.means
    assert collapsed.collapsed
    assert not collapsed.recommended
    assert best.pareto_front(found.means) == [dense]
    assert best.at_sparsity(found.means, 0.9) is collapsed


def test_test_accuracy_is_averaged_if_all_runs_have_it(experiment):
    runs = [record(p=0.8, seed=seed) for seed in (0, 1)]
    assert not experiment(*runs).has_test_accuracy
    for seed, run in enumerate(runs):
        run["result"]["test_accuracy"] = 40.0 + seed
    found = experiment(*runs)
    assert found.has_test_accuracy
    assert found.means[0].test_accuracy == pytest.approx(40.5)
