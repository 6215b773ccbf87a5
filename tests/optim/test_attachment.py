from __future__ import annotations

import copy
import gc
import io

import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import pdecay
from pdecay import Lp, attach
from pdecay._optim import engine

DECAY = Lp(0.8, 0.5)
LR = 0.1


def weight(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    values = torch.randn(shape or (3, 4), generator=torch.Generator().manual_seed(seed))
    return nn.Parameter(values.to(dtype))


def with_gradient(*params: nn.Parameter) -> None:
    for i, param in enumerate(params):
        seeded = torch.Generator().manual_seed(100 + i)
        param.grad = torch.randn(param.shape, generator=seeded).to(param.dtype)


def decayed(w_tilde: torch.Tensor, w_old: torch.Tensor, decay=DECAY, lr=LR) -> torch.Tensor:
    return w_tilde.detach() * decay.factor(w_old.detach(), lr)


def sgd_step(param: nn.Parameter, lr: float = LR) -> torch.Tensor:
    """Return a parameter after a step of plain SGD."""
    return param.detach().add(param.grad, alpha=-lr)


def everything(optimizer: Optimizer) -> dict:
    """Return a copy of an optimizer's weights, state, groups and hooks."""
    return copy.deepcopy(
        {
            "groups": [dict(group) for group in optimizer.param_groups],
            "state": list(optimizer.state.values()),
            "hooks": [len(v) for k, v in vars(optimizer).items() if k.endswith("_hooks")],
            "defaults": optimizer.defaults,
        }
    )


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
    """Count copies inside the step, while they exist, by their unique shapes."""
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
    counts: dict[str, int] = {}

    def count():
        alive = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
        for name, shape in shapes.items():
            counts[name] = sum(tensor.shape == shape for tensor in alive)

    optimizer.step(count)
    gradients_and_weights = 2
    assert counts.pop("decayed") == gradients_and_weights + 1
    assert set(counts.values()) == {gradients_and_weights}
    optimizer.step(count)
    assert counts["decayed"] == gradients_and_weights + 1  # the memory is used again
    handle.detach()
    gc.collect()
    count()
    assert counts["decayed"] == gradients_and_weights


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


class TestLearningRate:
    def test_lr_may_be_a_tensor(self, exact, same):
        param = weight()
        with_gradient(param)
        expected = decayed(sgd_step(param), param, lr=float(torch.tensor(LR)))
        optimizer = SGD([param], lr=torch.tensor(LR))
        attach(optimizer, DECAY, **exact)
        optimizer.step()
        assert same(param.detach(), expected)
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)

    def test_scheduler_may_change_a_tensor_lr(self, exact, same):
        param = weight()
        optimizer = SGD([param], lr=torch.tensor(LR))
        attach(optimizer, DECAY, **exact)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        for lr in (torch.tensor(LR), torch.tensor(LR) / 2):
            with_gradient(param)
            expected = decayed(
                param.detach().add(param.grad, alpha=-lr.item()), param, lr=lr.item()
            )
            optimizer.step()
            scheduler.step()
            assert same(param.detach(), expected)

    @pytest.mark.parametrize(
        ("lr", "rate"),
        [
            (0.25, 0.25),
            (0, 0.0),
            (lambda group: group["lr"] * group["found"], 0.3),
            (lambda group: torch.tensor(0.5), 0.5),
        ],
        ids=["number", "zero", "function", "function that returns a tensor"],
    )
    def test_decay_may_have_its_own_lr(self, lr, rate, exact, same):
        param = weight()
        with_gradient(param)
        expected = decayed(sgd_step(param), param, lr=rate)
        optimizer = SGD([{"params": [param], "found": 3.0}], lr=LR)
        attach(optimizer, DECAY, lr=lr, **exact)
        optimizer.step()
        assert same(param.detach(), expected)

    @pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf"), "0.1", True])
    def test_invalid_lr_raises(self, bad, same):
        optimizer = SGD([weight()], lr=LR)
        before = everything(optimizer)
        with pytest.raises((TypeError, ValueError), match=rf"lr must be .*{bad}"):
            attach(optimizer, DECAY, lr=bad)
        assert same(everything(optimizer), before)

    @pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
    @pytest.mark.parametrize("where", ["group", "tensor", "function"])
    def test_lr_that_becomes_invalid_moves_no_weight(self, bad, where, exact, same):
        first, second = weight(seed=1), weight(seed=2)
        with_gradient(first, second)
        optimizer = SGD([{"params": [first]}, {"params": [second]}], lr=LR, momentum=0.9)
        function = (lambda group: group["own"]) if where == "function" else None
        for group in optimizer.param_groups:
            group["own"] = LR
        attach(optimizer, DECAY, lr=function, **exact)
        key = "own" if where == "function" else "lr"
        optimizer.param_groups[1][key] = torch.tensor(bad) if where == "tensor" else bad
        before = everything(optimizer)
        with pytest.raises(ValueError, match=rf"lr must be finite and >= 0, got {bad}"):
            optimizer.step()
        assert same(everything(optimizer), before)

    def test_lr_function_that_returns_none_raises(self, exact, same):
        param = weight()
        with_gradient(param)
        optimizer = SGD([param], lr=LR)
        attach(optimizer, DECAY, lr=lambda group: None, **exact)
        before = param.detach().clone()
        with pytest.raises(TypeError, match="function passed as lr must return a number, got None"):
            optimizer.step()
        assert same(param.detach(), before)

    def test_optimizer_without_lr_requires_one(self):
        optimizer = pytorch_optimizer.A2Grad([weight()])
        with pytest.raises(ValueError, match=r"A2Grad has no group\['lr'\].*pass lr="):
            attach(optimizer, DECAY)
        assert "decay" not in optimizer.param_groups[0]


