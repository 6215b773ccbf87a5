import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pdecay
from pdecay import (
    PSGD,
    Every,
    Instant,
    Lp,
    PAdam,
    Slow,
)
from pdecay._core.reference import toy


def toy_run(auxiliary, steps=150, make=PSGD):
    """Run the paper's toy example with the public API."""
    w = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
    optimizer = make([w], auxiliary)
    weights = [1.0]
    for _ in range(steps):
        optimizer.zero_grad()
        ((w - 1) ** 2 / 2).sum().backward()
        optimizer.step()
        weights.append(w.item())
    return weights


def make_psgd(params, auxiliary):
    return PSGD(params, lr=0.1, decay=Lp(0.6, 1.0), auxiliary=auxiliary)


def make_attached(params, auxiliary):
    optimizer = torch.optim.SGD(params, lr=0.1)
    pdecay.attach(optimizer, Lp(0.6, 1.0), auxiliary=auxiliary)
    return optimizer


@pytest.mark.parametrize("make", [make_psgd, make_attached])
@pytest.mark.parametrize(
    ("auxiliary", "curve"),
    [
        (Instant(), "s every step"),
        (None, "s every step"),
        (Every(20, start=0.1), "s every 20 steps"),
    ],
)
def test_reproduces_the_papers_toy_curves(make, auxiliary, curve):
    assert toy_run(auxiliary, make=make) == pytest.approx(toy(steps=150)[curve], abs=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.01, 0.2, 1.0])
def test_slow_s_converges_monotonically(rate):
    weights = toy_run(Slow(rate), steps=4000, make=make_psgd)
    assert all(later <= earlier for earlier, later in itertools.pairwise(weights))
    assert weights[-1] == pytest.approx(0, abs=1e-6)
    assert min(weights) >= 0


