"""Penalties as objects: checks, equality, sums, copies and conversion."""

import copy
import dataclasses
import pickle
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from pdecay import Lp
from pdecay._core.penalty import Penalty, Sum, as_penalty
from pdecay._core.validation import check_number

from .penalties import PENALTIES


class TestBadNumbers:
    @pytest.mark.parametrize("name", ["p", "lam", "lr"])
    @pytest.mark.parametrize(
        ("value", "error", "rule"),
        [
            (-1, ValueError, "finite and >= 0"),
            (-1e-300, ValueError, "finite and >= 0"),
            (float("nan"), ValueError, "finite and >= 0"),
            (float("inf"), ValueError, "finite and >= 0"),
            (float("-inf"), ValueError, "finite and >= 0"),
            (np.float32("nan"), ValueError, "finite and >= 0"),
            (10**400, ValueError, "finite and >= 0"),
            (True, TypeError, "a number"),
            (False, TypeError, "a number"),
            ("0.1", TypeError, "a number"),
            (None, TypeError, "a number"),
            (0.1j, TypeError, "a number"),
            (Decimal("0.1"), TypeError, "a number"),
            ([0.1], TypeError, "a number"),
        ],
        ids=lambda x: repr(x)[:12] if not isinstance(x, type) else x.__name__,
    )
    def test_error_has_name_value_and_rule(self, name, value, error, rule):
        use = {
            "p": lambda p: Lp(p, 0.1),
            "lam": lambda lam: Lp(1, lam),
            "lr": lambda lr: Lp(1, 0.1).factor(np.ones(2), lr),
        }
        with pytest.raises(error) as raised:
            use[name](value)
        message = str(raised.value)
        assert f"{name} must be" in message
        assert rule in message
        assert repr(value) in message

    def test_tensor_is_rejected(self):
        with pytest.raises(TypeError, match="p must be a number"):
            Lp(torch.tensor(1.0), 0.1)

    def test_check_number_returns_float(self):
        for value in (2, np.float32(2), np.int64(2), Fraction(4, 2)):
            assert type(check_number("x", value)) is float
            assert check_number("x", value) == 2


class TestObjects:
    @pytest.mark.parametrize("penalty", [Lp(1, 0.1), Lp(1, 0.1) + Lp(2, 0.1)], ids=repr)
    def test_penalties_are_immutable(self, penalty):
        before = penalty.pairs()
        for field in dataclasses.fields(penalty):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(penalty, field.name, 3.0)
        penalty.pairs()[0][0] = 99
        assert penalty.pairs() == before

    def test_equality_and_hash(self):
        assert Lp(1, 0.1) == Lp(1.0, 0.1) == Lp(np.float64(1), 0.1)
        assert Lp(1, 0.1) != Lp(1, 0.2)
        assert Lp(1, 0.1) != Lp(2, 0.1)
        assert Lp(1, 0.1) + Lp(2, 3) == Lp(1, 0.1) + Lp(2, 3)
        assert Lp(1, 0.1) + Lp(2, 3) != Lp(1, 0.1)
        assert len({Lp(1, 0.1), Lp(1.0, 0.1), Lp(2, 3) + Lp(1, 1), Lp(2, 3) + Lp(1, 1)}) == 2

    def test_repr_round_trips(self):
        assert repr(Lp(1, 0.1)) == "Lp(p=1.0, lam=0.1)"
        for penalty in PENALTIES:
            assert eval(repr(penalty), {"Lp": Lp}) == penalty

    def test_numbers_become_plain_floats(self):
        penalty = Lp(np.float32(0.5), np.int64(2))
        assert type(penalty.p) is float
        assert type(penalty.lam) is float
        assert penalty.pairs() == [[0.5, 2.0]]

    def test_addition_concatenates_terms(self):
        a, b, c = Lp(0.5, 1), Lp(1, 2), Lp(2, 3)
        assert (a + b).terms == (a, b)
        assert (a + b) + c == a + (b + c) == sum([a, b, c])
        assert sum([a]) is a
        assert (a + b + c).pairs() == [[0.5, 1], [1, 2], [2, 3]]
        assert a.terms == (a,)
        assert all(isinstance(penalty, Penalty) for penalty in (a, a + b))

    @pytest.mark.parametrize("other", [1, 0.5, None, "Lp", [1, 2]], ids=repr)
    def test_adding_other_types_raises(self, other):
        with pytest.raises(TypeError):
            Lp(1, 1) + other
        with pytest.raises(TypeError):
            other + Lp(1, 1)

    def test_empty_sum_raises(self):
        with pytest.raises(ValueError, match="at least one Lp term, got none"):
            Sum(())

    @pytest.mark.parametrize(
        ("penalty", "absorbs"),
        [
            (Lp(0, 0.1), True),
            (Lp(1.99, 1e-9), True),
            (Lp(2, 0.1), False),
            (Lp(3, 0.1), False),
            (Lp(1, 0), False),
            (Lp(2, 0.1) + Lp(1, 0.1), True),
            (Lp(2, 0.1) + Lp(1, 0), False),
        ],
        ids=repr,
    )
    def test_absorbs_if_zero_is_a_fixed_point(self, penalty, absorbs):
        assert penalty.absorbs is absorbs
        assert (penalty.factor(np.zeros(1), 0.1) == 0) == absorbs

    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_copies_and_pickles_are_equal(self, penalty):
        assert copy.deepcopy(penalty) == penalty
        assert pickle.loads(pickle.dumps(penalty)) == penalty


class TestAsPenalty:
    @pytest.mark.parametrize("penalty", [None, *PENALTIES], ids=repr)
    def test_penalties_are_returned_unchanged(self, penalty):
        assert as_penalty(penalty) is penalty

    @pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
    def test_accepts_pairs_of_a_checkpoint(self, penalty):
        again = as_penalty(penalty.pairs())
        assert again.terms == penalty.terms
        assert as_penalty(tuple(map(tuple, penalty.pairs()))).terms == penalty.terms

    def test_empty_list_is_none(self):
        assert as_penalty([]) is None
        assert as_penalty(()) is None

    @pytest.mark.parametrize(
        "decay", [0.1, "Lp(1, 2)", "ab", [1, 0.1], [[1]], [[1, 2, 3]], {"p": 1}, Lp, object()]
    )
    def test_other_types_raise(self, decay):
        with pytest.raises(TypeError, match="must be an Lp, a sum of Lp, None or a list"):
            as_penalty(decay)

    @pytest.mark.parametrize(
        ("pairs", "error", "match"),
        [
            ([[1, -2]], ValueError, "lam must be finite and >= 0, got -2"),
            ([[1, 2], [float("nan"), 1]], ValueError, "p must be finite and >= 0, got nan"),
            ([["1", 2]], TypeError, "p must be a number, got '1'"),
            (["ab"], TypeError, "got"),
        ],
    )
    def test_invalid_pairs_raise(self, pairs, error, match):
        with pytest.raises(error, match=match):
            as_penalty(pairs)