class TestGroups:
    @pytest.mark.parametrize(
        ("key", "value", "rule"),
        [
            ("decay_1d", 1.0, "decay_1d must be True or False, got 1.0"),
            ("decay_scale", True, "decay_scale must be a number, got True"),
            ("decay_scale", torch.tensor(1.0), "decay_scale must be a number"),
            ("decay", [[0.8, True]], "lam must be a number, got True"),
            ("decay_lr", float("nan"), "decay_lr must be finite"),
        ],
    )
    def test_invalid_setting_raises_at_the_next_step(self, key, value, rule):
        param = weight()
        with_gradient(param)
        optimizer = SGD([{"params": [param], "decay": Lp(0.8, 1.0)}], lr=LR)
        attach(optimizer, DECAY)
        optimizer.step()
        before = param.detach().clone()
        optimizer.param_groups[0][key] = value
        with pytest.raises((TypeError, ValueError), match=rule):
            optimizer.step()
        assert torch.equal(param, before)

    def test_settings_are_plain_numbers(self):
        optimizer = SGD([weight()], lr=LR)
        attach(optimizer, Lp(0.8, 1e-3) + Lp(2, 2e-3))
        (group,) = optimizer.param_groups
        assert group["decay"] == [[0.8, 1e-3], [2.0, 2e-3]]
        assert group["decay_scale"] == 1.0
        assert group["decay_1d"] is False

    def test_own_decay_overrides_and_includes_vectors(self, exact, same):
        matrix, vector = weight(seed=1), weight(4, seed=2)
        with_gradient(matrix, vector)
        own = Lp(1, 0.25)
        expected = [decayed(sgd_step(matrix), matrix), decayed(sgd_step(vector), vector, own)]
        optimizer = SGD([{"params": [matrix]}, {"params": [vector], "decay": own}], lr=LR)
        attach(optimizer, DECAY, **exact)
        optimizer.step()
        assert same([matrix.detach(), vector.detach()], expected)

    @pytest.mark.parametrize("none", [None, []])
    def test_none_means_no_decay(self, none, exact, same):
        param = weight()
        with_gradient(param)
        expected = sgd_step(param)
        optimizer = SGD([{"params": [param], "decay": none}], lr=LR)
        attach(optimizer, DECAY, **exact)
        optimizer.step()
        assert same(param.detach(), expected)
        assert optimizer.param_groups[0]["decay"] == []

    def test_decay_may_be_none_for_all_groups(self, exact, same):
        param = weight()
        with_gradient(param)
        expected = sgd_step(param)
        optimizer = SGD([param], lr=LR)
        attach(optimizer, None, **exact)
        optimizer.step()
        assert same(param.detach(), expected)

    def test_scale_multiplies_every_lam(self, exact, same):
        param = weight()
        with_gradient(param)
        elastic = Lp(0.5, 0.25) + Lp(2, 0.5)
        expected = decayed(sgd_step(param), param, elastic, lr=LR * 3.0)
        optimizer = SGD([param], lr=LR)
        attach(optimizer, elastic, **exact)
        optimizer.param_groups[0]["decay_scale"] = 3.0
        optimizer.step()
        assert same(param.detach(), expected)

    @pytest.mark.parametrize("own", [{}, {"decay": Lp(1, 0.25)}, {"decay": None}])
    def test_group_added_later_decays(self, own, exact, same):
        optimizer = SGD([weight()], lr=LR)
        attach(optimizer, DECAY, **exact)
        param = weight(seed=5)
        with_gradient(param)
        decay = own.get("decay", DECAY)
        expected = decayed(sgd_step(param), param, decay) if decay else sgd_step(param)
        optimizer.add_param_group({"params": [param], **own})
        optimizer.step()
        assert same(param.detach(), expected)
        assert optimizer.param_groups[1]["decay"] == (decay.pairs() if decay else [])

    def test_group_added_later_is_in_the_checkpoint(self):
        optimizer = SGD([weight()], lr=LR)
        attach(optimizer, DECAY)
        optimizer.add_param_group({"params": [weight()]})
        saved = optimizer.state_dict()["param_groups"]
        assert [group["decay"] for group in saved] == [DECAY.pairs()] * 2

    @pytest.mark.parametrize("bad", ["strong", 0.1, [[0.8]], [[-1, 0.1]], [[1, float("nan")]]])
    def test_invalid_group_added_later_moves_no_weight(self, bad, exact, same):
        first, second = weight(seed=1), weight(seed=2)
        optimizer = SGD([first], lr=LR, momentum=0.9)
        attach(optimizer, DECAY, **exact)
        optimizer.add_param_group({"params": [second], "decay": bad})
        with_gradient(first, second)
        before = [first.detach().clone(), second.detach().clone()]
        with pytest.raises((TypeError, ValueError), match="must be"):
            optimizer.step()
        assert same([first.detach(), second.detach()], before)

    def test_unknown_keys_are_unchanged(self, exact):
        theirs = {"initial_lr": 0.5, "name": "head", "layers": [1, 2]}
        optimizer = SGD([{"params": [weight()], **theirs}], lr=LR)
        handle = attach(optimizer, DECAY, **exact)
        with_gradient(*optimizer.param_groups[0]["params"])
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert theirs.items() <= optimizer.param_groups[0].items()
        handle.detach()
        assert theirs.items() <= optimizer.param_groups[0].items()


