"""Sharded training with two local processes gives the result of one process."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pdecay import (
    Lp,
    PAdam,
    SparsityTarget,
    attach,
    param_groups,
    sparsity,
)

STEPS = 30
WORLD = 2


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6))


def optimizer_for(model, kind):
    if kind == "PAdam":
        return PAdam(param_groups(model), lr=1e-2, decay=Lp(0.8, 1.0))
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2, weight_decay=0)
    attach(optimizer, Lp(0.8, 1.0), fused=False)
    return optimizer


def train(model, kind, rank=0, world=1):
    optimizer = optimizer_for(model, kind)
    target = SparsityTarget(optimizer, 0.75, STEPS, floor=0.1)
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(8, 12)
        mine = x.chunk(world)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(mine), mine[:, :6].argmax(1)).backward()
        optimizer.step()
    return target.sparsity, optimizer


def work(rank, folder, wrap, kind):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    soon = timedelta(seconds=60)  # fail instead of waiting forever for a missing rank
    # Rendezvous by file: a free port may be taken by another test before it is used.
    meet = f"file://{folder}/store"
    dist.init_process_group("gloo", meet, rank=rank, world_size=WORLD, timeout=soon)
    model = build()
    if wrap == "FSDP2":
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    else:
        model = DistributedDataParallel(model)
    share, _ = train(model, kind, rank, WORLD)
    report = sparsity(model)
    whole = [
        param.full_tensor() if hasattr(param, "full_tensor") else param.detach()
        for param in model.parameters()
    ]
    if rank == 0:
        torch.save((share, report.total, whole), folder / "results")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("wrap", "kind"), [("DDP", "PAdam"), ("FSDP2", "PAdam"), ("FSDP2", "attach")]
)
def test_two_ranks_match_one_process(wrap, kind, tmp_path):
    mp.spawn(work, (tmp_path, wrap, kind), nprocs=WORLD)
    share, reported, whole = torch.load(tmp_path / "results")
    alone = build()
    expected, _ = train(alone, kind)
    assert share == expected == pytest.approx(0.75, abs=0.003)
    assert reported == share
    # The sampled rows of shards differ from those of the whole, so lam differs slightly.
    close = 1e-4 if wrap == "DDP" else 0.05
    for a, b in zip(whole, alone.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-3, atol=close)
