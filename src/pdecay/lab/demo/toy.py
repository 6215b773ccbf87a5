"""The toy example of section 4.2: one weight, ``(w-1)^2/2 + (lam/p)|w|^p``, from w = 1.

The curves come from the reference implementation. The two variants with decay are also run with
:class:`pdecay.PSGD`, to check that the library's optimizer follows the same curves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdecay import PSGD, Every, Instant, Lp
from pdecay._core import reference
from pdecay._core.auxiliary import Auxiliary

P, LAM, LR, STEPS = 0.6, 1.0, 0.1, 100
_AUXILIARY: dict[str, Auxiliary] = {
    "s every step": Instant(),
    "s every 20 steps": Every(20, start=0.1),
}


@dataclass(frozen=True)
class Toy:
    """The weight at steps 0 to 100 for each variant of the penalty.

    Args:
        curves: the weights by variant: "gradient", "s every step", "s every 20 steps".
        difference: the largest distance between the curves of the reference and of
            :class:`pdecay.PSGD`, for the two variants with decay.
    """

    curves: dict[str, list[float]]
    difference: dict[str, float]


def run() -> Toy:
    """Compute the three curves and their distance to the library's optimizer."""
    curves = reference.toy(P, LAM, LR, STEPS)
    difference = {
        name: max(abs(a - b) for a, b in zip(curves[name], by_psgd(auxiliary), strict=True))
        for name, auxiliary in _AUXILIARY.items()
    }
    return Toy(curves, difference)


def by_psgd(auxiliary: Auxiliary) -> list[float]:
    """Return the weight at each step of :class:`pdecay.PSGD`, in double precision."""
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    # In a group with its own decay, 1-d tensors decay too.
    optimizer = PSGD([{"params": [w], "decay": Lp(P, LAM)}], lr=LR, auxiliary=auxiliary)
    path = [w.item()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        ((w - 1) ** 2 / 2).sum().backward()
        optimizer.step()
        path.append(w.item())
    return path
