"""The toy example of section 4.2: one weight, ``(w-1)^2/2 + (lam/p)|w|^p``, from w = 1.

The curves come from the reference implementation. The two variants with decay are also run with
:class:`pdecay.PSGD`, to check that the library's optimizer follows the same curves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

from pdecay import PSGD, Every, Instant, Lp
from pdecay._core import reference
from pdecay._core.auxiliary import Auxiliary
from pdecay.lab.drawing import BLUE, FONTS, GREY, VERMILION, save, set_title

P, LAM, LR, STEPS = 0.6, 1.0, 0.1, 100
_AUXILIARY: dict[str, Auxiliary] = {
    "s every step": Instant(),
    "s every 20 steps": Every(20, start=0.1),
}
# The label and the look of each curve.
_STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient": ("norm in the gradient", {"color": GREY, "linewidth": 1.2, "linestyle": ":"}),
    "s every step": ("p-norm decay, s at every step", {"color": BLUE, "linewidth": 2.4}),
    "s every 20 steps": (
        "p-norm decay, s at every 20th step",
        {"color": VERMILION, "linewidth": 2, "linestyle": "--"},
    ),
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


def draw(toy: Toy, path: Path) -> None:
    """Draw the weight over the steps for each variant."""
    with matplotlib.rc_context(FONTS):
        figure = Figure(figsize=(7.6, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.axhline(0, color="black", linewidth=0.8)
        for name, curve in toy.curves.items():
            label, style = _STYLES[name]
            axes.plot(curve, label=label, **style)
        axes.set(xlabel="step", ylabel="weight", xlim=(0, STEPS))
        settings = f"p = {P:g}, λ = {LAM:g}, lr = {LR:g}"
        set_title(
            axes,
            "The gradient oscillates, the decay goes to zero",
            f"(w-1)²/2 + (λ/p)|w|$^p$ by gradient descent, {settings}",
        )
        axes.legend(loc="upper right")
        save(figure, path)
