"""Checks that run on each of four processes.

    python -m tests.ranks.checks RANK WORLD FOLDER [NAME ...]

All ranks see the same batch, so that averaged gradients are equal to those of one process to the
last bit: mean values over two or four equal numbers are exact.
"""

import copy
import faulthandler
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pdecay import (
    PSGD,
    GradualMagnitudePruning,
    Lp,
    MagnitudePruning,
    PAdam,
    SparsityTarget,
    attach,
    doctor,
    freeze_zeros,
    param_groups,
    prox,
    sparsity,
)
from pdecay._sparsity.ranking import count_zeros, kth_magnitude, zero_smallest_
from pdecay._sparsity.shards import global_index, groups_of, local_part
from tests.ranks.models import (
    DECAY,
    SIZE,
    STEPS,
    Normed,
    adaptive,
    all_four,
    assert_equal,
    assert_equal_on_all_ranks,
    attached,
    build,
    ddp_2,
    ddp_4,
    fsdp_2,
    fsdp_4,
    fsdp_tp,
    hsdp,
    padam,
    psgd,
    tp_2,
    tp_4,
    train,
    whole,
    zero,
    zero_attached,
    zero_sgd,
    zeros,
)


def check_ranking(folder):
    """Shards of any kind are ranked as the whole, ties included."""
    mesh, square = all_four(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(9, 4, generator=generator) for _ in range(3)]
    tensors += [torch.randn(5, generator=generator), torch.randn(3, 7, generator=generator)]
    tensors[1][2:7] = 0.5  # ties on several ranks
    tensors[2][:, 1] = -0.5
    layouts = [(mesh, [Shard(0)]), (mesh, [Shard(1)]), (square, [Shard(0), Shard(1)])]
    layouts += [(square, [Replicate(), Shard(0)])]

    def spread():
        sharded = [
            distribute_tensor(tensor.clone(), *layout)
            for tensor, layout in zip(tensors, layouts, strict=False)
        ]
        with torch.no_grad():  # FSDP of a tensor-parallel weight
            linear = nn.Linear(7, 3, bias=False)
            linear.weight.copy_(tensors[4])
        parallelize_module(linear, square["tp"], ColwiseParallel())
        fully_shard(linear, mesh=square["dp"])
        return [*sharded, linear.weight]

    assert "Strided" in str(spread()[4].placements)
    for tensor, sharded in zip(tensors, spread(), strict=True):
        local = tensor
        for dim in range(tensor.ndim):
            local = local.index_select(dim, global_index(sharded, dim))
        assert torch.equal(local, sharded.to_local())
    size = sum(tensor.numel() for tensor in tensors)
    below = sum(int((tensor.abs() < 0.5).sum()) for tensor in tensors)
    for k in (1, 8, below, below + 1, below + 7, below + 20, below + 23, below + 29, size):
        alone, together = [tensor.clone() for tensor in tensors], spread()
        assert kth_magnitude(together, k) == kth_magnitude(alone, k)
        zero_smallest_(alone, k)
        zero_smallest_(together, k)
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a, b.full_tensor())
        assert count_zeros(together) == k


def check_pruning_and_prox(folder):
    """Pruning and the proximal step give the same on sharded and on whole parameters."""
    mesh = all_four()
    torch.manual_seed(1)
    weight = torch.randn(9, 4)

    def trained(weight, pruning):
        param = nn.Parameter(weight)
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
        one, share = trained(weight.clone(), pruning)
        both, of_both = trained(distribute_tensor(weight.clone(), mesh, [Shard(0)]), pruning)
        assert torch.equal(one, both)
        assert share == of_both > 0.1
    sharded = distribute_tensor(weight, mesh, [Shard(0)])
    for penalty in (Lp(0.5, 0.1), Lp(0.8, 0.1), Lp(1.5, 0.1) + Lp(1, 0.1), Lp(0.8, 1) + Lp(3, 1)):
        step = prox.penalty_prox(penalty, sharded, 0.5).full_tensor()
        torch.testing.assert_close(step, prox.penalty_prox(penalty, weight, 0.5))


# The optimizer of one process for that of many.
ALONE = {zero: padam, zero_attached: attached, zero_sgd: psgd}
CASES = [
    (ddp_4, attached, {"rank": "magnitude", "floor": 0.1}),
    (fsdp_2, padam, {"pull": 0.5, "floor": 0.1}),
    (fsdp_2, psgd, {}),
    (fsdp_2, padam, {"update_power": 0.5}),
    (tp_2, attached, {"update_power": 0.5}),
    (ddp_4, zero, {"update_power": 0.5}),
    (fsdp_4, padam, {"per_layer": True}),
    (hsdp, padam, {"floor": 0.1}),
    (tp_2, padam, {}),
    (tp_4, attached, {"rank": "magnitude", "floor": 0.1}),
    (fsdp_tp, padam, {"pull": 0.5}),
    (ddp_4, zero, {"pull": 0.5}),
    (ddp_4, zero_sgd, {"floor": 0.1}),
    (ddp_2, zero_attached, {}),
]


