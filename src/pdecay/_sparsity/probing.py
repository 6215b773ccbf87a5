"""Measurement of how far an optimizer's steps move the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from pdecay._sparsity.shards import Groups, global_index, groups_of, local_part, sum_over_ranks_

_PROBED_ROWS = 8  # rows of each tensor that are measured


class Probes:
    """Sums over some rows of each tensor, before and after the steps of several optimizers."""

    def __init__(self) -> None:
        self._before: dict[Optimizer, list[Tensor]] = {}
        self._sums: dict[Groups, Tensor] = {}

    def clear(self) -> None:
        """Forget all measurements."""
        self._before.clear()
        self._sums.clear()

    def before_step(self, optimizer: Optimizer, params: Iterable[Tensor]) -> None:
        """Copy the rows."""
        self._before[optimizer] = [rows.clone() for rows, _ in sample_rows(params, _PROBED_ROWS)]

    def skip_step(self, optimizer: Optimizer) -> None:
        """Forget the copies."""
        self._before.pop(optimizer, None)

    def after_step(self, optimizer: Optimizer, params: Iterable[Tensor]) -> None:
        """Add the step to the sums, if the rows were copied before it."""
        if optimizer not in self._before:
            return
        for before, (now, groups) in zip(
            self._before.pop(optimizer), sample_rows(params, _PROBED_ROWS), strict=False
        ):
            squares = (now - before)[now != 0].abs().double().square().sum()
            sums = torch.stack([squares, now.count_nonzero(), now.abs().double().sum()])
            known = self._sums.get(groups)
            self._sums[groups] = sums if known is None else known + sums.to(known.device)

    def take(self) -> tuple[float, float, float]:
        """Return the sums since the last call, over all ranks.

        They are the squared changes of the nonzero weights, their number, and their magnitudes.
        """
        sums, self._sums = self._sums, {}
        numbers = [sum_over_ranks_(local, groups).tolist() for groups, local in sums.items()]
        squares, alive, magnitudes = map(sum, zip([0.0] * 3, *numbers, strict=True))
        return squares, alive, magnitudes


def sample_rows(params: Iterable[Tensor], count: int) -> Iterator[tuple[Tensor, Groups]]:
    """Yield about `count` rows of each tensor, with the processes that share the tensor.

    The rows are those of the whole tensor, so that any number of ranks measures the same.
    """
    for param in params:
        every = max(1, len(param) // count) if param.ndim else 1
        groups = groups_of(param)
        tensor = torch.atleast_1d(local_part(param).detach())
        if groups:
            rows = (global_index(param, 0) % every == 0).nonzero().flatten()
            yield tensor[rows.to(tensor.device)], groups
        else:
            yield tensor[::every], groups
