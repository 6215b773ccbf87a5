import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdecay._sparsity import ranking
from pdecay._sparsity.ranking import (
    count_weights,
    count_zeros,
    group_of,
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
        tensors = [torch.full((3, 5), 0.5), torch.full((7,), -0.5), torch.full((2,), 0.1)]
        zero_smallest_(tensors, 2 + 15 + 3)
        assert [count_zeros([tensor]) for tensor in tensors] == [15, 3, 2]
        assert (tensors[1][:3] == 0).all()

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
    assert group_of(tensors) is None


def test_two_ranks_rank_shards_as_the_whole(tmp_path):
    """Run this file on each rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)


def _on_one_of_two_ranks(rank: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from pdecay import Lp, attach, prox
    from pdecay._sparsity.pruning import GradualMagnitudePruning, MagnitudePruning

    world = dist.group.WORLD
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(9, 4, generator=generator), torch.randn(5, generator=generator)]
    whole[0][2:7] = 0.5  # ties on both ranks: 3 of these rows on rank 0, 2 on rank 1
    cuts = [(5, 3), (0, 0)]  # rank 0 has the first rows, and none of the second tensor

    def shards():
        return [
            w[: cut[0]].clone() if rank == 0 else w[cut[0] :].clone()
            for w, cut in zip(whole, cuts, strict=True)
        ]

    expected = sorted_magnitudes(whole)
    for k in (1, 8, 20, 41):
        assert kth_magnitude(shards(), k, world) == expected[k - 1].item()
    # One rank without tensors, the other with doubles.
    lonely = [w.double() for w in whole] if rank == 1 else []
    assert kth_magnitude(lonely, 8, world) == expected[7].item()
    assert count_weights(shards(), world) == 41
    # Exactly k are set, ties in the order of ranks.
    at = int((expected < 0.5).sum())
    for k in (0, at, at + 1, at + 12, at + 13, at + 20, 41):
        mine = shards()
        zero_smallest_(mine, k, world)
        assert count_zeros(mine, world) == k
        ties_of_0 = min(max(k - at, 0), 12)
        if rank == 0 and at <= k <= at + 20:
            assert count_zeros([mine[0][2:5]]) == ties_of_0

    # The group of DTensors is found from their mesh.
    mesh = init_device_mesh("cpu", (2,))
    sharded = [distribute_tensor(w.clone(), mesh, [Shard(0)]) for w in whole]
    assert group_of(sharded) is not None
    assert kth_magnitude(sharded, 8) == expected[7].item()
    zero_smallest_(sharded, 8)
    assert count_zeros(sharded) == 8
    assert sum(int((w.full_tensor() == 0).sum()) for w in sharded) == 8
    replicated = distribute_tensor(whole[0].clone(), mesh, [Replicate()])
    assert group_of([replicated]) is None
    with pytest.raises(ValueError, match="cannot rank these weights together"):
        group_of([sharded[0], replicated])

    # Pruning and the proximal step give the same on sharded and on whole parameters.
    def trained(weight, pruning):
        param = torch.nn.Parameter(weight)
        optimizer = torch.optim.Adam([param], lr=0.05)
        attach(optimizer, Lp(0.8, 1e-3))
        hook = pruning(optimizer)
        for step in range(10):
            param.grad = torch.sin(param.detach() * 9 + step)
            optimizer.step()
        value = param.detach()
        return (value.full_tensor() if isinstance(value, DTensor) else value), hook.sparsity_now

    for pruning in (
        lambda optimizer: GradualMagnitudePruning(optimizer, 0.5, 10, every=1),
        lambda optimizer: MagnitudePruning(optimizer, 0.4, 10, every=2),
    ):
        one, sparsity = trained(whole[0].clone(), pruning)
        both, of_both = trained(distribute_tensor(whole[0].clone(), mesh, [Shard(0)]), pruning)
        assert torch.equal(one, both)
        assert sparsity == of_both > 0.1
    for penalty in (Lp(0.5, 0.1), Lp(0.8, 0.1), Lp(1.5, 0.1) + Lp(1, 0.1), Lp(0.8, 1) + Lp(3, 1)):
        step = prox.penalty_prox(penalty, sharded[0], 0.5).full_tensor()
        torch.testing.assert_close(step, prox.penalty_prox(penalty, sharded[0].full_tensor(), 0.5))


if __name__ == "__main__":
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2
    )
    _on_one_of_two_ranks(int(sys.argv[1]))
    torch.distributed.destroy_process_group()
