import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdecay._sparsity import passes, ranking
from pdecay._sparsity.ranking import (
    count_weights,
    count_zeros,
    kth_magnitude,
    zero_smallest_,
)


def sorted_magnitudes(tensors):
    return torch.cat([tensor.detach().reshape(-1).abs().double() for tensor in tensors]).sort()[0]


def smallest(tensors, k):
    """Return the indices of the k smallest magnitudes by a stable sort: the earliest first."""
    flat = torch.cat([tensor.detach().reshape(-1).abs().double() for tensor in tensors])
    return flat.sort(stable=True)[1][:k]


def drawn(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 5), (3, 2, 4), (11,), (0, 3), ()]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


HARD = {
    "ties": torch.tensor([0.5, -0.5, 0.25, 0.5, -0.25, 1.0, 0.5]),
    "all equal": torch.full((50,), -0.3),
    "zeros": torch.tensor([0.0, -0.0, 1.0, 0.0, -1.0]),
    "all zero": torch.zeros(9),
    "subnormal": torch.tensor([1e-45, -3e-45, 0.0, 1e-40, 1e-38, -1e-45, 1.2e-38]),
    "infinite": torch.tensor([math.inf, 1.0, -math.inf, 3e38, 0.0]),
    "neighbours": torch.tensor([1.0, 1.0 + 2**-23, 1.0 - 2**-24, -1.0, -(1.0 + 2**-23)]),
    "one": torch.tensor([-2.0]),
}
hard = pytest.mark.parametrize("w", HARD.values(), ids=HARD.keys())


class TestKthMagnitude:
    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
    )
    def test_every_rank(self, dtype):
        tensors = drawn(0, dtype)
        expected = sorted_magnitudes(tensors)
        found = [kth_magnitude(tensors, k) for k in range(1, len(expected) + 1)]
        assert found == expected.tolist()

    @hard
    def test_hard_cases(self, w):
        found = [kth_magnitude([w], k) for k in range(1, len(w) + 1)]
        assert found == sorted_magnitudes([w]).tolist()

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.lists(st.floats(width=32, allow_nan=False), max_size=8), max_size=5),
        st.data(),
    )
    def test_any_numbers(self, lists, data):
        tensors = [torch.tensor(one) for one in lists]
        total = sum(map(len, lists))
        if total:
            k = data.draw(st.integers(1, total))
            assert kth_magnitude(tensors, k) == sorted_magnitudes(tensors)[k - 1].item()

    def test_doubles_that_are_equal_in_single_precision(self):
        w = 1 + torch.arange(10, dtype=torch.float64).flip(0) * 2.0**-52
        assert [kth_magnitude([w], k) for k in range(1, 11)] == w.flip(0).tolist()

    def test_mixed_precision(self):
        tensors = [torch.tensor([1.0, 3.0]), torch.tensor([1 + 1e-12, 2.0], dtype=torch.float64)]
        assert kth_magnitude(tensors, 1) == 1.0
        assert kth_magnitude(tensors, 2) == 1 + 1e-12
        assert kth_magnitude([tensors[0].half(), tensors[0].bfloat16()], 3) == 3.0

    def test_complex_by_magnitude(self):
        assert kth_magnitude([torch.tensor([3 + 4j, 1 + 0j, 0 - 2j])], 3) == 5.0

    def test_nan_ranks_above_infinity(self):
        w = torch.tensor([math.nan, 1.0, math.inf, -math.nan])
        assert [kth_magnitude([w], k) for k in (1, 2)] == [1.0, math.inf]
        assert math.isnan(kth_magnitude([w], 3))

    def test_many_pieces_and_strides(self):
        w = torch.randn(300, 401, generator=torch.Generator().manual_seed(1))
        expected = sorted_magnitudes([w])
        for view in (w, w.T, w.flip(0)):
            assert kth_magnitude([view], 60_000) == expected[59_999].item()
        assert kth_magnitude([w[:, ::3]], 7) == sorted_magnitudes([w[:, ::3]])[6].item()

    def test_accepts_parameters(self):
        assert kth_magnitude([torch.nn.Parameter(torch.tensor([2.0, -1.0]))], 2) == 2.0

    @pytest.mark.parametrize("k", [0, -1, 4])
    def test_rejects_rank_out_of_range(self, k):
        with pytest.raises(ValueError, match=f"from 1 to the number of weights, 3, got {k}"):
            kth_magnitude([torch.ones(3)], k)

    def test_rejects_bad_arguments(self):
        with pytest.raises(ValueError, match="the number of weights, 0"):
            kth_magnitude([], 1)
        with pytest.raises(TypeError, match=r"k must be an integer, got 1\.0"):
            kth_magnitude([torch.ones(3)], 1.0)
        with pytest.raises(TypeError, match=r"only floating-point weights.*torch\.int64"):
            kth_magnitude([torch.ones(3, dtype=torch.int64)], 1)


