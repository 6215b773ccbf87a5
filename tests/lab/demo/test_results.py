"""The conclusions of the demo from made-up results."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdecay.lab.demo.results import TOLERANCE, Results, Summary
from pdecay.lab.demo.toy import Toy


def summary(method, accuracies, sparsity=0.0, **options) -> Summary:
    return Summary(
        tuple(
            {
                "settings": {"method": method, "seed": seed, "options": options},
                "result": {
                    "accuracy": accuracy,
                    "test_accuracy": accuracy - 1,
                    "sparsity": sparsity,
                },
            }
            for seed, accuracy in enumerate(accuracies)
        )
    )


def results(*sparse, dense=((0.01, 97.0), (0.3, 98.0))) -> Results:
    summaries = [summary("adamw", [accuracy], weight_decay=decay) for decay, accuracy in dense]
    summaries += [
        summary("padam", [accuracy], sparsity, p=0.8, lam=lam) for lam, accuracy, sparsity in sparse
    ]
    return Results(tuple(summaries), Toy({}, {}))


def test_names():
    elastic = summary("elastic", [90.0], p=0.8, lam=0.06, l2=0.1)
    assert elastic.name == "PAdam, Lp(0.8, 0.06), L2 0.1"
    assert summary("padam", [90.0], p=1.2, lam=1.0).name == "PAdam, Lp(1.2, 1)"
    assert summary("adamw", [90.0], weight_decay=0.01).name == "AdamW, L2 0.01"


def test_summary_is_mean_and_deviation_over_seeds():
    both = summary("adamw", [90.0, 100.0], weight_decay=0.1)
    assert both.accuracy == pytest.approx(95)
    assert both.test_accuracy == pytest.approx(94)
    assert both.spread == pytest.approx(math.sqrt(50))
    assert summary("adamw", [90.0], weight_decay=0.1).spread == 0


def test_dense_is_best_adamw():
    assert results((0.1, 99.0, 0.9)).dense.options == {"weight_decay": 0.3}


def test_sparsest_within_half_a_point_is_recommended():
    found = results((0.1, 98.5, 0.5), (0.2, 97.6, 0.9), (0.3, 97.4, 0.95), (0.4, 95.0, 0.99))
    assert found.recommended.options["lam"] == 0.2
    assert found.lost(found.recommended) == pytest.approx(0.4)


few = st.sampled_from([97.0, 97.4, 97.6, 98.0, 98.4])


@given(st.lists(st.tuples(few, st.sampled_from([0.5, 0.9, 0.95])), min_size=1, max_size=8))
def test_recommended_setting_is_not_dominated(pairs):
    found = results(*((0.1, accuracy, sparsity) for accuracy, sparsity in pairs))
    best = found.recommended
    assert not any(
        one.accuracy >= best.accuracy
        and one.sparsity >= best.sparsity
        and (one.accuracy, one.sparsity) != (best.accuracy, best.sparsity)
        for one in found.sparse
    )
    if any(found.lost(one) <= TOLERANCE for one in found.sparse):
        assert found.lost(best) <= TOLERANCE


def test_headline_states_the_numbers():
    found = results((0.1, 97.6, 0.912))
    assert found.headline() == (
        "91.2 % of the weights are zero at a validation accuracy of 97.6 % (test: 96.6 %); the "
        "best AdamW, dense, has 98.0 % (test: 97.0 %). PAdam with Lp(0.8, 0.1), one seed."
    )


def test_headline_reports_failure():
    found = results((0.1, 90.0, 0.9), (0.2, 10.0, 1.0))
    assert found.recommended.options["lam"] == 0.1
    assert found.headline().startswith(
        "No sparse run is within 0.5 points of AdamW. The closest: 90.0 %"
    )
