"""Stochastic rounding of bfloat16 weights and state.

bfloat16 has eight bits of precision. Rounded to the nearest number, an update below 0.2 % of the
weight is lost, and so are all updates of Adam's running mean of squares, which changes by 0.1 % of
its value in a step. Rounded up or down at random, with a probability given by the distance, every
update acts in the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pdecay._core.group_settings import Group

Streams = Sequence[list[Any]]
State = dict[Tensor, dict[str, Any]]

_ANCHOR = ("anchor", "anchor_steps")  # the state that the decay itself keeps; see anchors.py


def run_rounded(
    step: Callable[[Streams, Group, State], None], streams: Streams, group: Group, state: State
) -> None:
    """Run a step in float32, then round its results stochastically.

    The random numbers depend only on the number of the step, which is kept in the group, and on the
    place of the tensor. A resumed run is therefore bit-identical, and all ranks round a weight that
    each of them has as a whole alike, even if their parts of other weights differ in size.

    Args:
        step: runs the step. It gets the other arguments with float32 copies in place of all
            bfloat16 tensors.
        streams: the parameters, their gradients, and lists of their state.
        group: the parameter group.
        state: the optimizer's state.
    """
    copies = [[_widened(tensor) for tensor in stream] for stream in streams]
    wide = dict(zip(streams[0], copies[0], strict=True))
    wide_group = {**group, "params": [wide.get(param, param) for param in group["params"]]}
    entries = {
        copy: {key: _widened(state[param][key]) for key in _ANCHOR if key in state[param]}
        for param, copy in wide.items()
    }
    step(copies, wide_group, entries)
    group["rounding_step"] = group.get("rounding_step", 0) + 1
    generators: dict[torch.device, torch.Generator] = {}

    def generator_for(value: Tensor, *place: int) -> torch.Generator:
        device = value.device
        if device not in generators:
            generators[device] = torch.Generator(device)
        return generators[device].manual_seed(_seed(group["rounding_step"], *place))

    for index, (stream, copied) in enumerate(zip(streams, copies, strict=True)):
        for i, (tensor, value) in enumerate(zip(stream, copied, strict=True)):
            if value is tensor or index == 1:  # gradients have not changed
                continue
            if tensor is None and streams[0][i].dtype != torch.bfloat16:
                stream[i] = value  # a new momentum buffer in full precision
                continue
            rounded = stochastically_rounded(value, generator_for(value, index, i))
            if tensor is None:
                stream[i] = rounded
            else:
                tensor.copy_(rounded)
    for i, (param, copy) in enumerate(wide.items()):
        for key, value in entries[copy].items():
            if isinstance(value, Tensor) and param.dtype == torch.bfloat16:
                value = stochastically_rounded(value, generator_for(value, len(streams), i))
            state[param][key] = value


def stochastically_rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 numbers as bfloat16, rounded up or down at random.

    The mean of the result is the number. Numbers that bfloat16 represents exactly, such as zero,
    do not change.
    """
    if hasattr(values, "to_local"):  # a DTensor
        local = stochastically_rounded(values.to_local(), generator)
        layout = (values.device_mesh, values.placements)  # type: ignore[attr-defined]
        whole: Tensor = type(values).from_local(  # type: ignore[attr-defined]
            local, *layout, run_check=False, shape=values.shape, stride=values.stride()
        )
        return whole
    bits = values.view(torch.int32)
    noise = torch.randint(
        1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    # bfloat16 is the upper half of float32: add noise to the lower half, then cut it off.
    rounded = ((bits + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _seed(step: int, index: int, i: int) -> int:
    """Return a seed for a tensor; torch uses 32 bits of it on the CPU."""
    return (step + index * 0x85EBCA6B + i * 0xC2B2AE35) % (1 << 32)


def _widened(tensor: Any) -> Any:
    if isinstance(tensor, Tensor) and tensor.dtype == torch.bfloat16:
        return tensor.float()
    return tensor