class TestZeroSmallest:
    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
    )
    def test_every_count(self, dtype):
        for k in range(71):
            tensors = drawn(2, dtype)
            before = torch.cat([tensor.reshape(-1) for tensor in tensors])
            expected = before.clone()
            expected[smallest(tensors, k)] = 0
            largest = zero_smallest_(tensors, k)
            assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in tensors]), expected)
            assert largest == (sorted_magnitudes([before])[k - 1].item() if k else 0.0)

    @hard
    def test_hard_cases(self, w):
        for k in range(len(w) + 1):
            pruned, expected = w.clone(), w.clone()
            expected[smallest([w], k)] = 0
            zero_smallest_([pruned], k)
            assert torch.equal(pruned, expected)

    def test_ties_over_tensors_and_pieces(self, monkeypatch):
        monkeypatch.setattr(ranking, "_PIECE", {"cpu": 4})
        monkeypatch.setattr(passes, "supports", lambda *tensors: False)
        tensors = [torch.full((3, 5), 0.5), torch.full((7,), -0.5), torch.full((2,), 0.1)]
        zero_smallest_(tensors, 2 + 15 + 3)
        assert [count_zeros([tensor]) for tensor in tensors] == [15, 3, 2]
        assert (tensors[1][:3] == 0).all()

    @pytest.mark.parametrize("threads", [1, 2])
    def test_c_and_torch_agree(self, monkeypatch, threads):
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(300, 500, generator=generator), torch.zeros(1000)]
        tensors += [torch.randint(0, 5, (90_000,), generator=generator).float()]
        squares = [torch.rand(tensor.shape, generator=generator) for tensor in tensors]
        if not passes.supports(tensors[0]):
            pytest.skip("no C compiler")
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            scores = [torch.empty_like(tensor) for tensor in tensors]
            for w, v, score in zip(tensors, squares, scores, strict=True):
                passes.scores_(score, w, v)
                torch.testing.assert_close(score, w.abs() * v**0.25)
            for k in (1, 900, 20_000, 200_000):
                in_c = [tensor.clone() for tensor in tensors]
                largest = zero_smallest_(in_c, k, scores=scores)
                with monkeypatch.context() as patch:
                    patch.setattr(passes, "supports", lambda *tensors: False)
                    by_torch = [tensor.clone() for tensor in tensors]
                    assert zero_smallest_(by_torch, k, scores=scores) == largest
                assert all(torch.equal(*pair) for pair in zip(in_c, by_torch, strict=True))
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("sampled_from", [1, 1 << 40])
    @pytest.mark.parametrize("threads", [1, 2])
    def test_scores_that_are_not_stored(self, monkeypatch, threads, sampled_from):
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(700, 500, generator=generator), torch.zeros(1000)]
        tensors += [torch.randint(-5, 5, (90_000,), generator=generator).float(), torch.ones(0)]
        tensors[0][:100] *= 1e-4  # the first block of each tensor is not like the others
        squares = [torch.rand(tensor.shape, generator=generator) for tensor in tensors]
        squares[2] = torch.ones_like(tensors[2])  # ties
        squares[0][5] = math.inf
        squares[0][6] = 0.0
        if not passes.supports(tensors[0]):
            pytest.skip("no C compiler")
        scores = [torch.empty_like(tensor) for tensor in tensors]
        for w, v, score in zip(tensors, squares, scores, strict=True):
            passes.scores_(score, w, v)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for k in (1, 900, 20_000, 60_000, 200_000, 440_000, 441_000):
                monkeypatch.setattr(ranking, "_SAMPLED_FROM", 1 << 40)
                expected = [tensor.clone() for tensor in tensors]
                largest = zero_smallest_(expected, k, scores=scores)
                monkeypatch.setattr(ranking, "_SAMPLED_FROM", sampled_from)
                found = [tensor.clone() for tensor in tensors]
                assert zero_smallest_(found, k, squares=squares) == largest
                assert all(map(torch.equal, found, expected))
        finally:
            torch.set_num_threads(before)

    def test_misleading_sample_is_not_used(self, monkeypatch):
        weights = torch.rand(40 * 4096) + 1
        weights[:4096] = 0.5  # the only block in the sample
        if not passes.supports(weights):
            pytest.skip("no C compiler")
        monkeypatch.setattr(ranking, "_SAMPLED_FROM", 1)
        monkeypatch.setattr(ranking, "_SAMPLE", 100)
        zero_smallest_([weights], 10_000)
        assert count_zeros([weights]) == 10_000

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_default_dtype_and_device_are_ignored(self, monkeypatch, dtype):
        weights = torch.randn(40 * 4096, generator=torch.Generator().manual_seed(0))
        expected = weights.clone()
        largest = zero_smallest_([expected], 70_000)
        monkeypatch.setattr(ranking, "_SAMPLED_FROM", 1)
        monkeypatch.setattr(ranking, "_SAMPLE", 2)
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                assert zero_smallest_([weights], 70_000) == largest
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(weights, expected)

    def test_strided_views_and_parameters(self):
        base = torch.arange(1.0, 13.0).reshape(3, 4)
        zero_smallest_([base.T], 3)
        assert base[0].tolist() == [0, 0, 0, 4]
        param = torch.nn.Parameter(torch.tensor([[3.0, -1.0]]))
        zero_smallest_([param], 1)
        assert param.tolist() == [[3.0, 0.0]]
        assert param.requires_grad

    def test_zeros_are_positive_and_nan_is_kept(self):
        w = torch.tensor([-0.0, math.nan, -1e-9, 2.0])
        zero_smallest_([w], 2)
        assert not torch.signbit(w[[0, 2]]).any()
        assert w[1].isnan()

    def test_ranks_by_scores(self):
        tensors = [torch.tensor([[3.0, -1.0], [2.0, 0.0]]), torch.tensor([5.0, 0.5])]
        scores = [torch.tensor([[0.1, 4.0], [0.3, 0.0]]), torch.tensor([0.2, 9.0])]
        assert zero_smallest_(tensors, 3, scores=scores) == pytest.approx(0.2)
        assert tensors[0].tolist() == [[0.0, -1.0], [2.0, 0.0]]
        assert tensors[1].tolist() == [0.0, 0.5]

    @pytest.mark.parametrize("k", [-1, 4])
    def test_rejects_bad_counts(self, k):
        with pytest.raises(ValueError, match="k must be from 1 to the number of weights, 3"):
            zero_smallest_([torch.ones(3)], k)


def test_counts():
    tensors = [torch.tensor([[0.0, -0.0], [1.0, 1e-45]]), torch.zeros(3), torch.ones(0)]
    assert count_zeros(tensors) == 5
    assert count_weights(tensors) == 7
    assert count_zeros([]) == 0