def test_rate_1_equals_instant_after_the_first_step():
    torch.manual_seed(0)
    models = [nn.Linear(5, 4), None]
    models[1] = copy.deepcopy(models[0])
    # s starts at the paper's value for a weight of 1; afterwards both are equal
    for model in models:
        nn.init.ones_(model.weight)
    slow = PSGD(models[0].parameters(), lr=0.1, decay=Lp(0.8, 0.1), auxiliary=Slow(1.0))
    instant = PSGD(models[1].parameters(), lr=0.1, decay=Lp(0.8, 0.1), foreach=False)
    inputs = torch.randn(30, 3, 5)
    for x in inputs:
        for model, optimizer in zip(models, (slow, instant), strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@given(
    rate=st.floats(1e-6, 1.0),
    start=st.floats(1e-3, 1e3),
    p=st.floats(0, 4),
    weight=st.one_of(st.just(0.0), st.floats(-1e18, 1e18)),
)
@settings(deadline=None, max_examples=200)
def test_s_stays_positive_and_weight_bounded(rate, start, p, weight):
    w = nn.Parameter(torch.full((2, 2), weight))
    optimizer = PSGD([w], lr=1.0, decay=Lp(p, 0.5), auxiliary=Slow(rate, start))
    for _ in range(20):
        before = w.detach().clone()
        w.grad = torch.zeros_like(w)
        optimizer.step()
        anchor = optimizer.state[w]["anchor"]
        assert torch.isfinite(w).all()
        assert (w.abs() <= before.abs()).all()
        assert (w * before >= 0).all()
        assert (anchor >= 0).all()
        assert torch.isfinite(anchor).all()


class LoRA(nn.Module):
    """A frozen weight with a low-rank correction whose second factor is initialised to zero."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a = nn.Linear(8, 2, bias=False)
        self.b = nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class ZeroInitResidual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


@pytest.mark.parametrize("cls", [LoRA, ZeroInitResidual])
@pytest.mark.parametrize("auxiliary", [Every(10), Slow(0.05)])
def test_zero_initialised_layer_can_leave_zero(cls, auxiliary):
    torch.manual_seed(0)
    model = cls()
    params = [param for param in model.parameters() if param.requires_grad]
    # no warning: with a slow auxiliary variable the tensor does not freeze
    optimizer = PAdam(params, lr=1e-2, decay=Lp(0.8, 1e-2), auxiliary=auxiliary)
    target = torch.randn(32, 8)
    x = torch.randn(32, 8)
    first = None
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        first = loss.item() if first is None else first
        loss.backward()
        optimizer.step()
    assert (model.b.weight != 0).float().mean() > 0.5
    assert loss.item() < 0.95 * first


def test_instant_s_keeps_zero_layer_and_warns():
    model = ZeroInitResidual()
    with pytest.warns(UserWarning, match=r"parameter 2 of group 0 \(8x8\)"):
        optimizer = PAdam(model.parameters(), decay=Lp(0.8, 1e-2), foreach=False)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert not model.b.weight.any()


@pytest.mark.parametrize("auxiliary", [Every(7, start=0.5), Slow(0.1)])
@pytest.mark.parametrize("kind", ["PAdam", "PSGD", "attach"])
def test_s_resumes_bit_exactly(auxiliary, kind, tmp_path):
    def build():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        if kind == "PAdam":
            return model, PAdam(
                model.parameters(), lr=1e-2, decay=Lp(0.7, 0.1) + Lp(2, 0.1), auxiliary=auxiliary
            )
        if kind == "PSGD":
            return model, PSGD(
                model.parameters(), lr=0.1, momentum=0.9, decay=Lp(1, 0.1), auxiliary=auxiliary
            )
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
        pdecay.attach(optimizer, Lp(0.5, 0.01), auxiliary=auxiliary)
        return model, optimizer

    def train(model, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()

    model, optimizer = build()
    train(model, optimizer, range(25))
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint")
    train(model, optimizer, range(25, 60))

    resumed, resumed_optimizer = build()
    weights, state = torch.load(tmp_path / "checkpoint", weights_only=True)
    resumed.load_state_dict(weights)
    resumed_optimizer.load_state_dict(state)
    train(resumed, resumed_optimizer, range(25, 60))
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [make_psgd, make_attached])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slow_anchor_of_a_weight_in_half_precision_follows_it(make, dtype):
    def start():
        weight = nn.Parameter(torch.full((2, 2), 0.5, dtype=dtype))
        optimizer = make([weight], Slow(1e-4))
        optimizer.param_groups[0]["lr"] = 1e-6  # the weight stays, only the anchor moves
        return weight, optimizer

    def train(weight, optimizer, steps):
        for _ in range(steps):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()

    weight, optimizer = start()
    train(weight, optimizer, 100)
    resumed, resumed_optimizer = start()
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(weight, optimizer, 100)
    train(resumed, resumed_optimizer, 100)
    anchor = optimizer.state[weight]["anchor"]
    assert anchor[0, 0].item() == pytest.approx((0.25 + 0.75 * (1 - 1e-4) ** 200) ** 0.5, rel=1e-5)
    assert torch.equal(anchor, resumed_optimizer.state[resumed]["anchor"])
    assert torch.equal(weight, resumed)


def test_half_precision_anchor_of_a_checkpoint_is_widened():
    weight = nn.Parameter(torch.full((2, 2), 0.5, dtype=torch.bfloat16))
    optimizer = make_psgd([weight], Slow(1e-3))
    optimizer.state[weight] = {"anchor": torch.ones_like(weight), "anchor_steps": 3}
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["anchor"].dtype == torch.float32
    assert (optimizer.state[weight]["anchor"] < 1).all()


def test_step_with_zero_lr_changes_nothing():
    w = nn.Parameter(torch.ones(2, 2))
    optimizer = PSGD([w], lr=0.0, decay=Lp(0.5, 1.0), auxiliary=Every(2))
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert torch.equal(optimizer.state[w]["anchor"], torch.ones(2, 2))  # created, for checkpoints
    assert optimizer.state[w]["anchor_steps"] == 0
    assert torch.equal(w, torch.ones(2, 2))


def test_group_may_have_its_own_auxiliary():
    a, b = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = PSGD([{"params": [a]}, {"params": [b], "decay_auxiliary": Every(3)}], lr=0.1)
    assert [group["decay_auxiliary"] for group in optimizer.param_groups] == [[], [3, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Every(0), "n must be a whole number >= 1, got 0"),
        (lambda: Every(2.5), "n must be a whole number >= 1, got 2.5"),
        (lambda: Every(3, start=0), "start must be above 0"),
        (lambda: Slow(0), r"rate must be in \(0, 1\], got 0"),
        (lambda: Slow(1.5), r"rate must be in \(0, 1\], got 1.5"),
        (lambda: Slow(float("nan")), "rate must be finite"),
        (lambda: Slow(0.1, start=-1), "start must be finite and >= 0, got -1"),
    ],
)
def test_invalid_settings_raise(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_other_types_raise():
    w = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(TypeError, match="auxiliary must be Instant"):
        PSGD([w], auxiliary="slow")