class TestDetach:
    def test_restores_everything(self, exact, same):
        optimizer = AdamW([{"params": [weight()], "name": "a"}, {"params": [weight(4)]}], lr=LR)
        before = everything(optimizer)
        attach(optimizer, DECAY, **exact).detach()
        assert same(everything(optimizer), before)

    def test_restores_a_groups_own_decay(self, exact):
        optimizer = SGD([{"params": [weight()], "decay": DECAY}], lr=LR)
        before = dict(optimizer.param_groups[0])
        attach(optimizer, None, **exact).detach()
        after = optimizer.param_groups[0]
        assert after.keys() == before.keys()
        assert after["decay"] == DECAY or after["decay"] == DECAY.pairs()

    def test_second_detach_does_nothing(self, exact):
        optimizer = SGD([weight()], lr=LR)
        handle = attach(optimizer, DECAY, **exact)
        handle.detach()
        other = attach(optimizer, Lp(1, 0.25), **exact)
        handle.detach()
        assert optimizer.param_groups[0]["decay"] == [[1.0, 0.25]]
        other.detach()
        assert "decay" not in optimizer.param_groups[0]

    def test_attach_works_after_detach(self, exact, same):
        param = weight()
        with_gradient(param)
        optimizer = SGD([param], lr=LR)
        attach(optimizer, DECAY, **exact).detach()
        attach(optimizer, Lp(1, 0.25), **exact)
        expected = decayed(sgd_step(param), param, Lp(1, 0.25))
        optimizer.step()
        assert same(param.detach(), expected)

    def test_restores_groups_added_later(self, exact):
        optimizer = SGD([weight()], lr=LR)
        handle = attach(optimizer, DECAY, **exact)
        optimizer.add_param_group({"params": [weight()]})
        optimizer.state_dict()
        handle.detach()
        assert all(not any("decay" in k[:5] for k in group) for group in optimizer.param_groups)

    def test_restores_after_loading_a_checkpoint(self, exact, same):
        optimizer = SGD([weight()], lr=LR)
        before = everything(optimizer)
        handle = attach(optimizer, DECAY, **exact)
        optimizer.load_state_dict(optimizer.state_dict())
        handle.detach()
        assert same(everything(optimizer), before)


