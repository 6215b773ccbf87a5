"""``PAdam(metric="adaptive")``: every implementation against a literal one in numpy and float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import pdecay
from pdecay import Every, Lp, PAdam
from pdecay._optim.kernels.selection import only_kernel

SHAPES = ((20, 15), (7, 5, 3), (32, 65))
LR = 2e-5  # small: rounding decides whether a weight that crosses zero stays there
STEPS = 66  # beyond the first step at which the mean is computed by its period
PENALTIES = {
    "0": Lp(0, 5e-5),
    "0.5": Lp(0.5, 5e-3),
    "0.8": Lp(0.8, 5e-2),
    "1": Lp(1, 5e-2),
    "1.5": Lp(1.5, 0.5),
    "3": Lp(3, 50.0),
    "elastic": Lp(0.8, 5e-2) + Lp(2, 5.0),
    "two": Lp(0.8, 5e-2) + Lp(1.2, 0.5),
    "four": Lp(0.8, 5e-2) + Lp(2, 5.0) + Lp(1.2, 0.5) + Lp(3, 50.0),
}
PATHS = {
    "native": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}


def initial_weights():
    random = np.random.default_rng(0)
    weights = [0.05 * random.normal(size=shape) for shape in SHAPES]
    weights[0][0] = 0.0
    return weights


def gradients(steps=STEPS):
    """Return gradients whose size varies between weights by two orders of magnitude."""
    random = np.random.default_rng(1)
    sizes = [np.exp(random.normal(size=shape)) for shape in SHAPES]
    return [[size * random.normal(size=size.shape) for size in sizes] for _ in range(steps)]


def reference(weights, grads, penalty, *, weight_decay=0.0, amsgrad=False, eps=1e-8):
    """Run Adam with the decay ``1 / (1 + lr * sum_k lam_k * |c * w_old|^(p_k - 2))``."""
    weights = [w.copy() for w in weights]
    m, v, largest = ([np.zeros_like(w) for w in weights] for _ in range(3))
    mean = None
    for t, grad in enumerate(grads, 1):
        m = [0.9 * a + 0.1 * g for a, g in zip(m, grad, strict=True)]
        v = [0.999 * a + 0.001 * g**2 for a, g in zip(v, grad, strict=True)]
        largest = [np.maximum(a, b) for a, b in zip(largest, v, strict=True)]
        square = largest if amsgrad else v
        d = [np.sqrt(a / (1 - 0.999**t)) + eps for a in square]
        if t in (1, 2, 4, 8, 16, 32) or t % 64 == 0:
            mean = sum(a.sum() for a in d) / sum(a.size for a in d)
        for i, old in enumerate(weights):
            tilde = (1 - LR * weight_decay) * old - LR * m[i] / (1 - 0.9**t) / d[i]
            length = np.abs(old) * np.sqrt(d[i] / mean)
            with np.errstate(divide="ignore", over="ignore"):
                s = sum(lam * length ** (p - 2) for p, lam in penalty.pairs())
            weights[i] = tilde / (1 + LR * s)
    return weights


def trained(grads, dtype=torch.float64, **options):
    params = [nn.Parameter(torch.tensor(w, dtype=dtype)) for w in initial_weights()]
    optimizer = PAdam(params, LR, metric="adaptive", **options)
    for grad in grads:
        step(optimizer, params, grad)
    return optimizer, params


def step(optimizer, params, grad):
    for param, values in zip(params, grad, strict=True):
        param.grad = torch.tensor(values).to(param.dtype)
    optimizer.step()


def assert_near(params, expected, tolerance):
    for param, values in zip(params, expected, strict=True):
        assert np.abs(param.detach().double().numpy() - values).max() < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", PENALTIES)
def test_matches_reference(name, path, dtype):
    penalty, grads = PENALTIES[name], gradients()
    _, params = trained(grads, dtype, decay=penalty, **PATHS[path])
    expected = reference(initial_weights(), grads, penalty)
    assert_near(params, expected, 1e-12 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{"amsgrad": True}, {"weight_decay": 0.3}, {"eps": 0.1}])
def test_supports_settings_of_adam(path, options):
    grads = gradients()
    _, params = trained(grads, decay=PENALTIES["0.8"], **options, **PATHS[path])
    assert_near(params, reference(initial_weights(), grads, PENALTIES["0.8"], **options), 1e-12)


@pytest.mark.parametrize("path", ["native", "for-loop"])  # torch's foreach refuses such betas
def test_coefficients_may_be_tensors(path):
    grads = gradients()
    betas = (torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.999, dtype=torch.float64))
    _, params = trained(grads, decay=PENALTIES["0.8"], betas=betas, **PATHS[path])
    assert_near(params, reference(initial_weights(), grads, PENALTIES["0.8"]), 1e-12)


@pytest.mark.slow
def test_compiled_kernel_matches_reference():
    grads = gradients()
    with only_kernel("compiled"):
        _, params = trained(grads, torch.float32, decay=PENALTIES["elastic"], fused=True)
    assert_near(params, reference(initial_weights(), grads, PENALTIES["elastic"]), 2e-6)


@pytest.mark.slow
def test_step_can_be_compiled():
    grads = gradients(2)  # from the third step on, the mean of an eager step is older
    decay = PENALTIES["0.8"]
    _, expected = trained(grads, decay=decay)
    params = [nn.Parameter(torch.tensor(w)) for w in initial_weights()]
    optimizer = PAdam(params, LR, decay=decay, metric="adaptive")
    compiled = torch.compile(optimizer.step)
    for grad in grads:
        for param, values in zip(params, grad, strict=True):
            param.grad = torch.tensor(values)
        compiled()
    for param, value in zip(params, expected, strict=True):
        torch.testing.assert_close(param, value, rtol=1e-5, atol=0)


@pytest.mark.parametrize("path", PATHS)
def test_equals_magnitude_if_all_gradients_have_one_size(path):
    params, others = ([nn.Parameter(torch.linspace(-1, 1, 40).view(8, 5))] for _ in range(2))
    adaptive = PAdam(params, 0.1, metric="adaptive", decay=Lp(0.8, 0.1), **PATHS[path])
    magnitude = PAdam(others, 0.1, decay=Lp(0.8, 0.1), **PATHS[path])
    for grad in (1.0, -1.0, 1.0):
        step(adaptive, params, [np.full((8, 5), grad)])
        step(magnitude, others, [np.full((8, 5), grad)])
    torch.testing.assert_close(params[0], others[0])


@pytest.mark.parametrize("path", PATHS)
def test_does_not_depend_on_the_scale_of_the_loss(path):
    grads = gradients(20)
    options = {"decay": PENALTIES["0.8"], "eps": 0.0, **PATHS[path]}
    _, params = trained(grads, **options)
    _, scaled = trained([[1024 * g for g in grad] for grad in grads], **options)
    for param, other in zip(params, scaled, strict=True):
        torch.testing.assert_close(param, other)


@pytest.mark.parametrize("path", PATHS)
def test_weights_with_small_gradients_shrink_faster(path):
    param = nn.Parameter(torch.full((2, 10), 0.1))
    optimizer = PAdam([param], 1e-4, metric="adaptive", decay=Lp(0.8, 1.0), **PATHS[path])
    sign = 1
    for _ in range(10):
        sign = -sign
        param.grad = sign * torch.tensor([[1e-3], [1.0]]).expand(2, 10)
        optimizer.step()
    assert param[0].max() < param[1].min()


@pytest.mark.parametrize("path", PATHS)
def test_zeros_stay_zero_and_lr_0_changes_nothing(path):
    _, params = trained(gradients(10), decay=PENALTIES["0.8"], **PATHS[path])
    assert (params[0][0] == 0).all()
    assert (params[0][1:] != 0).any()
    before = [param.detach().clone() for param in params]
    optimizer = PAdam(params, 0.0, metric="adaptive", decay=Lp(0.8, 1.0), **PATHS[path])
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    assert optimizer.param_groups[0]["metric_mean"] == 0.0


@pytest.mark.parametrize("path", PATHS)
def test_zero_gradients_at_the_first_step_decay_by_magnitude(path):
    params, others = ([nn.Parameter(torch.linspace(-1, 1, 6).view(3, 2))] for _ in range(2))
    for weights, metric in ((params, "adaptive"), (others, "magnitude")):
        optimizer = PAdam(weights, 0.1, metric=metric, decay=Lp(0.8, 0.1), **PATHS[path])
        step(optimizer, weights, [np.zeros((3, 2))])
    torch.testing.assert_close(params[0], others[0])


def test_groups_may_have_their_own_metric():
    grads = gradients(5)
    params = [nn.Parameter(torch.tensor(w)) for w in initial_weights()]
    decay = PENALTIES["0.8"]
    optimizer = PAdam(
        [
            {"params": params[:1], "metric": "adaptive", "decay": decay},
            {"params": params[1:2], "decay": decay},
        ],
        LR,
    )
    optimizer.add_param_group({"params": params[2:], "metric": "adaptive", "decay": decay})
    for grad in grads:
        step(optimizer, params, grad)
    metrics = [group["metric"] for group in optimizer.param_groups]
    assert metrics == ["adaptive", "magnitude", "adaptive"]
    for i in (0, 2):
        alone = reference(initial_weights()[i : i + 1], [grad[i : i + 1] for grad in grads], decay)
        assert_near(params[i : i + 1], alone, 1e-12)


def test_biases_do_not_count_in_the_mean():
    model = nn.Linear(3, 2)
    optimizer = PAdam(model.parameters(), 0.1, metric="adaptive")
    model.weight.grad = torch.full((2, 3), 0.5)
    model.bias.grad = torch.full((2,), 100.0)
    optimizer.step()
    assert optimizer.param_groups[0]["metric_mean"] == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_resumed_run_is_bit_identical(path, tmp_path):
    grads = gradients(12)
    options = {"decay": PENALTIES["0.8"], **PATHS[path]}
    optimizer, params = trained(grads[:5], **options)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    others = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = PAdam(others, LR, decay=Lp(3, 1))
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    copied = copy.deepcopy(optimizer)
    for grad in grads[5:]:
        step(optimizer, params, grad)
        step(resumed, others, grad)
        step(copied, copied.param_groups[0]["params"], grad)
    for param, other, third in zip(params, others, copied.param_groups[0]["params"], strict=True):
        assert torch.equal(param, other)
        assert torch.equal(param, third)


def test_checkpoint_of_adamw_keeps_the_metric():
    params = [nn.Parameter(torch.tensor(w)) for w in initial_weights()]
    base = torch.optim.AdamW(params, LR)
    step(base, params, gradients(1)[0])
    optimizer = PAdam(params, LR, metric="adaptive")
    optimizer.load_state_dict(base.state_dict())
    step(optimizer, params, gradients(1)[0])
    assert optimizer.param_groups[0]["metric"] == "adaptive"
    assert optimizer.param_groups[0]["metric_mean"] > 0


def test_half_precision_and_stochastic_rounding():
    grads = gradients(8)
    for options in ({}, {"foreach": True}, {"stochastic_rounding": True}):
        optimizer, params = trained(grads, torch.bfloat16, decay=Lp(0.8, 0.5), **options)
        assert optimizer.param_groups[0]["metric_mean"] > 0
        expected = reference(initial_weights(), grads, Lp(0.8, 0.5))
        assert_near(params, expected, 3e-3)


def test_complex_weights_have_one_length():
    w = torch.tensor([[0.3 + 0.4j, 1.0, 0.0]])
    param = nn.Parameter(w.clone())
    param.grad = torch.tensor([[3.0 + 4.0j, 5.0j, 5.0]])  # equal sizes: c = 1
    optimizer = PAdam([param], 0.1, metric="adaptive", decay=Lp(1, 1.0))
    optimizer.step()
    other = nn.Parameter(w.clone())
    other.grad = param.grad
    PAdam([other], 0.1, decay=Lp(1, 1.0)).step()
    torch.testing.assert_close(param, other)


@pytest.mark.parametrize("bad", ["fisher", None, 1])
def test_unknown_metric_is_an_error(bad):
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r'metric must be "magnitude" or "adaptive", got'):
        PAdam([weight], metric=bad)
    with pytest.raises(ValueError, match=r'metric must be "magnitude" or "adaptive", got'):
        PAdam([{"params": [weight], "metric": bad}])
    optimizer = PAdam([weight])
    state = optimizer.state_dict()
    state["param_groups"][0]["metric"] = bad
    with pytest.raises(ValueError, match="invalid decay setting in parameter group 0: metric"):
        optimizer.load_state_dict(state)


def test_slow_auxiliary_is_an_error():
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="auxiliary must be Instant"):
        PAdam([weight], metric="adaptive", auxiliary=Every(3))
    optimizer = PAdam([weight], metric="adaptive")
    with pytest.raises(ValueError, match="auxiliary must be Instant"):
        optimizer.add_param_group(
            {"params": [nn.Parameter(torch.ones(2, 2))], "decay_auxiliary": Every(3)}
        )


def test_infinite_gradient_does_not_change_the_mean():
    optimizer, params = trained(gradients(3), decay=Lp(0.8, 1e-2))
    before = optimizer.param_groups[0]["metric_mean"]
    step(optimizer, params, [np.full(shape, np.inf) for shape in SHAPES])
    assert optimizer.param_groups[0]["metric_mean"] == before


def test_target_steers_an_adaptive_decay():
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    optimizer = PAdam(model.parameters(), 1e-2, metric="adaptive", decay=Lp(0.8, 1.0))
    target = pdecay.SparsityTarget(optimizer, 0.8, 40)
    for _ in range(40):
        loss = (model(torch.randn(16, 30)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert target.sparsity == pytest.approx(0.8)


def test_group_without_decay_does_not_search_for_a_wrapper_at_each_step(monkeypatch):
    searched = []
    monkeypatch.setattr("pdecay._optim.settings.is_local", searched.append)
    params = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], "decay": None}]
    optimizer = PAdam(groups, metric="adaptive")
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert len(searched) == 1  # all objects of the process are looked at


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": False}, {"amsgrad": True}])
@pytest.mark.parametrize("p", [0.5, 0.8, 1.0])
def test_zeros_stay_zero_if_squared_gradients_overflow(options, p):
    weight = torch.nn.Parameter(torch.tensor([0.0, 1.0, -2.0, 0.5]).repeat(5, 9))
    optimizer = PAdam([weight], lr=0.01, decay=Lp(p, 0.1), metric="adaptive", **options)
    for size in (0.1, 1e30, 0.1):  # the square of 1e30 is infinite in float32
        weight.grad = torch.full_like(weight, size)
        optimizer.step()
    assert weight.isfinite().all()
    assert (weight[:, ::4] == 0).all()
