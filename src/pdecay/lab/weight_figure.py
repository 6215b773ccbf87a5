"""The figure of ``pdecay inspect``: histograms of log10 |w| over all weights and per layer."""

from __future__ import annotations

import os
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pdecay.deployment.inspect import histogram
from pdecay.deployment.inspect.inspection import Inspection, Layer
from pdecay.lab.drawing import BLUE, FONTS, save, set_title

_MAX_LAYERS, _MAX_LABEL = 40, 40


def draw(inspection: Inspection, path: Path) -> None:
    """Draw the histogram of all weights above, and one shaded row per layer below."""
    layers = sorted(inspection.weights, key=lambda layer: layer.size, reverse=True)[:_MAX_LAYERS]
    layers.sort(key=inspection.weights.index)
    total = inspection.histogram
    # matplotlib rejects names with bytes that are not UTF-8.
    name = os.fsencode(Path(inspection.path).name).decode(errors="replace")
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
        set_title(
            above,
            f"{name}: magnitudes of the weights",
            f"{size:,} weights; {zeros / max(size, 1):.2%} are exactly zero and not drawn",
        )
        if layers:
            below.pcolormesh(
                edges, np.arange(len(layers) + 1), _shades(layers, low, high), cmap="Blues", vmin=0
            )
        below.set_yticks(
            np.arange(len(layers)) + 0.5,
            [f"{_label(layer.name)}  {layer.sparsity:.1%}" for layer in layers],
            fontsize=8,
        )
        below.invert_yaxis()
        below.set_xlabel("log10 |w|   (after each layer's name: its fraction of zeros)")
        save(figure, path)


def _label(name: str) -> str:
    name = name if name.isprintable() else ascii(name)[1:-1]
    return name if len(name) <= _MAX_LABEL else f"...{name[-_MAX_LABEL:]}"


def _shades(layers: list[Layer], low: int, high: int) -> NDArray[np.float64]:
    """Scale each layer's histogram to its highest bin; the root makes small bins visible."""
    counts = np.stack([layer.counts.histogram[low:high] for layer in layers])
    highest = np.maximum(counts.max(axis=1, keepdims=True), 1)
    shades: NDArray[np.float64] = np.sqrt(counts / highest)
    return shades