def check_training(folder):
    """The same weights and the same sparsity, however the model is spread."""
    for spread, make, options in CASES:
        splits_products = spread in (tp_2, tp_4, fsdp_tp)
        rounds = splits_products or not options.keys().isdisjoint({"pull", "update_power"})
        dtype = torch.float64 if splits_products else torch.float32
        alone, model = build(dtype), spread(build(dtype))
        optimizer, together = ALONE.get(make, make)(alone), make(model)
        SparsityTarget(optimizer, 0.75, STEPS, **options)
        target = SparsityTarget(together, 0.75, STEPS, **options)
        train(alone, optimizer)
        train(model, together)
        name = f"{spread.__name__}, {make.__name__}, {options}"
        try:
            assert_equal(model, alone, 1e-6 if rounds else 0.0)
            share = target.sparsity
            assert share == sparsity(model).total == zeros(alone) / SIZE
            assert abs(share - 0.75) < 0.003
            assert_equal_on_all_ranks(share)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def check_metric(folder):
    """The decay in Adam's metric uses the mean over all ranks."""
    for spread in (ddp_4, fsdp_2, fsdp_4, hsdp, tp_2, fsdp_tp):
        alone, model = build(torch.float64), spread(build(torch.float64))
        optimizer, together = adaptive(alone), adaptive(model)
        train(alone, optimizer)
        train(model, together)
        for group, other in zip(optimizer.param_groups, together.param_groups, strict=True):
            assert abs(group["metric_mean"] - other["metric_mean"]) < 1e-12, spread.__name__
        assert optimizer.param_groups[0]["metric_mean"] > 0
        assert_equal(model, alone, 1e-9)


def check_gradients_that_are_not_summed_yet(folder):
    """Gradients may be spread in another way than their weights, as with sequence parallelism."""
    mesh = all_four()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }

    def train_tokens(model, optimizer, steps=4):
        kinds = set()
        for step in range(steps):
            ids = torch.randint(0, 17, (4, 8), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            grads = [param.grad for param in model.parameters()]
            kinds |= {str(grad.placements) for grad in grads if hasattr(grad, "placements")}
        return kinds

    for make in (padam, adaptive, psgd, attached):
        torch.manual_seed(0)
        alone = Normed().double()
        model = parallelize_module(copy.deepcopy(alone), mesh, plan)
        train_tokens(alone, make(alone))
        kinds = train_tokens(model, make(model))
        assert any("Partial" in kind for kind in kinds), kinds
        assert_equal(model, alone, 1e-9)
        for param in model.parameters():
            if not groups_of(param):
                assert_equal_on_all_ranks(local_part(param).double().sum().item())


def check_stochastic_rounding(folder):
    """Ranks round a weight that all of them have alike, whatever the sizes of their other parts."""
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    for make in (PAdam, PSGD):
        torch.manual_seed(0)
        model = parallelize_module(Normed().bfloat16(), all_four(), plan)
        optimizer = make(param_groups(model), lr=1e-2, decay=DECAY, stochastic_rounding=True)
        for step in range(3):
            ids = torch.randint(0, 17, (4, 8), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(ids).float().logsumexp(2).sum().backward()
            optimizer.step()
        parts = {len(local_part(model.embedding.weight))}
        sizes = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, parts)
        assert len(set.union(*sizes)) > 1  # 17 rows on four ranks
        for param in model.parameters():
            if not groups_of(param):
                assert_equal_on_all_ranks(local_part(param).detach().double().square().sum().item())


def check_zero(folder):
    """ZeRO with bare parameters decays no biases; a checkpoint continues the ramp exactly."""
    alone, model = build(), ddp_4(build())
    optimizer = padam(alone)
    together = ZeroRedundancyOptimizer(model.parameters(), PAdam, lr=1e-2, decay=DECAY)
    train(alone, optimizer, 5)
    train(model, together, 5)
    assert_equal(model, alone)
    assert all(group["decay_1d"] is False for group in together.param_groups)
    assert doctor(model, together) == []
    for refused in (SparsityTarget, freeze_zeros):
        with pytest.raises(TypeError, match="pass the ZeroRedundancyOptimizer itself"):
            refused(together.optim, *((0.5, 10) if refused is SparsityTarget else ()))
    with pytest.raises(ValueError, match="use pull=0"):
        SparsityTarget(together, 0.5, 10, pull=1.0, per_layer=True)

    alone, model = build(), ddp_4(build())
    optimizer = PAdam(alone[0].parameters(), lr=1e-2, decay=DECAY)
    options = {"lr": 1e-2, "decay": DECAY}
    together = ZeroRedundancyOptimizer(model.module[0].parameters(), PAdam, **options)
    for one, own in ((alone, optimizer), (model.module, together)):
        target = SparsityTarget(own, 0.5, 8, update_power=0.5)
        own.add_param_group({"params": list(one[2].parameters()), "decay": DECAY})
        train(one if one is alone else model, own, 8)
        assert target.sparsity == 0.5
    assert_equal(model, alone, 1e-6)

    metric = {"lr": 1e-2, "decay": DECAY, "metric": "adaptive"}
    together = ZeroRedundancyOptimizer(model.parameters(), PAdam, **metric)
    before = whole(model)
    with pytest.raises(ValueError, match="each rank has a share"):
        train(model, together, 1)
    assert all(map(torch.equal, before, whole(model)))

    model, resumed = ddp_4(build()), ddp_4(build())
    whole_run, again = zero(model), zero(resumed)
    SparsityTarget(whole_run, 0.75, STEPS)
    target = SparsityTarget(again, 0.75, STEPS)
    train(model, whole_run, 6)
    whole_run.consolidate_state_dict(to=0)
    state = [whole_run.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state)
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(state[0]))  # on the CPU, loading shares tensors
    assert target.last_step == 6
    train(model, whole_run, start=6)
    train(resumed, again, start=6)
    assert_equal(resumed, model)


