"""The two passes in C around an update by other code."""

import gc
import weakref

import pytest
import torch

import pdecay
from pdecay._optim import engine
from pdecay._optim.kernels import native
from pdecay._optim.kernels.old_weights import OldWeights

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Copies of more than 2 M weights bypass the cache. Odd sizes test the ends of vectors.
SIZES = [[1, 5000, 100_003], [3, 2_200_001], [0, 17]]
TERMS = [(0.8, 1.0), (2, 0.5)]


def weights(dtype, sizes=(7, 40)):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_copies_keep_the_values_before_an_update(dtype, sizes):
    params, old = weights(dtype, sizes), OldWeights()
    expected = [param.clone() for param in params]
    assert old.copy(params)
    for param in params:
        param.add_(1)
    assert all(map(torch.equal, old.tensors(), expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decay_equals_decay_of_tensors(dtype, sizes):
    params, others, old = weights(dtype, sizes), weights(dtype, sizes), OldWeights()
    scales = [1.0 + i for i in range(len(sizes))]
    for step in range(2):
        copies = [other.clone() for other in others]
        assert old.copy(params)
        for w in (*params, *others):
            w.mul_(1.25 + step)
        assert old.decay_(TERMS, 0.1, scales)
        native.decay_(others, copies, terms=TERMS, rate=0.1, scales=scales)
        assert all(map(torch.equal, params, others))
    assert not torch.equal(params[-1], copies[-1] * 2.25)


def test_memory_is_kept_for_other_weights_of_at_most_its_size():
    old, memory = OldWeights(), set()
    for sizes in ([1000, 50], [500], [60, 10, 20], [1000, 50]):
        params = weights(torch.float32, sizes)
        assert old.copy(params)
        assert all(map(torch.equal, old.tensors(), params))
        memory.add(old._memory.data_ptr())
    assert len(memory) == 1


def test_forget_keeps_small_memory_and_no_weights():
    old = OldWeights()
    for keep, kept in ((4096, True), (4095, False)):
        params = weights(torch.float32, [1024])
        alive = weakref.ref(params[0])
        assert old.copy(params)
        memory = old._memory.data_ptr()
        del params
        assert alive() is not None
        old.forget(keep)
        assert alive() is None
        assert (old._memory.data_ptr() == memory) == kept


def test_foreach_keeps_its_memory_between_steps_and_no_weights():
    memory = set()
    for _ in range(2):
        params = weights(torch.float32, [1000, 50])
        for param in params:
            param.grad = param.clone()
        optimizer = pdecay.PAdam(params, foreach=True)
        optimizer.step()
        memory.add(engine._scratch.old._memory.data_ptr())
        alive = weakref.ref(params[0])
        del params, param, optimizer
        gc.collect()
        assert alive() is None
    assert len(memory) == 1
    assert 0 not in memory


def test_replaced_data_is_read_again():
    (param,), old = weights(torch.float32, [8]), OldWeights()
    assert old.copy([param])
    for dtype, size in ((torch.float32, 8), (torch.float32, 12), (torch.float64, 5)):
        param.data = torch.full((size,), 3.0, dtype=dtype)
        assert old.copy([param])
        assert torch.equal(old.tensors()[0], param)
        param.data = param.data + 1  # an update that replaces the tensor's memory
        assert old.decay_([(1, 3.0)], 1.0, [1.0])
        assert torch.equal(param, torch.full((size,), 2.0, dtype=dtype))


@pytest.mark.parametrize(
    "data", [torch.ones(9), torch.ones(8).double(), torch.ones(8, 2)[:, 0]], ids=str
)
def test_decay_refuses_weights_with_another_layout(data):
    (param,), old = weights(torch.float32, [8]), OldWeights()
    assert old.copy([param])
    param.data = data.clone() if data.is_contiguous() else data
    assert not old.decay_([(1, 1.0)], 1.0, [1.0])
    assert torch.equal(param, torch.ones_like(data))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 4).t(),
        torch.ones(4, dtype=torch.complex64),
        torch.ones(4, device="meta"),
        torch._neg_view(torch.ones(4)),
        torch.ones(4).as_subclass(type("Sub", (torch.Tensor,), {})),
    ],
    ids=lambda x: f"{type(x).__name__}-{x.dtype}-{x.device}-{x.stride()}",
)
def test_tensors_that_c_cannot_read_are_not_copied(tensor):
    assert not OldWeights().copy([tensor])
    assert not OldWeights().copy([torch.ones(4), tensor])


def test_rate_of_zero_changes_nothing():
    params, old = weights(torch.float32), OldWeights()
    params[0][0] = 0.0
    assert old.copy(params)
    expected = [param.add_(1).clone() for param in params]
    assert old.decay_(TERMS, 0.0, [1.0, 1.0])
    assert old.decay_(TERMS, 1.0, [0.0, 0.0])
    assert old.decay_([], 1.0, [1.0, 1.0])
    assert all(map(torch.equal, params, expected))


def test_autograd_detects_the_changed_weight():
    param, old = torch.nn.Parameter(torch.ones(3)), OldWeights()
    loss = (param * param).sum()
    assert old.copy([param])
    assert old.decay_([(1, 1.0)], 1.0, [1.0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
