from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdecay.lab.report import best
from pdecay.lab.report.experiments import Point


def point(accuracy, sparsity, method="padam", **more):
    """Return a point with the compared values only."""
    result = {"accuracy": accuracy, "sparsity": sparsity}
    return Point(({"settings": {"method": method}, "result": result},), **more)


# Few values, so that ties are common.
MEASURES = st.tuples(
    st.integers(0, 6).map(lambda k: 40.0 + k), st.integers(0, 6).map(lambda k: k / 7)
)


def dominates(one, other):
    return (
        one.accuracy >= other.accuracy
        and one.sparsity >= other.sparsity
        and (one.accuracy > other.accuracy or one.sparsity > other.sparsity)
    )


@settings(deadline=None)
@given(st.lists(MEASURES, max_size=30))
def test_pareto_front_contains_undominated_points(measures):
    points = [point(*both) for both in measures]
    front = best.pareto_front(points)
    unbeaten = [p for p in points if not any(dominates(other, p) for other in points)]
    # Points that are equal in both measures appear once.
    assert {(p.accuracy, p.sparsity) for p in front} == {(p.accuracy, p.sparsity) for p in unbeaten}
    assert len({(p.accuracy, p.sparsity) for p in front}) == len(front)
    assert [p.sparsity for p in front] == sorted(p.sparsity for p in front)
    assert [p.accuracy for p in front] == sorted((p.accuracy for p in front), reverse=True)


@settings(deadline=None)
@given(st.lists(MEASURES, max_size=30), st.sampled_from(best.LEVELS))
def test_at_sparsity_agrees_with_front(measures, level):
    points = [point(*both) for both in measures]
    found = best.at_sparsity(points, level)
    sparse = [p for p in best.pareto_front(points) if p.sparsity >= level - best.ROUNDING]
    assert (found is None) == (not sparse)
    if found:
        assert found.accuracy == max(p.accuracy for p in sparse)


def test_level_includes_sparsities_that_round_to_it():
    points = [point(48.0, 0.8996), point(47.0, 0.9), point(46.0, 0.95)]
    assert best.at_sparsity(points, 0.9) is points[0]
    assert best.at_sparsity([point(48.0, 0.8994), *points[1:]], 0.9) is points[1]
    assert best.at_sparsity(points, 0.99) is None


def test_setting_with_diverged_seed_is_never_best():
    points = [point(49.0, 0.9, diverged=1), point(40.0, 0.1)]
    assert best.pareto_front(points) == [points[1]]
    assert best.at_sparsity(points, 0.0) is points[1]
    assert best.best_tradeoff(points) is points[1]
    assert best.sparsest(points, 0.0) is points[1]


def test_dense_reference_is_best_adamw():
    points = [point(49.0, 0.0), point(48.0, 0.0, "adamw"), point(48.5, 0.0, "adamw")]
    assert best.dense_reference(points) is points[2]
    assert best.dense_reference(points[:1]) is None


def test_best_tradeoff():
    points = [point(49.0, 0.0), point(48.4, 0.7), point(47.0, 0.99)]
    assert best.best_tradeoff(points) is points[1]
    assert points[1].tradeoff == pytest.approx(49.1)


def test_sparsest_above_accuracy_floor():
    points = [point(49.0, 0.5), point(47.5, 0.9501), point(48.0, 0.95), point(46.0, 0.99)]
    # 95.01 and 95.00 % are equally sparse; the more accurate one is named
    assert best.sparsest(points, 47.0) is points[2]
    assert best.sparsest(points, 50.0) is None


def test_no_points_have_no_best():
    assert best.pareto_front([]) == []
    assert best.at_sparsity([], 0.0) is None
    assert best.best_tradeoff([]) is None


@pytest.mark.parametrize(
    ("accuracies", "low"),
    [
        ([], []),
        ([48.0], []),
        ([48.0, 10.0], []),  # the median is the lower of two
        ([48.0, 47.5, 10.0], [10.0]),
        ([48.0, 47.0, 46.0, 42.0], []),
        ([98.4, 98.3, 98.2, 98.1, 97.0, 96.0, 10.2, 10.2], [10.2, 10.2]),
        ([98.0, 98.0, 98.0, 97.1, 96.9], [96.9]),  # one percentage point is never cropped
    ],
)
def test_cropped_points_are_far_below_median(accuracies, low):
    found = best.cropped([point(accuracy, 0.5) for accuracy in accuracies])
    assert [p.accuracy for p in found] == low
