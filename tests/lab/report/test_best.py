from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdecay.lab.report import best
from pdecay.lab.report.study import Point


def point(accuracy, sparsity, method="padam", **more):
    """A point of a record that has no more than what is compared."""
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
def test_the_front_is_what_nothing_beats(measures):
    points = [point(*both) for both in measures]
    front = best.front(points)
    unbeaten = [p for p in points if not any(dominates(other, p) for other in points)]
    # Of points that are equal in both, one stands for all.
    assert {(p.accuracy, p.sparsity) for p in front} == {(p.accuracy, p.sparsity) for p in unbeaten}
    assert len({(p.accuracy, p.sparsity) for p in front}) == len(front)
    assert [p.sparsity for p in front] == sorted(p.sparsity for p in front)
    assert [p.accuracy for p in front] == sorted((p.accuracy for p in front), reverse=True)


@settings(deadline=None)
@given(st.lists(MEASURES, max_size=30), st.sampled_from(best.LEVELS))
def test_the_table_reads_off_the_front(measures, level):
    points = [point(*both) for both in measures]
    found = best.above(points, level)
    sparse = [p for p in best.front(points) if p.sparsity >= level - best.ROUNDING]
    assert (found is None) == (not sparse)
    if found:
        assert found.accuracy == max(p.accuracy for p in sparse)


def test_a_level_is_met_where_it_rounds_to_it():
    points = [point(48.0, 0.8996), point(47.0, 0.9), point(46.0, 0.95)]
    assert best.above(points, 0.9) is points[0]
    assert best.above([point(48.0, 0.8994), *points[1:]], 0.9) is points[1]
    assert best.above(points, 0.99) is None


def test_a_setting_that_diverged_for_some_seed_is_never_the_best():
    points = [point(49.0, 0.9, diverged=1), point(40.0, 0.1)]
    assert best.front(points) == [points[1]]
    assert best.above(points, 0.0) is points[1]
    assert best.balanced(points) is points[1]
    assert best.sparsest(points, 0.0) is points[1]


def test_the_best_adamw():
    points = [point(49.0, 0.0), point(48.0, 0.0, "adamw"), point(48.5, 0.0, "adamw")]
    assert best.adamw(points) is points[2]
    assert best.adamw(points[:1]) is None


def test_the_trade_off_weighs_a_point_of_accuracy_like_all_weights():
    points = [point(49.0, 0.0), point(48.4, 0.7), point(47.0, 0.99)]
    assert best.balanced(points) is points[1]
    assert points[1].tradeoff == pytest.approx(49.1)


def test_the_sparsest_above_a_floor():
    points = [point(49.0, 0.5), point(47.5, 0.9501), point(48.0, 0.95), point(46.0, 0.99)]
    # 95.01 and 95.00 % are equally sparse; the more accurate one is named
    assert best.sparsest(points, 47.0) is points[2]
    assert best.sparsest(points, 50.0) is None


def test_nothing_is_best_of_nothing():
    assert best.front([]) == []
    assert best.above([], 0.0) is None
    assert best.balanced([]) is None


@pytest.mark.parametrize(
    ("accuracies", "low"),
    [
        ([], []),
        ([48.0], []),
        ([48.0, 10.0], []),  # which of two is the exception?
        ([48.0, 47.5, 10.0], [10.0]),
        ([48.0, 47.0, 46.0, 42.0], []),
        ([98.4, 98.3, 98.2, 98.1, 97.0, 96.0, 10.2, 10.2], [10.2, 10.2]),
        ([98.0, 98.0, 98.0, 97.1, 96.9], [96.9]),  # a point is always room
    ],
)
def test_what_has_collapsed_is_far_below_the_median(accuracies, low):
    found = best.collapsed([point(accuracy, 0.5) for accuracy in accuracies])
    assert [p.accuracy for p in found] == low
