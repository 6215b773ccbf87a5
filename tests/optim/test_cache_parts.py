"""Steps with foreach in parts that fit into the cache."""

import pytest
import torch

from pdecay import PSGD, Lp, PAdam, attach
from pdecay._optim import cache_parts
from pdecay._optim.kernels.layout import PLAIN

SHAPES = [(40, 30), (7,), (13, 11), (50, 50), (1,), ()]
PART = 128  # a multiple of the length of all vectors, so that torch's operations give the same bits


def attached(params, **options):
    optimizer = torch.optim.AdamW(params, 1e-2, foreach=True)
    attach(optimizer, Lp(0.8, 1e-2), fused=False)
    return optimizer


MAKES = {
    "Adam": lambda w: PAdam(w, 1e-2, decay=Lp(0.8, 1e-2), foreach=True),
    "amsgrad": lambda w: PAdam(w, 1e-2, decay=Lp(0.8, 1e-2), foreach=True, amsgrad=True),
    "adaptive": lambda w: PAdam(w, 1e-2, decay=Lp(0.8, 1e-2), foreach=True, metric="adaptive"),
    "SGD": lambda w: PSGD(w, 0.1, decay=Lp(0.8, 1e-2), foreach=True),
    "momentum": lambda w: PSGD(w, 0.1, momentum=0.9, decay=Lp(0.8, 1e-2), foreach=True),
    "attach": attached,
}


def run(make, steps=4):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator) * 0.05) for s in SHAPES]
    optimizer = make(params)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator) * 1e-2
        optimizer.step()
    return params, [optimizer.state[param] for param in params]


@pytest.mark.parametrize("name", MAKES)
def test_parts_do_not_change_weights_and_state(monkeypatch, name):
    weights, states = run(MAKES[name])
    monkeypatch.setattr(cache_parts, "IN_CACHE", PART)
    parted_weights, parted_states = run(MAKES[name])
    assert all(map(torch.equal, weights, parted_weights))
    for state, parted in zip(states, parted_states, strict=True):
        assert state.keys() == parted.keys()
        for key in state:
            assert state[key] is parted[key] is None or torch.equal(state[key], parted[key])


def test_parts_are_small_and_cover_all_weights(monkeypatch):
    monkeypatch.setattr(cache_parts, "IN_CACHE", PART)
    weights = [torch.ones(shape) for shape in SHAPES]
    steps = [torch.tensor(3.0) for _ in SHAPES]
    parts = list(cache_parts.cache_parts([weights, [], steps]))
    assert len(parts) > 20
    for _, (own, empty, own_steps) in parts:
        assert sum(map(torch.numel, own)) <= PART
        assert not empty
        assert len(own) == len(own_steps)
        torch._foreach_add_(own, 1)
        torch._foreach_add_(own_steps, 1)
    assert all((weight == 2).all() for weight in weights)
    assert steps == [4.0] * len(SHAPES)


def test_tensors_in_another_layout_are_not_split(monkeypatch):
    monkeypatch.setattr(cache_parts, "IN_CACHE", PART)
    weight, grad = torch.ones(20, 30), torch.ones(30, 20).T
    assert type(grad) in PLAIN
    ((indices, (weights, grads)),) = cache_parts.cache_parts([[weight], [grad]])
    assert indices == [0]
    assert weights[0] is weight
    assert grads[0] is grad


def test_missing_momentum_buffers_are_not_split(monkeypatch):
    monkeypatch.setattr(cache_parts, "IN_CACHE", PART)
    weight = torch.ones(20, 30)
    ((_, (weights, buffers)),) = cache_parts.cache_parts([[weight], [None]])
    assert weights[0] is weight
    assert buffers == [None]
