"""Averages of weights that keep exact zeros.

    averaged = torch.optim.swa_utils.AveragedModel(model, avg_fn=pdecay.EMA(0.999))

The mean of a weight over many steps is not zero if the weight was nonzero at one of them, so the
usual averages of a sparse model are dense. The averages here are zero wherever the weight is zero
now, and the usual ones elsewhere. Once zeros stay zero, the average has the zeros of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdecay._core.validation import check_number


@dataclass(frozen=True)
class EMA:
    """The exponential moving average of weights, zero wherever the weight is zero.

    Pass it as `avg_fn` to ``torch.optim.swa_utils.AveragedModel`` or to Lightning's
    ``WeightAveraging``.

    Args:
        decay: the share of the old average that is kept in each update, from 0 to 1.

    Example:
        >>> EMA(0.9)(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0]), 1)
        tensor([1.1000, 0.0000])
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if check_number("decay", self.decay) > 1:
            raise ValueError(f"decay must be from 0 to 1, got {self.decay!r}")

    def __call__(self, average: Tensor, current: Tensor, num_averaged: Tensor | int) -> Tensor:
        """Return the updated average."""
        return _average(average, current, 1 - self.decay)


@dataclass(frozen=True)
class SWA:
    """The mean of weights over all updates, zero wherever the weight is zero.

    Pass it as `avg_fn` to ``torch.optim.swa_utils.AveragedModel`` or to Lightning's
    ``StochasticWeightAveraging``.

    Example:
        >>> SWA()(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0]), 1)
        tensor([1.5000, 0.0000])
    """

    def __call__(self, average: Tensor, current: Tensor, num_averaged: Tensor | int) -> Tensor:
        """Return the updated average."""
        return _average(average, current, 1 / (int(num_averaged) + 1))


@torch.no_grad()
def _average(average: Tensor, current: Tensor, weight: float) -> Tensor:
    if not isinstance(current, Tensor):
        raise TypeError(
            f"EMA and SWA average one tensor, got a {type(current).__name__}: pass them as avg_fn, "
            "not as multi_avg_fn"
        )
    if not (current.is_floating_point() or current.is_complex()):  # a counter of batches
        return current
    return torch.lerp(average, current, weight).masked_fill_(current == 0, 0.0)
