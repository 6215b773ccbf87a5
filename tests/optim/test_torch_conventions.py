"""Behaviour of torch's own optimizers that users and other packages of torch rely on."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, AdamW

import pdecay
from pdecay import PSGD, Every, Lp, PAdam, Slow, attach

DECAY = Lp(0.8, 0.3)


def attached_adamw(params, decay=DECAY, **options):
    own = {k: options.pop(k) for k in ("auxiliary",) if k in options}
    optimizer = AdamW(params, **{"weight_decay": 0.0, **options})
    optimizer.handle = weakref.proxy(attach(optimizer, decay, **own))
    return optimizer


def padam(params, decay=DECAY, **options):
    return PAdam(params, decay=decay, **options)


def psgd(params, decay=DECAY, **options):
    return PSGD(params, **{"momentum": 0.9, "decay": decay, **options})


ALL = pytest.mark.parametrize("build", [padam, psgd, attached_adamw])


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def train(model: nn.Module, optimizer, steps: int = 1) -> None:
    for t in range(steps):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1 + t, 8).reshape(2, 4)
        model(x).square().sum().backward()
        optimizer.step()


class TestSignature:
    def test_psgd_takes_only_lr_momentum_dampening_by_position(self):
        parameters = list(inspect.signature(PSGD).parameters.values())
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == ["params", "lr", "momentum", "dampening"]
        with pytest.raises(TypeError, match="positional"):
            PSGD(linear().parameters(), 0.1, 0.9, 0, 1e-4)

    @ALL
    def test_groups_without_parameters_are_accepted(self, build):
        optimizer = build([{"params": []}])
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        model = linear()
        optimizer.add_param_group({"params": list(model.parameters())})
        before = model.weight.detach().clone()
        train(model, optimizer)
        assert not torch.equal(model.weight, before)

    def test_differentiable_raises(self):
        model = linear()
        with pytest.raises(ValueError, match="differentiable"):
            attach(SGD(model.parameters(), differentiable=True), DECAY)
        with pytest.raises(ValueError, match="differentiable"):
            PAdam([{"params": list(model.parameters()), "differentiable": True}])
        optimizer = SGD(model.parameters())
        attach(optimizer, DECAY)
        optimizer.param_groups[0]["differentiable"] = True
        model(torch.ones(4)).sum().backward()
        with pytest.raises(ValueError, match="differentiable"):
            optimizer.step()


class TestDistributedCheckpoint:
    """torch creates missing state by a step with lr = 0 and zero gradients."""

    @pytest.mark.parametrize("auxiliary", [Every(2), Slow(0.3)])
    @pytest.mark.parametrize("scale", [0.0, 1.0])  # of the new optimizer, as in a warm-up of lam
    @ALL
    def test_anchors_are_loaded(self, build, scale, auxiliary, same):
        model = linear()
        optimizer = build(model.parameters(), lr=1e-2, auxiliary=auxiliary)
        train(model, optimizer, 3)
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=flat))
        fresh_model = linear()
        fresh_model.load_state_dict(model.state_dict())
        fresh = build(fresh_model.parameters(), lr=1e-2, auxiliary=auxiliary)
        fresh.param_groups[0]["decay_scale"] = scale
        set_optimizer_state_dict(fresh_model, fresh, saved, options=flat)
        assert same(optimizer.state_dict()["state"], fresh.state_dict()["state"])
        assert any("anchor" in state for state in fresh.state.values())
        train(model, optimizer, 3)
        train(fresh_model, fresh, 3)
        assert same(list(model.state_dict().values()), list(fresh_model.state_dict().values()))

    @ALL
    def test_own_learning_rate_of_the_decay_moves_no_fresh_weight(self, build):
        model = linear()
        before = model.weight.detach().clone()
        optimizer = build([{"params": list(model.parameters()), "decay_lr": 0.1}], lr=1e-2)
        get_optimizer_state_dict(model, optimizer)
        assert torch.equal(model.weight, before)

    @pytest.mark.parametrize("tensor_lr", [False, True])
    def test_learning_rate_of_attach_moves_no_fresh_weight(self, tensor_lr):
        model = linear()
        before = model.weight.detach().clone()
        optimizer = SGD(model.parameters(), lr=torch.tensor(0.1) if tensor_lr else 0.1)
        attach(optimizer, DECAY, lr=0.1)
        get_optimizer_state_dict(model, optimizer)
        assert torch.equal(model.weight, before)

    @pytest.mark.parametrize("auxiliary", [None, Slow(0.3)])
    def test_broadcast_from_rank_0_under_fsdp2(self, auxiliary, tmp_path):
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        try:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            model = linear()
            optimizer = padam(model.parameters(), auxiliary=auxiliary)
            train(model, optimizer, 2)
            full = StateDictOptions(full_state_dict=True)
            saved = get_optimizer_state_dict(model, optimizer, options=full)
            sharded = fully_shard(linear())
            fresh = padam(sharded.parameters(), auxiliary=auxiliary)
            set_optimizer_state_dict(sharded, fresh, saved, options=options)
            expected = optimizer.state[model.weight]
            loaded = fresh.state[sharded.weight]
            assert loaded.keys() == expected.keys()
            key = "exp_avg" if auxiliary is None else "anchor"
            assert torch.equal(loaded[key].full_tensor(), expected[key])
        finally:
            dist.destroy_process_group()


class TestLifetime:
    @ALL
    @pytest.mark.parametrize("auxiliary", [None, Slow(0.3)])
    def test_optimizer_and_weights_are_freed_without_the_garbage_collector(self, build, auxiliary):
        model = linear()
        optimizer = build(model.parameters(), auxiliary=auxiliary)
        train(model, optimizer, 2)
        optimizer.state_dict()
        alive = [weakref.ref(optimizer), weakref.ref(model.weight)]
        gc.collect()
        gc.disable()
        try:
            del model, optimizer
            assert [ref() for ref in alive] == [None, None]
        finally:
            gc.enable()

    def test_reported_zero_weights_can_be_swapped(self):
        model = linear()
        nn.init.zeros_(model.weight)
        with pytest.warns(UserWarning, match="all zero"):
            PAdam(model.parameters())
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.bfloat16()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert model.weight.dtype == torch.bfloat16


class TestTracing:
    """Under any tracer or transform, the step consists of torch's own operations."""

    def functional_step(self, build):
        def step(w, g):
            weight = w.clone()
            optimizer = build([weight], lr=0.1)
            weight.grad = g.clone()
            optimizer.step()
            return weight

        return step

    def values(self, *shape):
        return torch.randn(shape), torch.randn(shape)

    @ALL
    @pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
    def test_make_fx_records_update_and_decay(self, build, tracing):
        from torch.fx.experimental.proxy_tensor import make_fx

        step = self.functional_step(build)
        graph = make_fx(step, tracing_mode=tracing)(*self.values(4, 3))
        inputs = self.values(4, 3)  # others than those that were traced
        torch.testing.assert_close(graph(*inputs), step(*inputs), rtol=1e-5, atol=1e-6)

    @ALL
    @pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
    def test_vmap(self, build):
        step = self.functional_step(build)
        w, g = self.values(5, 4, 3)
        expected = torch.stack([step(a, b) for a, b in zip(w, g, strict=True)])
        torch.testing.assert_close(torch.vmap(step)(w, g), expected, rtol=1e-5, atol=1e-6)

    @ALL
    def test_fake_tensor_mode(self, build):
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        with FakeTensorMode():
            model = nn.Linear(4, 3)
            optimizer = build(model.parameters())
            train(model, optimizer, 2)
        assert isinstance(model.weight.data, FakeTensor)

    @pytest.mark.parametrize(
        ("build", "options"),
        [
            (padam, {"foreach": True}),
            (padam, {"foreach": True, "decay": Lp(0.5, 0.1) + Lp(2, 0.3)}),
            (padam, {"foreach": False, "amsgrad": True}),
            (padam, {}),
            (psgd, {"foreach": True}),
            (psgd, {"foreach": True, "momentum": 0.0}),
            (psgd, {"nesterov": True}),
        ],
    )
    @pytest.mark.parametrize("tensor_lr", [False, True])
    def test_compiled_step_is_one_graph(self, build, options, tensor_lr):
        from torch._dynamo.testing import CompileCounter

        if tensor_lr and build is padam and options.get("foreach"):
            options = {**options, "capturable": True}  # torch requires it
        torch._dynamo.reset()
        model, expected_model = linear(), linear()
        lr = [torch.tensor(0.01) if tensor_lr else 0.01 for _ in range(2)]
        optimizer = build(model.parameters(), lr=lr[0], **options)
        plain = {"fused": False, **options, "capturable": False, "foreach": False}
        if build is psgd:
            del plain["capturable"]
        expected = build(expected_model.parameters(), lr=lr[1], **plain)
        counter = CompileCounter()
        step = torch.compile(optimizer.step, fullgraph=True, backend=counter)
        for _ in range(4):
            train(expected_model, expected)
            if tensor_lr:
                for rate in lr:
                    rate.mul_(0.5)
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 8).reshape(2, 4)).square().sum().backward()
            if tensor_lr:
                lr[0].mul_(2)
            step()
            if tensor_lr:
                lr[0].mul_(0.5)
        # SGD's first step with momentum has no buffers, so torch compiles it separately.
        has_buffers = build is psgd and options.get("momentum") != 0.0
        assert counter.frame_count == (2 if has_buffers else 1)
        for ours, theirs in zip(model.parameters(), expected_model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("build", [padam, psgd])
    def test_compiled_step_follows_a_changed_learning_rate(self, build):
        """torch.compile traces a learning rate that changes as a symbol instead of a float."""
        torch._dynamo.reset()
        models = [linear(), linear()]
        optimizers = [build(model.parameters(), lr=0.01, fused=False) for model in models]
        steps = [torch.compile(optimizers[0].step, fullgraph=True, backend="eager")]
        steps += [optimizers[1].step]
        for model, optimizer, step in zip(models, optimizers, steps, strict=True):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.linspace(-1, 1, 8).reshape(2, 4)).square().sum().backward()
                step()
                optimizer.param_groups[0]["lr"] *= 0.5
        torch.testing.assert_close(models[0].weight, models[1].weight, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("build", [padam, psgd])
    def test_compiled_step_holds_zeros_at_a_tiny_learning_rate(self, build):
        """lr times the scale that holds zeros is 0 in float32 if lr is at the end of a schedule."""
        torch._dynamo.reset()
        model, lr = linear(), torch.tensor(0.01)
        with torch.no_grad():
            model.weight[0] = 0.0
        optimizer = build([model.weight], lr=lr)
        pdecay.freeze_zeros(optimizer)
        step = torch.compile(optimizer.step, fullgraph=True, backend="eager")
        for value in (1e-2, 1e-9, 1e-17, 1e-30):
            lr.fill_(value)
            model.weight.grad = torch.ones_like(model.weight)
            step()
            assert not model.weight[0].any()
            assert model.weight[1:].all()

    @pytest.mark.slow
    @pytest.mark.parametrize("foreach", [True, False])
    @pytest.mark.parametrize("build", [padam, psgd])
    def test_compiled_training_step_is_one_graph(self, build, foreach):
        """The forward pass, the gradients and the functional step compile to one graph."""
        torch._dynamo.reset()
        model, expected_model = linear(), linear()
        # The functions decay all tensors, also biases.
        group = {"params": list(expected_model.parameters()), "decay_1d": True}
        expected = build([group], lr=0.01, foreach=foreach)
        params = list(model.parameters())
        moments = [[torch.zeros_like(param) for param in params] for _ in range(2)]
        steps = [torch.tensor(0.0) for _ in params]
        options = {"decay": DECAY, "lr": 0.01, "foreach": foreach}
        x = torch.linspace(-1, 1, 8).reshape(2, 4)

        def train_step(x):
            loss = model(x).square().sum()
            grads = list(torch.autograd.grad(loss, params))
            if build is padam:
                # torch's compiled foreach step needs capturable for step counts in tensors.
                adam = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "capturable": foreach}
                pdecay.functional.padam(params, grads, *moments, [], steps, **adam, **options)
            else:
                pdecay.functional.psgd(params, grads, moments[0], momentum=0.9, **options)
            return loss.detach()

        with torch._dynamo.config.patch(trace_autograd_ops=True):
            compiled = torch.compile(train_step, fullgraph=True)
            for _ in range(3):
                compiled(x)
                train(expected_model, expected)
        for ours, theirs in zip(model.parameters(), expected_model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


class TestTensorHyperparameters:
    @pytest.mark.parametrize("fused", [None, False])
    @pytest.mark.parametrize(
        ("build", "options"),
        [
            (padam, {"weight_decay": 0.1}),
            (psgd, {"weight_decay": 0.1}),
            (psgd, {"momentum": 0.9}),
            (psgd, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
        ],
    )
    def test_tensors_equal_numbers(self, build, options, fused):
        models = linear(), linear()
        tensors = {
            key: torch.tensor(value) if isinstance(value, float) and key != "nesterov" else value
            for key, value in options.items()
        }
        for model, settings in zip(models, (options, tensors), strict=True):
            train(model, build(model.parameters(), lr=0.1, fused=fused, **settings), 3)
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("key", ["momentum", "weight_decay"])
    @pytest.mark.parametrize("bad", [torch.tensor(-0.1), torch.tensor([0.1, 0.2])])
    def test_invalid_tensors_raise(self, key, bad):
        with pytest.raises(ValueError, match=key):
            psgd(linear().parameters(), **{key: bad})


class TestExtremeNumbers:
    """The C kernel agrees with torch's operations at the ends of the range."""

    @pytest.mark.parametrize("value", [float("inf"), float("-inf")])
    @pytest.mark.parametrize("options", [{}, {"momentum": 0.0}, {"nesterov": True}], ids=str)
    def test_infinite_weights(self, value, options):
        results = []
        for fused in (None, False):
            weight = nn.Parameter(torch.tensor([[value, 1.0, -1.0, 0.5]] * 3))
            optimizer = psgd([weight], lr=0.1, fused=fused, **options)
            for _ in range(3):
                weight.grad = torch.full_like(weight, 0.5)
                optimizer.step()
            results.append(weight.detach())
        assert results[1][0, 0] == value
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("gradient", [1e-18, 1e-19, 1e-20])
    @pytest.mark.parametrize("eps", [0.0, 1e-30])
    def test_small_gradients_without_eps(self, dtype, gradient, eps):
        results = []
        for fused in (None, False):
            weight = nn.Parameter(torch.full((3, 4), 0.5, dtype=dtype))
            optimizer = padam([weight], lr=0.1, eps=eps, fused=fused)
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
            results.append(weight.detach())
        assert results[0].isfinite().all()
        # The second moment is subnormal in float32 and has few bits.
        torch.testing.assert_close(*results, rtol=1e-2, atol=1e-7)
