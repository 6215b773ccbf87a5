"""Models, optimizers, and the ways to spread a model over four processes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pdecay import PSGD, Lp, PAdam, attach, param_groups

STEPS = 14
DECAY = Lp(0.8, 1.0)
SIZE = 12 * 20 + 20 * 8 + 8 * 6  # decayed weights of the model


def build(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 8), nn.ReLU())
    return model.append(nn.Linear(8, 6)).to(dtype)


class Normed(nn.Module):
    """A network for sequence parallelism, whose vocabulary no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.embedding, self.places = nn.Embedding(17, 8), nn.Embedding(8, 8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 17)

    def forward(self, ids):
        x = self.down(self.up(self.norm(self.embedding(ids))).relu())
        return self.head(x + self.places(torch.arange(8)))


def padam(model):
    return PAdam(param_groups(model), lr=1e-2, decay=DECAY)


def adaptive(model):
    return PAdam(param_groups(model), lr=1e-2, decay=Lp(0.8, 0.05), metric="adaptive")


def psgd(model):
    return PSGD(param_groups(model), lr=0.1, momentum=0.9, decay=DECAY)


def attached(model):
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2, weight_decay=0)
    attach(optimizer, DECAY)
    return optimizer


def over_ranks(model):
    return getattr(model, "process_group", None)  # of DDP


def zero(model):
    options = {"lr": 1e-2, "decay": DECAY, "process_group": over_ranks(model)}
    return ZeroRedundancyOptimizer(param_groups(model), PAdam, **options)


def zero_sgd(model):
    options = {"lr": 0.1, "momentum": 0.9, "decay": DECAY, "process_group": over_ranks(model)}
    return ZeroRedundancyOptimizer(model.parameters(), PSGD, **options)


def zero_attached(model):
    options = {"lr": 1e-2, "weight_decay": 0.0, "process_group": over_ranks(model)}
    optimizer = ZeroRedundancyOptimizer(param_groups(model), torch.optim.AdamW, **options)
    attach(optimizer, DECAY)
    return optimizer


def train(model, optimizer, steps=STEPS, start=0):
    dtype = next(model.parameters()).dtype
    for step in range(start, steps):
        torch.manual_seed(step)
        x = torch.randn(8, 12, dtype=dtype)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :6].argmax(1)).backward()
        optimizer.step()


def whole(model):
    return [
        param.full_tensor() if isinstance(param, DTensor) else param.detach().clone()
        for param in model.parameters()
    ]


def assert_equal(model, other, tolerance=0.0):
    for a, b in zip(whole(model), whole(other), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
        assert torch.equal(a == 0, b == 0)


def assert_equal_on_all_ranks(number):
    numbers = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    assert len(set(numbers)) == 1, numbers


def zeros(model):
    return sum(int((param == 0).sum()) for param in whole(model) if param.ndim >= 2)


# How a model is spread over the ranks: two of them, all four, or a 2 x 2 mesh.


def pair():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "pair"))["pair"]


def all_four():
    return init_device_mesh("cpu", (4,))


def ddp_2(model):
    return DistributedDataParallel(model, process_group=pair().get_group())


def ddp_4(model):
    return DistributedDataParallel(model)


def fsdp_2(model):
    return fully_shard(model, mesh=pair())


def fsdp_4(model):
    fully_shard(model[0], mesh=all_four())
    return fully_shard(model, mesh=all_four())


def hsdp(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}  # the last layer is not sharded


def tp_2(model):
    return parallelize_module(model, pair(), PLAN)


def tp_4(model):
    return parallelize_module(model, all_four(), PLAN)


def fsdp_tp(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], PLAN)
    return fully_shard(model, mesh=mesh["dp"])
