"""The algebra of labels: which positions are removed together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdecay.deployment.compact.units import FIXED, Units, fixed


def of(units, labels):
    return [units.of(int(label)) for label in labels]


def test_new_units_are_distinct():
    units = Units()
    assert len({*of(units, units.new(3)), *of(units, units.new(2))}) == 5
    assert units.new(1).tolist() == [FIXED]  # an axis of one position cannot be removed
    assert units.of(FIXED) == ()


def test_tied_labels_are_one_unit():
    units = Units()
    a, b, c = units.new(3), units.new(3), units.new(3)
    units.tie(a, b, "")
    units.tie(b, c, "")
    assert of(units, a) == of(units, b) == of(units, c)
    assert len(set(of(units, a))) == 3


def test_unit_tied_to_a_fixed_label_is_kept_for_its_reason():
    units = Units()
    a, b = units.new(2), units.new(2)
    units.keep(a[:1].tolist(), "a norm")
    units.tie(a, b, "a sum")
    assert of(units, b)[0] == ()
    assert units.reason(int(b[0])) == "a norm"
    assert len(of(units, b)[1]) == 1
    assert units.reason(int(b[1])) is None
    units.tie(b, fixed(2), "a sum")
    assert units.reason(int(a[1])) == "a sum"


def test_split_axis_belongs_to_both_parts():
    units = Units()
    whole = units.new(6)
    heads, dims = units.split(whole, (2, 3), "")
    assert of(units, whole) == [h + d for h in of(units, heads) for d in of(units, dims)]
    again = units.split(whole, (2, 3), "")
    assert [of(units, part) for part in again] == [of(units, heads), of(units, dims)]


def test_join_undoes_split():
    units = Units()
    heads, dims = units.new(2), units.new(3)
    whole = units.join([heads.repeat(3), np.tile(dims, 2)])
    again = units.split(whole, (2, 3), "")
    assert [of(units, part) for part in again] == [of(units, heads), of(units, dims)]


def test_join_ignores_fixed_parts():
    units = Units()
    channels = units.new(4)
    flat = units.join([channels.repeat(5), fixed(20)])
    assert of(units, flat) == [one for one in of(units, channels) for _ in range(5)]
    back, pixels = units.split(flat, (4, 5), "")
    assert of(units, back) == of(units, channels)
    assert of(units, pixels) == [()] * 5


def test_split_in_three_parts():
    units = Units()
    whole = units.new(3 * 2 * 4)
    three, heads, dims = units.split(whole, (3, 2, 4), "")
    units.keep(three.tolist(), "picked by number")
    units.keep(dims.tolist(), "scaled by their number")
    # Only the heads remain: a row of each third belongs to its head.
    assert of(units, whole) == of(units, np.tile(heads.repeat(4), 3))


def test_second_split_of_other_sizes_keeps_units():
    units = Units()
    whole = units.new(12)
    units.split(whole, (3, 4), "")
    first, second = units.split(whole, (2, 6), "split anew")
    assert of(units, whole) == [()] * 12
    assert of(units, first) == [()] * 2
    assert of(units, second) == [()] * 6
    assert units.reason(int(whole[0])) == "split anew"


def test_tied_products_are_matched_or_kept():
    units = Units()
    one, other = units.new(6), units.new(6)
    heads, dims = units.split(one, (2, 3), "")
    their_heads, their_dims = units.split(other, (2, 3), "")
    units.tie(one, other, "")
    assert of(units, heads) == of(units, their_heads)
    assert of(units, dims) == of(units, their_dims)
    units.tie(one, heads.repeat(3), "only the heads")
    assert of(units, one) == of(units, heads.repeat(3))
    assert units.reason(int(dims[0])) == "only the heads"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_unit_tied_to_a_product_becomes_it(order):
    units = Units()
    plain, whole = units.new(6), units.new(6)
    units.split(whole, (2, 3), "")
    pair = (plain, whole)
    units.tie(pair[order[0]], pair[order[1]], "")
    assert of(units, plain) == of(units, whole)
    assert all(len(one) == 2 for one in of(units, plain))


def test_latest_reason_is_returned():
    units = Units()
    whole = units.new(4)
    heads, dims = units.split(whole, (2, 2), "")
    units.keep(dims.tolist(), "first")
    units.keep(heads.tolist(), "second")
    assert units.reason(int(whole[0])) == "second"
    assert units.reason(units.fixed_label("never")) == "never"


SIZES = [(2, 6), (3, 4), (2, 2, 3)]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("tie"), st.integers(0, 4), st.integers(0, 4)),
        st.tuples(st.just("split"), st.integers(0, 4), st.sampled_from(SIZES)),
        st.tuples(st.just("fix"), st.integers(0, 4), st.integers(0, 11)),
        st.tuples(st.just("shuffle"), st.integers(0, 4), st.permutations(range(12))),
    ),
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS)
def test_removal_keeps_tied_axes_equal_and_split_axes_rectangular(actions):
    """The two invariants of the algebra, after any sequence of operations."""
    units = Units()
    axes = [units.new(12) for _ in range(5)]
    ties, splits = [], []
    for kind, one, other in actions:
        if kind == "tie":
            units.tie(axes[one], axes[other], "tie")
            ties.append((axes[one], axes[other]))
        elif kind == "split":
            splits.append((axes[one], other, units.split(axes[one], other, "split")))
        elif kind == "fix":
            units.keep([int(axes[one][other])], "fix")
        else:
            axes.append(axes[one][list(other)])
            axes[one] = axes.pop()
    for one, other in ties:
        assert [set(u) for u in of(units, one)] == [set(u) for u in of(units, other)]
    every = sorted({unit for axis in axes for found in of(units, axis) for unit in found})
    for removed in every:
        for whole, sizes, parts in splits:
            remains = np.array([removed not in found for found in of(units, whole)]).reshape(sizes)
            grid = np.ones(sizes, dtype=bool)
            for axis, part in enumerate(parts):
                own = np.array([removed not in found for found in of(units, part)])
                grid &= own.reshape([-1 if i == axis else 1 for i in range(len(sizes))])
            assert np.array_equal(remains, grid)
