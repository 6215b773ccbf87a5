"""Position encodings: a literal reference decoder, the entropy bound, and invalid data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pdecay.deployment.files import FileFormatError, codec
from pdecay.deployment.files.codec import Encoding, check, encode, lower_bound, positions


def encoded(marks):
    """Encode a mask in blocks, as for a tensor."""

    def blocks():
        return (marks[i : i + codec.BLOCK] for i in range(0, len(marks), codec.BLOCK))

    encoding, pieces = encode(blocks, len(marks), int(marks.sum()))
    data = np.concatenate([np.empty(0, np.uint8), *pieces])
    assert len(data) == encoding.nbytes
    return encoding, data


def decoded(encoding, data):
    check(encoding, data)
    return np.concatenate([np.empty(0, np.int64), *positions(encoding, data)])


def reference_positions(encoding, data):
    """Decode one bit at a time, as the documentation describes the format."""
    bits = [int(byte) >> i & 1 for byte in data for i in range(8)]
    if encoding.kind == "mask":
        return [i for i in range(encoding.size) if bits[i]]
    planes = [bits[8 * encoding.plane_bytes * b :] for b in range(encoding.low_bits)]
    unary = iter(bits[8 * encoding.plane_bytes * encoding.low_bits :])
    found, place = [], -1
    for i in range(encoding.gap_count):
        gap = 0
        while not next(unary):
            gap += 1 << encoding.low_bits
        gap += sum(plane[i] << b for b, plane in enumerate(planes))
        place += gap + 1
        found.append(place)
    if encoding.gap_count == encoding.count:
        return found
    return sorted(set(range(encoding.size)) - set(found))


def random_marks(size, share, seed=0):
    return np.random.default_rng(seed).random(size) < share


MARKS = st.one_of(
    hnp.arrays(bool, st.integers(0, 600)),
    st.builds(
        random_marks,
        st.integers(0, 5000),
        st.sampled_from([0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1]),
        st.integers(0, 99),
    ),
)


@settings(deadline=None)
@given(MARKS)
def test_decoding_matches_reference(marks):
    encoding, data = encoded(marks)
    expected = np.flatnonzero(marks)
    assert np.array_equal(decoded(encoding, data), expected)
    assert np.array_equal(reference_positions(encoding, data), expected)


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.01, 0.4, 0.5, 0.6, 0.99, 1 - 1e-5, 1.0])
def test_round_trip_over_many_blocks(share):
    marks = random_marks(3 * codec.BLOCK + 77, share)
    assert np.array_equal(decoded(*encoded(marks)), np.flatnonzero(marks))


@pytest.mark.parametrize("share", [0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5])
@pytest.mark.parametrize("rare_are_zeros", [False, True])
def test_random_positions_are_within_4_percent_of_entropy(share, rare_are_zeros):
    marks = random_marks(1 << 20, 1 - share if rare_are_zeros else share)
    encoding, _ = encoded(marks)
    entropy = codec._entropy(len(marks), int(marks.sum())) / 8
    assert entropy <= encoding.nbytes + 8
    assert encoding.nbytes <= 1.04 * entropy


@pytest.mark.parametrize(
    "structure",
    [
        lambda i: i % 1000 < 50,  # live columns
        lambda i: i // 1000 % 10 == 0,  # live rows
        lambda i: i < 100_000,  # a block
        lambda i: i % 17 == 0,
        lambda i: (i * i // 77) % 31 == 0,
        lambda i: i // 1000 < i % 1000,  # a triangle
        lambda i: i == 999_999,
    ],
)
def test_structured_positions_are_within_11_percent_of_entropy(structure):
    marks = structure(np.arange(1_000_000))
    encoding, data = encoded(marks)
    assert np.array_equal(decoded(encoding, data), np.flatnonzero(marks))
    entropy = codec._entropy(len(marks), int(marks.sum())) / 8
    assert encoding.nbytes <= 1.11 * entropy + encoding.low_bits + 1  # at least a byte each


def test_gaps_of_more_than_32_bits():
    """Encode gaps directly: a tensor of that size would not fit into memory."""
    gaps = [np.array([2**33, 5, 2**32 - 1], np.uint64)]
    size = sum(int(gap) + 1 for gap in gaps[0])
    encoding = codec._best_rice(gaps, Encoding("mask", size, 3))
    (data,) = codec._write_gaps(gaps, encoding)
    found = decoded(encoding, data)
    assert found.tolist() == [2**33, 2**33 + 6, 2**33 + 6 + 2**32]
    with pytest.raises(FileFormatError, match="gaps exceed"):
        check(Encoding("gaps", size - 1, 3, encoding.low_bits, encoding.unary_bytes), data)


def test_lower_bound():
    assert lower_bound(1000, 0, 4) == 0
    assert lower_bound(1000, 1000, 4) == 4000
    assert lower_bound(1000, 500, 4) == 500 * 4 + 1000 / 8
    assert lower_bound(10**6, 50_000, 4) == pytest.approx(50_000 * 4 + 286_397 / 8, rel=1e-5)
    assert lower_bound(1000, 999, 1) == 1000  # omitting one zero byte saves nothing
    exact = math.log2(math.comb(1000, 70)) / 8
    assert exact < lower_bound(1000, 70, 4) - 280 < 1.05 * exact


GAPS = encoded(random_marks(4000, 0.05))
ZEROS = encoded(random_marks(4000, 0.95))
MASK = encoded(random_marks(4001, 0.5))


@pytest.mark.parametrize("case", [GAPS, ZEROS, MASK], ids=["gaps", "zeros", "mask"])
@settings(deadline=None)
@given(data=st.data())
def test_checked_data_decodes_to_valid_positions(case, data):
    encoding, good = case
    bad = good.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decoded(encoding, bad)
    except FileFormatError:
        return
    assert len(found) == encoding.count
    assert (np.diff(found) > 0).all()
    assert 0 <= found[0] <= found[-1] < encoding.size


def changed(data, index, value):
    data = data.copy()
    data[index] = value
    return data


@pytest.mark.parametrize(
    ("encoding", "data", "message"),
    [
        (MASK[0], changed(MASK[1], 5, MASK[1][5] ^ 1), "does not mark"),
        (MASK[0], changed(changed(MASK[1], -1, MASK[1][-1] | 128), 5, 0), "does not mark"),
        (GAPS[0], changed(GAPS[1], -1, 0), "number of gaps is not"),
        (GAPS[0], changed(GAPS[1], -1, 255), "number of gaps is not"),
        (GAPS[0], changed(GAPS[1], GAPS[0].plane_bytes - 1, 255), "after the last gap"),
        (Encoding("gaps", 100, 1, 0, 1), np.array([0], np.uint8), "number of gaps is not"),
        (Encoding("gaps", 7, 1, 0, 1), np.array([128], np.uint8), "gaps exceed"),
        (Encoding("gaps", 100, 1, 62, 1), np.array([0] * 62 + [2], np.uint8), "gaps exceed"),
        (Encoding("gaps", 100, 0, 0, 1), np.array([0], np.uint8), "number of gaps is not"),
    ],
)
def test_invalid_positions_are_rejected(encoding, data, message):
    with pytest.raises(FileFormatError, match=message):
        check(encoding, data)
