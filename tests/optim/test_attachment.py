"""The step of attach: which weights decay, when, and by how much."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import pdecay
from pdecay import Lp, attach
from pdecay._optim import engine

from .attaching import DECAY, LR, decayed, sgd_step, weight, with_gradient


class TestOutermostCallOnly:
    class Child(SGD):
        def step(self, closure=None):
            return super().step(closure)

    class Grandchild(Child):
        def step(self, closure=None):
            self.to_all(lambda param: param.mul_(2))
            loss = super().step(closure)
            self.to_all(lambda param: param.add_(1))
            return loss

        @torch.no_grad()
        def to_all(self, change):
            for group in self.param_groups:
                for param in group["params"]:
                    change(param)

    @pytest.mark.parametrize("hook_the_parents", [False, True])
    def test_steps_that_call_super_decay_once(self, hook_the_parents, exact, same):
        if hook_the_parents:  # torch wraps the step of a class when it is first used
            SGD([weight()])
            self.Child([weight()])
        param = weight()
        with_gradient(param)
        w_old = param.detach().clone()
        expected = decayed((2 * w_old).add_(param.grad, alpha=-LR).add_(1), w_old)
        optimizer = self.Grandchild([param], lr=LR)
        attach(optimizer, DECAY, **exact)
        optimizer.step()
        assert same(param.detach(), expected)

    @pytest.mark.parametrize("failing_class", [SGD, Child])
    def test_decays_once_after_a_step_that_raised(self, failing_class, exact, same):
        SGD([weight()])
        param = weight()
        optimizer = failing_class([param], lr=LR)
        attach(optimizer, DECAY, **exact)

        def fails():
            raise ArithmeticError("from the closure")

        before = param.detach().clone()
        with pytest.raises(ArithmeticError, match="from the closure"):
            optimizer.step(fails)
        assert same(param.detach(), before)
        for _ in range(2):
            with_gradient(param)
            expected = decayed(sgd_step(param), param)
            optimizer.step()
            assert same(param.detach(), expected)

    def test_nested_steps_of_other_optimizers_decay(self, exact, same):
        """Each of two optimizers decays its own weights, even if one steps inside the other."""
        inner_param, outer_param = weight(seed=1), weight(seed=2)
        inner, outer = SGD([inner_param], lr=LR), SGD([outer_param], lr=LR)
        attach(inner, DECAY, **exact)
        attach(outer, DECAY, **exact)
        with_gradient(inner_param, outer_param)
        expected = [decayed(sgd_step(param), param) for param in (inner_param, outer_param)]
        outer.step(inner.step)
        assert same([inner_param.detach(), outer_param.detach()], expected)


def test_foreach_batches_are_bit_exact(exact, same, monkeypatch):
    """Accelerators use foreach; this test selects it on the CPU."""
    monkeypatch.setattr(engine, "use_foreach", lambda params, foreach: True)
    params = [weight(seed=i) for i in range(3)] + [weight(seed=4, dtype=torch.float64)]
    with_gradient(*params)
    expected = [decayed(sgd_step(param), param) for param in params]
    optimizer = SGD(params, lr=LR)
    attach(optimizer, DECAY, **exact)
    optimizer.step()
    assert same([param.detach() for param in params], expected)


class TestClosure:
    @pytest.mark.parametrize("call", [lambda o, c: o.step(c), lambda o, c: o.step(closure=c)])
    def test_closure_may_create_the_first_gradients(self, call, exact, same):
        param, unused = weight(), weight(2, 2)
        optimizer = SGD([param, unused], lr=LR)
        attach(optimizer, DECAY, **exact)
        start, unused_start = param.detach().clone(), unused.detach().clone()
        calls = []

        def closure():
            calls.append(1)
            optimizer.zero_grad()
            loss = (param**2).sum() / 2
            loss.backward()
            return loss

        assert param.grad is None
        loss = call(optimizer, closure)
        assert len(calls) == 1
        assert loss.item() == pytest.approx((start**2).sum().item() / 2)
        assert same(param.detach(), decayed(start.add(start, alpha=-LR), start))
        assert same(unused.detach(), unused_start)

    def test_closure_may_remove_a_gradient(self, exact, same):
        param = weight()
        with_gradient(param)
        optimizer = SGD([param], lr=LR)
        attach(optimizer, DECAY, **exact)
        before = param.detach().clone()
        optimizer.step(lambda: optimizer.zero_grad(set_to_none=True))
        assert same(param.detach(), before)


@pytest.mark.slow
def test_copies_only_decayed_weights(exact):
    """All copies of a group are in one tensor of bytes."""
    shapes = {"decayed": (7, 11), "not decayed": (11, 13), "one dimension": (117,), "off": (13, 17)}
    params = {name: weight(*shape) for name, shape in shapes.items()}
    with_gradient(*params.values())
    optimizer = SGD(
        [
            {"params": [params["decayed"], params["one dimension"]]},
            {"params": [params["not decayed"]], "decay": None},
            {"params": [params["off"]], "decay": DECAY, "decay_scale": 0.0},
        ],
        lr=LR,
    )
    handle = attach(optimizer, DECAY, **exact)
    found = []

    def tensors():
        return [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]

    others = {id(tensor) for tensor in tensors() if tensor.dtype is torch.uint8}  # of other tests

    def count():
        alive = tensors()
        copied = [x for x in alive if x.dtype is torch.uint8 and x.numel() and id(x) not in others]
        found.append([(tensor.data_ptr(), tensor.numel()) for tensor in copied])
        by_shape = {name: sum(x.shape == shape for x in alive) for name, shape in shapes.items()}
        assert set(by_shape.values()) == {2}  # weights and gradients

    optimizer.step(count)
    ((_, size),) = found[0]
    assert 4 * 7 * 11 <= size < 4 * 7 * 11 + 64
    optimizer.step(count)
    assert found[1] == found[0]  # the memory is used again
    handle.detach()
    gc.collect()
    count()
    assert found[2] == []


@pytest.mark.parametrize("fused", [None, False])
def test_step_that_replaces_data(fused):
    class Replacing(SGD):
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                param.data = param.data - LR * param.grad

    param = weight(5, 3)
    with_gradient(param)
    optimizer = Replacing([param], lr=LR)
    attach(optimizer, DECAY, fused=fused)
    for _ in range(3):
        expected = decayed(sgd_step(param), param)
        optimizer.step()
        torch.testing.assert_close(param.detach(), expected, rtol=2e-5, atol=1e-7)


def test_step_that_clears_the_gradients(exact, same):
    class Clearing(SGD):
        def step(self, closure=None):
            super().step(closure)
            self.zero_grad()

    param = weight()
    with_gradient(param)
    optimizer = Clearing([param], lr=LR)
    attach(optimizer, DECAY, **exact)
    expected = decayed(sgd_step(param), param)
    optimizer.step()
    assert param.grad is None
    assert same(param.detach(), expected)


def test_copies_follow_replaced_data(exact, same):
    params = [weight(5, 3), weight(5, 3)]
    optimizers = [SGD([param], lr=LR) for param in params]
    attach(optimizers[0], DECAY, **exact)
    for dtype, shape in ((torch.float32, (5, 3)), (torch.float64, (4, 6)), (torch.float64, (6, 4))):
        for param in params:
            param.grad = None
            param.data = torch.linspace(-1, 1, 15 if shape == (5, 3) else 24, dtype=dtype).view(
                shape
            )
            if shape == (6, 4):
                param.data = param.data.t()
            param.grad = torch.ones_like(param)
        handle = attach(optimizers[1], DECAY, **exact)  # with new copies
        for optimizer in optimizers:
            optimizer.step()
        handle.detach()
        assert same(params[0].detach(), params[1].detach())


class TestGradScaler:
    @pytest.mark.parametrize("found", [0.0, 1.0])
    def test_step_skipped_by_fused_optimizer_does_not_decay(self, found, exact, same):
        param = weight()
        with_gradient(param)
        before = param.detach().clone()
        optimizer = AdamW([param], lr=LR, fused=True, weight_decay=0.0)
        attach(optimizer, DECAY, **exact)
        optimizer.grad_scale = torch.tensor(1.0)
        optimizer.found_inf = torch.tensor(found)
        optimizer.step()
        assert same(param.detach(), before) == bool(found)

    @pytest.mark.parametrize("fused", [False, True])
    def test_works_with_torch_grad_scaler(self, fused, exact, same):
        param, twin = weight(), weight()
        optimizer, plain = (AdamW([p], lr=LR, fused=fused, weight_decay=0.0) for p in (param, twin))
        attach(optimizer, DECAY, **exact)
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
        for t, factor in enumerate([1.0, float("inf"), 1.0]):
            old = param.detach().clone()
            for p, o, scaler in zip((param, twin), (optimizer, plain), scalers, strict=True):
                o.zero_grad()
                scaler.scale((p * p).sum() * factor).backward()
                scaler.step(o)
                scaler.update()
            if t == 1:
                assert same(param.detach(), old)
            else:
                with torch.no_grad():
                    twin.mul_(DECAY.factor(old, LR))
            assert same(param, twin)
        assert scalers[0].get_scale() == 2.0  # the inf was detected

    def test_scaled_step_of_an_idle_optimizer_moves_nothing(self, exact, same):
        param, idle = weight(), weight()
        optimizers = [AdamW([p], lr=LR, fused=True) for p in (param, idle)]
        for optimizer in optimizers:
            attach(optimizer, DECAY, **exact)
            pdecay.SparsityTarget(optimizer, 0.5, 100)
        before = idle.detach().clone()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale((param * param).sum()).backward()
        for optimizer in optimizers:  # torch sums no found_inf to 0, which is not a tensor
            scaler.step(optimizer)
        scaler.update()
        assert same(idle.detach(), before)


class TestWeights:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_is_rounded_once(self, dtype, exact, same):
        param = weight(64, 8, dtype=dtype)
        param.grad = torch.zeros_like(param)
        expected = (param.detach().float() * DECAY.factor(param.detach().float(), 0.01)).to(dtype)
        optimizer = SGD([param], lr=0.01)
        attach(optimizer, DECAY, **exact)
        optimizer.step()
        assert same(param.detach(), expected)
        assert not same(param.detach(), weight(64, 8, dtype=dtype).detach())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_reaches_zero(self, dtype, exact):
        param = nn.Parameter(torch.full((4, 4), 0.05, dtype=dtype))
        optimizer = SGD([param], lr=0.1)
        attach(optimizer, Lp(0.8, 0.1), **exact)
        for _ in range(200):
            param.grad = torch.zeros_like(param)
            optimizer.step()
        assert not param.any()

    def test_complex_weights_decay_by_magnitude(self, exact):
        param = weight(3, 4, dtype=torch.complex64)
        with torch.no_grad():
            param += 1j * weight(3, 4, seed=1)
        old = param.detach().clone()
        param.grad = torch.zeros_like(param)
        optimizer = SGD([param], lr=LR)
        attach(optimizer, DECAY, **exact)
        optimizer.step()
        new = param.detach()
        torch.testing.assert_close(new.angle(), old.angle())
        shrunk = old.abs() / (1 + LR * 0.5 * old.abs() ** (0.8 - 2))
        torch.testing.assert_close(new.abs(), shrunk)

    @pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
    def test_empty_weights_are_accepted(self, shape, exact):
        empty, param = nn.Parameter(torch.empty(shape)), weight()
        with_gradient(empty, param)
        optimizer = SGD([empty, param], lr=LR)
        attach(optimizer, DECAY, **exact)
        optimizer.step()
        assert empty.shape == shape

    def test_lazy_weights_decay_after_materialisation(self, exact, same):
        module = nn.LazyLinear(3)
        optimizer = SGD(module.parameters(), lr=LR)
        attach(optimizer, DECAY, **exact)
        module(torch.ones(2, 4))
        with_gradient(module.weight, module.bias)
        expected = [decayed(sgd_step(module.weight), module.weight), sgd_step(module.bias)]
        optimizer.step()
        assert same([module.weight.detach(), module.bias.detach()], expected)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    # warnings of torch's compiler about its profiler hook and about reading a tensor's value
    "ignore::UserWarning:torch._dynamo",
    "ignore::DeprecationWarning:torch._dynamo",
)
@pytest.mark.parametrize("cls", [SGD, AdamW])
def test_works_in_a_compiled_step(cls, exact):
    torch._dynamo.reset()
    params = [weight(seed=3), weight(seed=3)]
    compiled, plain = (cls([param], lr=LR) for param in params)
    for optimizer in (compiled, plain):
        attach(optimizer, DECAY, **exact)
    step = torch.compile(compiled.step, backend="eager")
    undecayed = cls([weight(seed=3)], lr=LR)
    for _ in range(3):
        with_gradient(*params[:1])
        with_gradient(*params[1:])
        with_gradient(*undecayed.param_groups[0]["params"])
        step()
        plain.step()
        undecayed.step()
    torch.testing.assert_close(params[0], params[1], rtol=1e-5, atol=1e-6)
    assert (params[0] - undecayed.param_groups[0]["params"][0]).abs().max() > 0.01
    torch._dynamo.reset()


def test_copies_keep_settings_but_no_hooks(exact, same):
    """torch drops the hooks of copies, so a copy must be attached again."""
    param = weight()
    optimizer = SGD([param], lr=LR)
    attach(optimizer, DECAY, **exact)
    twin = copy.deepcopy(optimizer)
    (copied,) = twin.param_groups[0]["params"]
    attach(twin, Lp(1, 0.25), **exact)  # ignored: the copied groups have their own decay
    with_gradient(copied)
    expected = decayed(sgd_step(copied), copied)
    twin.step()
    assert same(copied.detach(), expected)


class TestProximalStep:
    @pytest.mark.parametrize("penalty", [Lp(0.5, 0.3), Lp(1, 0.2), Lp(0.8, 0.1) + Lp(2, 0.1)])
    def test_applies_the_operator_after_the_update(self, penalty):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(6, 5))
        twin = nn.Parameter(w.detach().clone())
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
        pdecay.attach(optimizer, penalty, step="prox")
        plain = torch.optim.SGD([twin], lr=0.1, momentum=0.9)
        for _ in range(8):
            gradient = torch.randn(6, 5)
            w.grad, twin.grad = gradient.clone(), gradient.clone()
            optimizer.step()
            plain.step()
            with torch.no_grad():
                twin.copy_(pdecay.prox.penalty_prox(penalty, twin, 0.1))
            assert torch.equal(w, twin)

    def test_p_1_finds_the_lasso_solution_with_exact_zeros(self):
        w = nn.Parameter(torch.tensor([[1.0, 0.5, 0.1, -2.0]]))
        target = w.detach().clone()
        optimizer = torch.optim.SGD([w], lr=0.5)
        pdecay.attach(optimizer, Lp(1, 0.3), step="prox")
        for _ in range(60):
            w.grad = w.detach() - target
            optimizer.step()
        assert torch.allclose(w, torch.tensor([[0.7, 0.2, 0.0, -1.7]]))

    def test_invalid_arguments_raise(self):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=0.1)
        with pytest.raises(ValueError, match='step must be "decay" or "prox", got \'proxy\''):
            pdecay.attach(optimizer, Lp(1, 1), step="proxy")
        with pytest.raises(ValueError, match='step="prox" uses no auxiliary variable'):
            pdecay.attach(optimizer, Lp(1, 1), step="prox", auxiliary=pdecay.Slow(0.1))
