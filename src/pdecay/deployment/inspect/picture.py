"""The histogram of log10 |w| as a figure: over all weights, and for each layer."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pdecay.deployment.inspect import histogram
from pdecay.deployment.inspect.report import Inspection, Layer
from pdecay.lab.drawing import BLUE, FONTS, GREY, save

_MOST_LAYERS, _LONGEST_LABEL = 40, 40


def draw(inspection: Inspection, path: Path) -> None:
    """Above, all weights; below, a row for each layer, as dark as it has weights of that size."""
    layers = sorted(inspection.weights, key=lambda layer: layer.size, reverse=True)[:_MOST_LAYERS]
    layers.sort(key=inspection.weights.index)
    total = inspection.histogram
    used = np.flatnonzero(total)
    low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
    edges = histogram.FIRST + np.arange(low, high + 1) / histogram.PER_DECADE
    size = sum(layer.size for layer in inspection.weights)
    zeros = sum(layer.counts.exact_zeros for layer in inspection.weights)
    with matplotlib.rc_context(FONTS):
        figure = Figure(figsize=(8, 4 + 0.2 * len(layers)), layout="constrained")
        above, below = figure.subplots(
            2, 1, sharex=True, height_ratios=(3, max(0.2 * len(layers), 0.6))
        )
        above.stairs(100 * total[low:high] / max(size, 1), edges, fill=True, color=BLUE)
        above.set_ylabel(f"% of the weights per {1 / histogram.PER_DECADE:g}")
        above.set_title(f"{Path(inspection.path).name}: how large the weights are\n", pad=4)
        above.text(
            0,
            1.02,
            f"{size:,} weights, {zeros / max(size, 1):.2%} of them exactly zero and not drawn",
            transform=above.transAxes,
            color=GREY,
            va="bottom",
            fontsize=10,
        )
        if layers:
            below.pcolormesh(
                edges, np.arange(len(layers) + 1), _shares(layers, low, high), cmap="Blues", vmin=0
            )
        below.set_yticks(
            np.arange(len(layers)) + 0.5,
            [f"{_label(layer.name)}  {layer.sparsity:.1%}" for layer in layers],
            fontsize=8,
        )
        below.invert_yaxis()
        below.set_xlabel("log10 |w|   (beside each layer's name, its share of zeros)")
        save(figure, path)


def _label(name: str) -> str:
    return name if len(name) <= _LONGEST_LABEL else f"...{name[-_LONGEST_LABEL:]}"


def _shares(layers: list[Layer], low: int, high: int) -> NDArray[np.float64]:
    """Each layer's histogram in units of its highest bin: layers of any size can be compared.

    By the root, so that a layer shows more than its highest bins.
    """
    counts = np.stack([layer.counts.histogram[low:high] for layer in layers])
    highest = np.maximum(counts.max(axis=1, keepdims=True), 1)
    shares: NDArray[np.float64] = np.sqrt(counts / highest)
    return shares