def check_zero_with_late_weights(folder):
    """Weights that ZeRO trains from the middle of the ramp on are ranked as on one process."""
    alone, model = build(), ddp_4(build())
    options = {"lr": 1e-2, "decay": DECAY}
    optimizer = PAdam(alone[0].parameters(), **options)
    together = ZeroRedundancyOptimizer(model.module[0].parameters(), PAdam, **options)
    for one, layers, own in ((alone, alone, optimizer), (model, model.module, together)):
        target = SparsityTarget(own, 0.75, 40)
        train(one, own, 10)
        one.zero_grad()  # the optimizer does so for its own weights only
        own.add_param_group({"params": list(layers[2].parameters()), "decay": DECAY})
        train(one, own, 40, start=10)
        assert target.sparsity == 0.75
    assert_equal(model, alone, 1e-6)


def check_fsdp1(folder):
    """FSDP1 is refused, with the reason."""
    for original in (True, False):
        model = FullyShardedDataParallel(
            build(), device_id=torch.device("cpu"), use_orig_params=original
        )
        adam = torch.optim.Adam(model.parameters())
        for refused in (
            lambda: PAdam(model.parameters()),  # noqa: B023
            lambda: PAdam(model.named_parameters()),  # noqa: B023
            lambda: param_groups(model),  # noqa: B023
            lambda: attach(adam, DECAY),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
                refused()


def check_distributed_checkpoint(folder):
    """A checkpoint of four ranks continues exactly on two ranks and on one."""
    for make, stop in ((padam, 6), (adaptive, 6), (psgd, 13)):  # the ramp ends after step 12
        model = fsdp_4(build())
        optimizer = make(model)
        target = SparsityTarget(optimizer, 0.75, STEPS)
        get_optimizer_state_dict(model, optimizer)  # runs a step to create the state
        assert target.last_step == 0
        train(model, optimizer, stop)
        path = folder / f"{make.__name__}{stop}"
        dcp.save(_state(model, optimizer), checkpoint_id=path)
        train(model, optimizer, start=stop)
        for spread in (fsdp_2, None):
            resumed = spread(build()) if spread else build()
            again = make(resumed)
            target = SparsityTarget(again, 0.75, STEPS)
            state = _state(resumed, again)
            dcp.load(state, checkpoint_id=path, no_dist=spread is None)
            set_model_state_dict(resumed, state["model"])
            set_optimizer_state_dict(resumed, again, state["optimizer"])
            assert target.last_step == stop
            train(resumed, again, start=stop)
            assert_equal(resumed, model)


def _state(model, optimizer):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def main(rank, world, folder, *names):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # for no_dist=True
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(230, exit=True)  # show where a rank waits
    dist.init_process_group(
        "gloo",
        f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=120),  # fail instead of waiting forever for a missing rank
    )
    failed = False
    for name, check in list(globals().items()):
        if name.startswith("check_") and (not names or name in names):
            try:
                check(Path(folder))
            except Exception:
                failed = True
                print(f"rank {rank}, {name}:\n{traceback.format_exc()}", flush=True)
                dist.barrier()
    dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
