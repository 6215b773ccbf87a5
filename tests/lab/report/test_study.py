from __future__ import annotations

import statistics

import pytest

from pdecay.lab.report.study import studies, text

from .synthetic import record


def test_tasks_scales_and_lengths_are_never_mixed():
    made = [
        record(task="digits"),
        record(task="digits", scale="quick"),
        record(task="digits", steps=200),
        record(task="fashion"),
    ]
    found = studies(made)
    assert [(s.task, s.scale, s.steps) for s in found] == [
        ("digits", "cpu", 200),
        ("digits", "cpu", 1500),
        ("digits", "quick", 1500),
        ("fashion", "cpu", 1500),
    ]
    assert all(len(s.runs) == 1 for s in found)


def test_seeds_of_a_setting_are_one_point(study):
    runs = [record(p=0.8, lam=0.01, seed=seed, sparsity=0.5 + seed / 10) for seed in (2, 0, 1)]
    found = study(*runs, record(p=0.8, lam=0.03), record(p=0.8, lam=0.01, lr=1e-3))
    assert found.has_seeds
    assert len(found.singles) == 5
    point = next(point for point in found.means if len(point.runs) > 1)
    assert [run["settings"]["seed"] for run in point.runs] == [0, 1, 2]
    accuracies = [run["result"]["accuracy"] for run in runs]
    assert point.accuracy == pytest.approx(statistics.fmean(accuracies))
    assert point.spread == pytest.approx(statistics.stdev(accuracies))
    assert point.sparsity == pytest.approx(0.6)
    assert point.tradeoff == pytest.approx(point.accuracy + 0.6)
    assert all(point.spread is None for point in found.singles)


def test_diverged_runs_are_kept_apart_and_make_their_setting_unreliable(study):
    found = study(
        record(p=0.8, lam=0.01, seed=0),
        record(p=0.8, lam=0.01, seed=1, diverged=True),
        record(p=0.8, lam=0.03, seed=0),
    )
    assert (len(found.runs), len(found.failed)) == (2, 1)
    assert {point.options["lam"]: point.reliable for point in found.means} == {
        0.01: False,
        0.03: True,
    }


def test_an_end_without_a_number_is_none(study):
    broken = record()
    broken["result"]["accuracy"] = None
    found = study(broken)
    assert (len(found.runs), len(found.failed)) == (0, 1)


def test_of_a_setting_that_ran_again_the_latest_counts(study):
    older = record(accuracy=40.0, finished="2026-01-01T00:00:00+00:00")
    newer = record(accuracy=45.0, finished="2026-02-01T00:00:00+00:00")
    for runs in ((older, newer), (newer, older)):
        found = study(*runs)
        assert [run["result"]["accuracy"] for run in found.runs] == [45.0]
        assert found.superseded == 1


def test_names_tell_settings_apart_and_no_more(study):
    found = study(
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


def test_methods_come_in_a_fixed_order(study):
    found = study(*(record(name) for name in ("oto", "target", "mine:M", "padam", "adamw", "gmp")))
    assert found.methods == ("adamw", "padam", "target", "gmp", "mine:M", "oto")


def test_keys_are_file_names_and_unlike():
    made = [record(task=task) for task in ("../../etc/x", "..", "a b", "a-b", "é")]
    keys = [found.key for found in studies(made)]
    assert len(set(keys)) == len(keys)
    assert all(key.replace("-", "").isalnum() and key.isascii() for key in keys)


def test_values_are_written_as_people_do():
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
