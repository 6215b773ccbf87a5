"""Shared parts of all figures: fonts, a colour-blind safe palette, the axis of sparsity.

Figures are drawn without pyplot, so there is no window and no global state, and equal figures are
equal files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, SKY, VERMILION, GREEN = "#0072B2", "#56B4E9", "#D55E00", "#009E73"
GREY, INK = "#555555", "#222222"
FONTS: Any = {  # Any: matplotlib's stubs want each key as a literal
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,  # "$" in a name must not start a formula
}
_DPI = 150


def set_title(axes: Axes, title: str, subtitle: str) -> None:
    """Set a title with a grey line below it."""
    axes.set_title(f"{title}\n", pad=4)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, color=GREY, va="bottom", fontsize=10)


def to_decades(zeros: Any) -> Any:
    """Convert percent of zeros to decades of removed weights."""
    return -np.log10(np.maximum(1 - np.asarray(zeros) / 100, 1e-6))


def from_decades(decades: Any) -> Any:
    """Convert decades of removed weights to percent of zeros."""
    return 100 * (1 - 10.0 ** -np.asarray(decades))


def save(figure: Figure, path: Path) -> None:
    """Write a PNG or SVG without date and version, so that equal figures are equal files."""
    kind = path.suffix.removeprefix(".")
    metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    with matplotlib.rc_context({"svg.hashsalt": "pdecay"}):
        figure.savefig(path, dpi=_DPI, format=kind, metadata=metadata)
