"""Tensors that are sharded over processes (DTensors): local parts, sums and indices.

FSDP2 and tensor parallelism store a weight as a DTensor: each rank has a part of it. All functions
here also accept plain tensors, which every rank has as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Groups = tuple[Any, ...]  # of torch.distributed.ProcessGroup


def local_part(tensor: Tensor) -> Tensor:
    """Return a view of the part of a DTensor on this rank; return other tensors unchanged."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def groups_of(tensor: Tensor) -> Groups:
    """Return the process groups that a tensor is sharded over, one for each mesh dimension."""
    if not hasattr(tensor, "placements"):
        return ()
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    return tuple(mesh.get_group(dim) for dim, _ in _shards(tensor))


def sum_over_ranks_(local: Tensor, groups: Groups) -> Tensor:
    """Sum numbers that each rank computed from its part of a tensor, in place."""
    for group in groups:
        dist.all_reduce(local, group=group)
    return local


def global_index(tensor: Tensor, dim: int) -> Tensor:
    """Return, for each local index along a dimension, the index in the whole tensor."""
    index = torch.arange(tensor.shape[dim])
    shards = _shards(tensor)
    # FSDP2 shards a tensor-parallel weight again. It marks its own placement, which comes first in
    # the mesh, as strided: the split was made after that of the later mesh dimensions.
    shards.sort(key=lambda shard: hasattr(shard[1], "split_factor"))
    for mesh_dim, placement in shards:
        if placement.dim == dim:
            mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
            pieces = index.chunk(mesh.size(mesh_dim))
            place = mesh.get_local_rank(mesh_dim)
            index = pieces[place] if place < len(pieces) else index[:0]
    return index


def gather(local: Tensor, like: Tensor) -> Tensor:
    """Assemble a whole tensor from the local parts of all ranks; it is sharded as `like` is."""
    if not groups_of(like):
        return local
    from torch.distributed.tensor import DTensor

    whole = DTensor.from_local(
        local,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    full: Tensor = whole.full_tensor()
    return full


def _shards(tensor: Tensor) -> list[tuple[int, Any]]:
    """Return the mesh dimensions that a tensor is sharded over, with their placements."""
    placements = getattr(tensor, "placements", ())
    return [(dim, one) for dim, one in enumerate(placements) if not one.is_replicate()]