class TestBadInput:
    def test_second_attach_raises(self, exact, same):
        param = weight()
        with_gradient(param)
        optimizer = SGD([param], lr=LR)
        attach(optimizer, DECAY, **exact)
        before = everything(optimizer)
        with pytest.raises(ValueError, match=r"SGD already has p-norm weight decay.*detach\(\)"):
            attach(optimizer, Lp(1, 0.25), **exact)
        assert same(everything(optimizer), before)

    @pytest.mark.parametrize("cls", [pdecay.PAdam, pdecay.PSGD])
    def test_attach_to_padam_or_psgd_raises(self, cls, same):
        optimizer = cls([weight()], decay=DECAY)
        before = everything(optimizer)
        with pytest.raises(ValueError, match=f"{cls.__name__} already has p-norm weight decay"):
            attach(optimizer, DECAY)
        assert same(everything(optimizer), before)

    @pytest.mark.parametrize("thing", [None, "AdamW", AdamW, nn.Linear(2, 2), [weight()]])
    def test_non_optimizer_raises(self, thing):
        with pytest.raises(
            TypeError, match=f"needs a torch.optim.Optimizer, .*{type(thing).__name__}"
        ):
            attach(thing, DECAY)

    @pytest.mark.parametrize(
        "wrapper",
        ["Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "TRAC", "Magma", "SafeFP16Optimizer"],
    )
    def test_wrapper_is_unwrapped(self, wrapper):
        inner = Adam([weight()], lr=LR)
        outer = getattr(pytorch_optimizer, wrapper)(inner)
        assert attach(outer, DECAY).optimizer is inner
        assert not any(getattr(outer, "_optimizer_step_pre_hooks", {}))

    def test_unknown_wrapper_raises(self, same):
        class Wrapper(Optimizer):
            def __init__(self, base):
                self.base = base

        inner = Adam([weight()], lr=LR)
        before = everything(inner)
        with pytest.raises(TypeError, match=r"Wrapper wraps another optimizer.*inner"):
            attach(Wrapper(inner), DECAY)
        assert same(everything(inner), before)

    @pytest.mark.parametrize("bad", ["0.8", 0.8, {"p": 1}, [0.8, 1e-3], [[1, 2, 3]], Lp])
    def test_invalid_decay_raises(self, bad, same):
        optimizer = SGD([weight()], lr=LR)
        before = everything(optimizer)
        with pytest.raises(TypeError, match="a decay must be an Lp, a sum of Lp, None or") as error:
            attach(optimizer, bad)
        assert repr(bad) in str(error.value)
        assert same(everything(optimizer), before)

    def test_invalid_decay_of_last_group_changes_no_other(self, same):
        optimizer = SGD([{"params": [weight()]}, {"params": [weight()], "decay": "much"}], lr=LR)
        before = everything(optimizer)
        with pytest.raises(TypeError, match=r"a decay must be .*'much'"):
            attach(optimizer, DECAY)
        assert same(everything(optimizer), before)

    @pytest.mark.parametrize("scale", [-1.0, float("nan"), "1"])
    def test_invalid_scale_raises(self, scale, same):
        optimizer = SGD([{"params": [weight()], "decay_scale": scale}], lr=LR)
        with pytest.raises((TypeError, ValueError), match=rf"decay_scale must be .*{scale}"):
            attach(optimizer, DECAY)
        assert "decay" not in optimizer.param_groups[0]


class TestCheckpoint:
    def test_checkpoint_from_before_attach_keeps_settings(self, exact, same):
        saved = SGD([{"params": [weight(4)]}, {"params": [weight()]}], lr=0.5).state_dict()
        untouched = copy.deepcopy(saved)
        optimizer = SGD([{"params": [weight(4)], "decay": None}, {"params": [weight()]}], lr=LR)
        attach(optimizer, DECAY, **exact)
        optimizer.param_groups[1]["decay_scale"] = 2.0
        optimizer.load_state_dict(saved)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
        assert [group["decay"] for group in optimizer.param_groups] == [[], DECAY.pairs()]
        assert [group["decay_scale"] for group in optimizer.param_groups] == [1.0, 2.0]
        assert [group["decay_1d"] for group in optimizer.param_groups] == [True, False]
        assert same(saved, untouched)

    def test_checkpoint_from_before_attach_gives_added_group_the_default(self, exact):
        plain = SGD([weight()], lr=LR)
        plain.add_param_group({"params": [weight()]})
        optimizer = SGD([weight()], lr=LR)
        attach(optimizer, DECAY, **exact)
        optimizer.add_param_group({"params": [weight()]})
        optimizer.load_state_dict(plain.state_dict())
        assert [group["decay"] for group in optimizer.param_groups] == [DECAY.pairs()] * 2

    def test_settings_of_the_checkpoint_win(self, exact):
        saving, loading = SGD([weight()], lr=LR), SGD([weight()], lr=LR)
        attach(saving, Lp(0.5, 0.25) + Lp(2, 0.5), **exact)
        saving.param_groups[0]["decay_scale"] = 0.5
        file = io.BytesIO()
        torch.save(saving.state_dict(), file)
        file.seek(0)
        attach(loading, DECAY, **exact)
        loading.load_state_dict(torch.load(file, weights_only=True))
        group = loading.param_groups[0]
        assert (group["decay"], group["decay_scale"]) == ([[0.5, 0.25], [2.0, 0.5]], 0.5)

    def test_loads_into_a_plain_optimizer(self, exact):
        saving, loading = SGD([weight()], lr=LR), SGD([weight()], lr=0.5)
        attach(saving, DECAY, **exact)
        loading.load_state_dict(saving.state_dict())
        assert loading.param_groups[0]["lr"] == LR

    @pytest.mark.parametrize(
        ("key", "value", "rule"),
        [
            ("decay", "strong", "a decay must be .*'strong'"),
            ("decay", [[0.8, -0.1]], "lam must be finite and >= 0, got -0.1"),
            ("decay", [[float("nan"), 0.1]], "p must be finite and >= 0, got nan"),
            ("decay", [[-1.0, 0.1]], "p must be finite and >= 0, got -1.0"),
            ("decay", [[0.8]], "a decay must be"),
            ("decay", [["0.8", 0.1]], "p must be a number, got '0.8'"),
            ("decay_scale", -1.0, "decay_scale must be finite and >= 0, got -1.0"),
            ("decay_scale", None, "decay_scale must be a number, got None"),
            ("decay_1d", "yes", "decay_1d must be .*'yes'"),
        ],
    )
    def test_invalid_checkpoint_changes_nothing(self, key, value, rule, exact, same):
        optimizer = AdamW([{"params": [weight(seed=1)]}, {"params": [weight(seed=2)]}], lr=LR)
        attach(optimizer, DECAY, **exact)
        for group in optimizer.param_groups:
            with_gradient(*group["params"])
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][1][key] = value
        saved["param_groups"][0]["lr"] = 0.5
        saved["state"][0]["exp_avg"] += 1
        before, untouched = everything(optimizer), copy.deepcopy(saved)
        with pytest.raises((TypeError, ValueError), match=rf"checkpoint.*group 1: .*{rule}"):
            optimizer.load_state_dict(saved)
        assert same(everything(optimizer), before)
        assert same(saved, untouched)

    def test_checkpoint_with_other_groups_raises_torchs_error(self, exact, same):
        optimizer = SGD([weight()], lr=LR)
        attach(optimizer, DECAY, **exact)
        before = everything(optimizer)
        other = SGD([{"params": [weight()]}, {"params": [weight()]}], lr=LR)
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict(other.state_dict())
        assert same(everything(optimizer), before)


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


class TestFrozenWarning:
    def test_warning_names_a_zero_tensor_once(self):
        zero = nn.Parameter(torch.zeros(3, 4))
        optimizer = SGD([("good", weight()), ("lora_b", zero)], lr=LR)
        with pytest.warns(UserWarning, match=r"all zero and would never.*: lora_b\.") as caught:
            handle = attach(optimizer, DECAY)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        handle.detach()
        attach(optimizer, DECAY)  # warnings are errors in the tests

    @pytest.mark.parametrize("harmless", [Lp(2, 0.1), Lp(3, 0.1), Lp(0.8, 0.0), None])
    def test_no_warning_if_nothing_freezes(self, harmless):
        attach(SGD([nn.Parameter(torch.zeros(3, 4))], lr=LR), harmless)

    def test_no_warning_for_excluded_tensors(self):
        zeros = [nn.Parameter(torch.zeros(s)) for s in [(4,), (2, 2), (0, 2)]]
        fixed = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        groups = [
            {"params": [zeros[0], zeros[2], fixed, weight()]},
            {"params": [zeros[1]], "decay": None},
        ]
        attach(SGD(groups, lr=LR), DECAY)


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
