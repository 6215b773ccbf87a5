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

    def test_differentiable_is_refused(self):
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
    @ALL
    def test_anchors_are_loaded(self, build, auxiliary, same):
        model = linear()
        optimizer = build(model.parameters(), lr=1e-2, auxiliary=auxiliary)
        train(model, optimizer, 3)
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        fresh_model = linear()
        fresh_model.load_state_dict(model.state_dict())
        fresh = build(fresh_model.parameters(), lr=1e-2, auxiliary=auxiliary)
        set_optimizer_state_dict(fresh_model, fresh, saved)
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

    def test_zero_weights_that_were_warned_of_can_be_swapped(self):
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
