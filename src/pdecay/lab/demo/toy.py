"""The toy example of section 4.2: one weight, ``(w-1)^2/2 + (lam/p)|w|^p``, from w = 1.

The curves are the reference's. The optimizer that users run must draw the same ones, so the two
ways that decay are run through :class:`pdecay.PSGD` as well and compared.
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
    """The weight at steps 0 to 100, for each way to penalise it.

    Args:
        curves: by name: "gradient", "s every step", "s every 20 steps".
        difference: for the two that decay, the largest distance between the reference's curve
            and that of :class:`pdecay.PSGD`.
    """

    curves: dict[str, list[float]]
    difference: dict[str, float]


def run() -> Toy:
    """All three curves, and how far the library's own optimizer is from them."""
    curves = reference.toy(P, LAM, LR, STEPS)
    difference = {
        name: max(abs(a - b) for a, b in zip(curves[name], by_psgd(auxiliary), strict=True))
        for name, auxiliary in _AUXILIARY.items()
    }
    return Toy(curves, difference)


def by_psgd(auxiliary: Auxiliary) -> list[float]:
    """The weight's path under :class:`pdecay.PSGD`, in double precision as the reference."""
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    # A group with a decay of its own decays 1-d tensors too.
    optimizer = PSGD([{"params": [w], "decay": Lp(P, LAM)}], lr=LR, auxiliary=auxiliary)
    path = [w.item()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        ((w - 1) ** 2 / 2).sum().backward()
        optimizer.step()
        path.append(w.item())
    return path
