"""Ranking in Adam's metric: scores, their sources, and the targets that use them."""

import copy

import pytest
import torch
from torch import nn

import pdecay
from pdecay import PSGD, GradualMagnitudePruning, Lp, PAdam, SparsityTarget, attach
from pdecay._sparsity.metric import adaptive_scores, update_squares

STEPS = 40


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def train(model, optimizer, start=0, stop=STEPS):
    for step in range(start, stop):
        torch.manual_seed(step)
        x = torch.randn(16, 16)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :8].argmax(1)).backward()
        optimizer.step()


def zeros(model) -> float:
    return pdecay.sparsity(model, 0.0).total


def test_score_is_the_length_in_adams_metric():
    weight = nn.Parameter(torch.tensor([[2.0, -3.0, 0.0]]))
    optimizer = torch.optim.Adam([weight])
    optimizer.state[weight]["exp_avg_sq"] = torch.tensor([[16.0, 1e-4, float("inf")]])
    expected = torch.tensor([[4.0, 0.3, 0.0]])
    torch.testing.assert_close(adaptive_scores(weight, optimizer), expected)


def test_half_precision_is_scored_in_single_precision():
    weight = nn.Parameter(torch.full((2, 2), 1e-3, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([weight])
    optimizer.state[weight]["exp_avg_sq"] = torch.full((2, 2), 1e-12, dtype=torch.bfloat16)
    scores = adaptive_scores(weight, optimizer)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, torch.full((2, 2), 1e-6), rtol=2e-2, atol=0)


def test_weights_without_gradient_rank_first_by_magnitude():
    weight = nn.Parameter(torch.tensor([[5.0, 7.0, 1e-3]]))
    optimizer = torch.optim.Adam([weight])
    optimizer.state[weight]["exp_avg_sq"] = torch.tensor([[0.0, 0.0, 1e-2]])
    assert adaptive_scores(weight, optimizer).argsort().tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("method", ["target", "per_layer", "gradual"])
@pytest.mark.parametrize("kind", ["adam", "sgd", "adagrad"])
@pytest.mark.parametrize("unused", ["no gradient", "gradient of 0"])
@pytest.mark.parametrize("first", [STEPS // 3, STEPS])
def test_tensor_is_not_removed_before_its_first_gradient(method, kind, unused, first):
    """As for a head whose loss is added after a while."""
    torch.manual_seed(0)
    trunk, late = nn.Linear(16, 64), nn.Linear(64, 8)
    params = [trunk.weight, late.weight]
    if kind == "adam":
        optimizer = PAdam(params, lr=1e-2, decay=Lp(0.8, 1e-8))
    elif kind == "sgd":
        optimizer = PSGD(params, lr=1e-2, decay=Lp(0.8, 1e-8))
    else:
        optimizer = torch.optim.Adagrad(params, lr=1e-2)
        attach(optimizer, Lp(0.8, 1e-8))
    if method == "gradual":
        GradualMagnitudePruning(optimizer, 0.8, STEPS, rank="adaptive", start=0.1, end=0.9)
    else:
        per_layer = method == "per_layer"
        SparsityTarget(optimizer, 0.8, STEPS, start=0.1, end=0.9, per_layer=per_layer)
    for step in range(STEPS):
        if step == first:
            assert not (late.weight == 0).any()
            assert (trunk.weight == 0).any()
        hidden = trunk(torch.randn(32, 16)).relu()
        loss = hidden.square().mean()
        if step >= first:
            loss = loss + nn.functional.cross_entropy(late(hidden), hidden[:, :8].argmax(1))
        elif unused == "gradient of 0":
            loss = loss + 0.0 * late(hidden).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert late.weight.any()
    assert sum(int((w == 0).sum()) for w in params) == round(0.8 * (16 * 64 + 64 * 8))


@pytest.mark.parametrize("method", ["target", "floor", "gradual"])
@pytest.mark.parametrize("kind", [PAdam, torch.optim.Adam, torch.optim.NAdam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_were_unfrozen_rank_as_others(method, kind, dtype):
    """With gradients of equal size and without updates, the ranking is that by magnitude."""
    torch.manual_seed(0)
    old, young = (nn.Parameter(torch.randn(32, 32, dtype=dtype)) for _ in range(2))
    young.requires_grad_(False)
    optimizer = kind([old, young], lr=1e-12)
    if kind is not PAdam:
        attach(optimizer, Lp(0.8, 1e-8))
    if method == "gradual":
        GradualMagnitudePruning(optimizer, 0.5, 60, rank="adaptive", start=0.5)
    else:
        floor = 0.1 if method == "floor" else 0.0
        SparsityTarget(optimizer, 0.5, 60, start=0.5, end=0.7, floor=floor)
    before = torch.stack([old, young]).detach().clone()
    for step in range(60):
        young.requires_grad_(step >= 27)
        for weight in (old, young):
            sign = torch.randn(32, 32, dtype=dtype).sign()
            weight.grad = sign if weight.requires_grad else None
        optimizer.step()
    expected = before.abs() <= before.abs().flatten().kthvalue(1024).values
    assert torch.equal(torch.stack([old, young]) == 0, expected)


@pytest.mark.parametrize("kind", ["sgd", "lion-like", "8-bit"])
def test_other_optimizers_get_a_running_mean(kind):
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    if kind == "lion-like":
        optimizer.state[weight]["exp_avg"] = torch.zeros(4, 4)
    if kind == "8-bit":
        optimizer.state[weight]["exp_avg_sq"] = torch.zeros(4, 4, dtype=torch.uint8)
    weight.grad = torch.full((4, 4), 2.0)
    update_squares([weight], optimizer)
    update_squares([weight], optimizer)
    mean = optimizer.state[weight]["squared_gradient"]
    torch.testing.assert_close(mean, torch.full((4, 4), 4.0 * (1 - 0.999**2)))


def test_running_mean_ignores_non_finite_gradients():
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.full((2, 2), float("nan"))
    update_squares([weight], optimizer)
    assert not optimizer.state[weight]["squared_gradient"].any()


@pytest.mark.parametrize("kind", ["psgd", "attach"])
def test_sparse_gradients_of_an_embedding_rank_as_dense_ones_do(kind):
    def trained(sparse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(32, 8, sparse=sparse), nn.Linear(8, 32))
        if kind == "psgd":
            optimizer = PSGD(model.parameters(), lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            attach(optimizer, Lp(0.8, 1e-2))
        SparsityTarget(optimizer, 0.5, STEPS)
        for step in range(STEPS):
            torch.manual_seed(step)
            tokens = torch.randint(32, (64,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
        return model

    sparse, dense = trained(True), trained(False)
    for a, b in zip(sparse.parameters(), dense.parameters(), strict=True):
        assert torch.equal(a == 0, b == 0)
        torch.testing.assert_close(a, b)


def test_adam_keeps_no_second_mean():
    model = build()
    optimizer = PAdam(model.parameters(), lr=1e-2, decay=Lp(0.8, 1.0))
    SparsityTarget(optimizer, 0.8, STEPS)
    train(model, optimizer, stop=10)
    assert all("squared_gradient" not in state for state in optimizer.state.values())


@pytest.mark.parametrize("rank", ["adaptive", "magnitude"])
@pytest.mark.parametrize("pull", [None, 0.0, 0.5])
def test_target_is_met_with_any_ranking(rank, pull):
    model = build()
    optimizer = PAdam(model.parameters(), lr=1e-2, decay=Lp(0.8, 1.0), weight_decay=0.1)
    target = SparsityTarget(optimizer, 0.8, STEPS, rank=rank, pull=pull, floor=0.1)
    train(model, optimizer)
    assert target.sparsity == pytest.approx(0.8, abs=1e-3)


def test_rankings_remove_different_weights():
    left = []
    for rank in ("adaptive", "magnitude"):
        model = build()
        optimizer = PAdam(model.parameters(), lr=1e-2, decay=Lp(0.8, 1.0))
        SparsityTarget(optimizer, 0.8, STEPS, rank=rank, pull=0.0)
        train(model, optimizer)
        left.append(model[0].weight != 0)
    assert not torch.equal(*left)


def test_target_on_sgd_resumes_exactly(same):
    def start():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        attach(optimizer, Lp(0.8, 1.0))
        return model, optimizer

    model, optimizer = start()
    SparsityTarget(optimizer, 0.8, STEPS)
    train(model, optimizer, stop=15)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, start=15)
    resumed, again = start()
    SparsityTarget(again, 0.8, STEPS)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(resumed, again, start=15)
    assert same(model.state_dict(), resumed.state_dict())
    assert zeros(resumed) == pytest.approx(0.8, abs=1e-3)


def test_target_on_sgd_resumes_with_half_precision_weights():
    def start():
        model = build().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attach(optimizer, Lp(0.8, 1.0))
        return model, optimizer, SparsityTarget(optimizer, 0.8, 4, end=1.0)

    def step(model, optimizer):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()

    model, optimizer, _ = start()
    step(model, optimizer)
    resumed, again, target = start()
    again.load_state_dict(optimizer.state_dict())
    for _ in range(3):
        step(resumed, again)
    assert target.sparsity == pytest.approx(0.8, abs=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ["target, state", "state, target"])
@pytest.mark.parametrize("kind", ["psgd", "attach", "pruning"])
def test_squares_of_half_precision_weights_resume_exactly(dtype, order, kind, same):
    def start():
        model = build().to(dtype)
        if kind == "psgd":
            return model, pdecay.PSGD(model.parameters(), lr=0.1, decay=Lp(0.8, 1.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if kind == "attach" or order == "state, target":  # hooks that see the checkpoint
            attach(optimizer, Lp(0.8, 1.0))
        return model, optimizer

    def steer(optimizer):
        if kind == "pruning":
            return GradualMagnitudePruning(optimizer, 0.8, STEPS, rank="adaptive", every=1)
        return SparsityTarget(optimizer, 0.8, STEPS)

    def train(model, optimizer, start, stop):
        for step in range(start, stop):
            torch.manual_seed(step)
            for param in model.parameters():
                param.grad = torch.randn_like(param) * torch.rand_like(param)
            optimizer.step()

    model, optimizer = start()
    control = steer(optimizer)
    train(model, optimizer, 0, 15)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), control.state_dict()))
    train(model, optimizer, 15, STEPS)
    resumed, again = start()
    control = steer(again) if order == "target, state" else None
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    control = control or steer(again)
    control.load_state_dict(saved[2])
    train(resumed, again, 15, STEPS)
    assert same(model.state_dict(), resumed.state_dict())
    assert same(optimizer.state_dict(), again.state_dict())


def test_gradual_pruning_by_either_ranking():
    results = []
    for rank in ("magnitude", "adaptive"):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        GradualMagnitudePruning(optimizer, 0.8, STEPS, rank=rank)
        train(model, optimizer)
        assert zeros(model) == pytest.approx(0.8, abs=1e-3)
        results.append(model[0].weight.detach())
    assert not torch.equal(*results)


@pytest.mark.parametrize("make", [SparsityTarget, GradualMagnitudePruning])
def test_unknown_ranking_is_an_error(make):
    optimizer = PAdam(build().parameters())
    with pytest.raises(ValueError, match=r"rank must be 'adaptive' or 'magnitude', got 'size'"):
        make(optimizer, 0.8, STEPS, rank="size")
