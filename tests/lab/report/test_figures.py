from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.image import imread

from pdecay.lab import drawing
from pdecay.lab.report import best, contours, figures
from pdecay.lab.report.experiments import experiments
from pdecay.lab.report.style import Style

from .synthetic import record


@pytest.fixture(scope="module")
def small():
    """A small experiment: AdamW, and PAdam on a grid of 2 x 3 for two p."""
    (found,) = experiments(
        [
            record("adamw", weight_decay=0.1),
            *(
                record(lr=lr, p=p, lam=lam)
                for lr, lam, p in product((1e-3, 1e-2), (1e-3, 1e-2, 1e-1), (0.5, 1.0))
            ),
        ]
    )
    return Style(found)


def offsets(axes):
    """Return the positions of all markers."""
    found = [np.asarray(c.get_offsets()) for c in axes.collections if isinstance(c, PathCollection)]
    return np.concatenate(found)


def test_accuracy_figure_has_marker_for_each_setting(small):
    (axes,) = figures.accuracy(small).axes
    expected = [(100 * point.sparsity, point.accuracy) for point in small.experiment.means]
    assert offsets(axes) == pytest.approx(np.array(expected))
    (front,) = [line for line in axes.lines if line.get_drawstyle().startswith("steps")]
    assert list(front.get_ydata()[1:]) == [
        point.accuracy for point in best.pareto_front(small.experiment.means)
    ]
    (dashed,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert dashed.get_ydata()[0] == best.dense_reference(small.experiment.means).accuracy


def test_best_tradeoff_has_ring(small):
    (axes,) = figures.tradeoff(small).axes
    chosen = best.best_tradeoff(small.experiment.means)
    assert offsets(axes)[-1] == pytest.approx([100 * chosen.sparsity, chosen.tradeoff])


def test_legend_lists_methods_and_p(small):
    (legend,) = figures.accuracy(small).legends
    labels = [text.get_text() for text in legend.get_texts()]
    dense = best.dense_reference(small.experiment.means).accuracy
    assert labels == [
        f"best AdamW, {dense:.2f} %", "Pareto front", "adamw", "padam", "p = 0.5", "p = 1"
    ]  # fmt: skip


def test_contour_figure_uses_surface_polygons(small):
    scale = contours.colour_scale(small.experiment.means)
    surfaces = contours.surfaces(small.experiment, scale)
    figure = figures.contours(small, surfaces, scale)
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert [axes.get_title(loc="left") for axes in panels] == ["padam, p = 0.5", "padam, p = 1"]
    for axes, surface in zip(panels, surfaces, strict=True):
        for patch, band in zip(axes.patches, surface.bands, strict=True):
            assert len(patch.get_path().vertices) == sum(len(polygon) for polygon in band)
        texts = [text.get_text() for text in axes.texts]
        assert texts == [f"{line.sparsity:g}" for line in surface.lines if line.label]


def test_layers_and_curves_show_the_run(small):
    run = small.experiment.runs[3]
    (axes,) = figures.layers(run, "a name").axes
    left = [100 * (1 - layer["zeros"] / layer["size"]) for layer in run["result"]["layers"]]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(left)
    panels = figures.curves(run, small.experiment.runs[0], "a name").axes
    last = [axes.lines[1].get_ydata()[-1] for axes in panels]
    result = run["result"]
    assert last == pytest.approx([result["accuracy"], result["loss"], 100 * result["sparsity"]])


def test_figures_are_reproducible(small, tmp_path):
    for kind in ("png", "svg"):
        for name in ("one", "other"):
            drawing.save(figures.tradeoff(small), tmp_path / f"{name}.{kind}")
        one, other = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("one", "other"))
        assert one == other


def test_figure_margins_are_white(small, tmp_path):
    """The outermost pixels of a figure are white."""
    drawing.save(figures.accuracy(small), tmp_path / "figure.png")
    image = imread(tmp_path / "figure.png")
    for edge in (image[0], image[-1], image[:, 0], image[:, -1]):
        assert (edge[..., :3] == 1).all()


def test_unusual_names_and_single_run_draw(tmp_path):
    (experiment,) = experiments(
        [record("mine:$x^{ \u4e2d\x01<b>", p=0.8, lam=0.01, layers=[("$\u00e9" * 60, [2, 2])])]
    )
    style = Style(experiment)
    run = experiment.runs[0]
    for figure in (
        figures.accuracy(style),
        figures.tradeoff(style),
        figures.layers(run, experiment.name(experiment.means[0])),
        figures.curves(run, None, experiment.name(experiment.means[0])),
    ):
        drawing.save(figure, tmp_path / "figure.svg")
        assert "\x01" not in (tmp_path / "figure.svg").read_text()


def test_cropped_points_are_drawn_at_edge():
    values = [(98.4, 0.1), (98.0, 0.9), (97.9, 0.95), (98.1, 0.5), (10.0, 1.0)]
    (experiment,) = experiments(
        [record(p=0.8, lam=a / s, accuracy=a, sparsity=s) for a, s in values]
    )
    (axes,) = figures.accuracy(Style(experiment)).axes
    assert axes.get_ylim()[0] > 97
    assert axes.get_xlim()[1] < 97
    assert len(offsets(axes)) == 5
    assert offsets(axes)[-1] == pytest.approx([axes.get_xlim()[1], axes.get_ylim()[0]])


def test_ticks_of_very_sparse_runs_do_not_overlap():
    (experiment,) = experiments([record(p=0.8, lam=0.01, sparsity=1.0), record("adamw")])
    (axes,) = figures.accuracy(Style(experiment)).axes
    figure = axes.figure
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(a.x1 < b.x0 for a, b in zip(boxes, boxes[1:], strict=False))  # noqa: RUF007
    assert offsets(axes)[:, 0].max() <= axes.get_xlim()[1]
