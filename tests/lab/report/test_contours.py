from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
from matplotlib.path import Path

from pdecay.lab.report import contours
from pdecay.lab.report.contours import SPARSITIES, colour_scale, surfaces

from .synthetic import record

RATES, LAMS = (1e-3, 1e-2, 1e-1), (1e-4, 1e-3, 1e-2, 1e-1)


def plane(lr, lam):
    """Return a run whose accuracy and sparsity are linear in log(lam)."""
    height = (math.log10(lam) + 4) / 3
    return record(lr=lr, p=0.8, lam=lam, accuracy=90 - 10 * height, sparsity=height)


def only(experiment):
    found = surfaces(experiment, colour_scale(experiment.means))
    assert len(found) == 1
    return found[0]


def colours_at(surface, x, y):
    """Return the bands that contain a position, by the even-odd rule."""
    return [
        k
        for k, band in enumerate(surface.bands)
        if sum(Path(polygon).contains_point((x, y)) for polygon in band) % 2
    ]


def test_bands_and_lines_of_plane(experiment):
    found = experiment(*(plane(*place) for place in product(RATES, LAMS)))
    surface = only(found)
    levels = colour_scale(found.means).levels
    assert surface.bands
    assert surface.note == ""
    low, high = (min(c.y for c in surface.cells), max(c.y for c in surface.cells))
    for share in (0.07, 0.33, 0.61, 0.93):
        accuracy = 90 - 10 * share
        (band,) = colours_at(surface, 0.37, low + share * (high - low))
        assert band == sum(level < accuracy for level in levels)
    for line in surface.lines:
        (piece,) = line.pieces
        # A plane's line of equal sparsity is straight, at its own height.
        assert piece[:, 1] == pytest.approx(low + line.sparsity * (high - low), abs=1e-9)
        assert line.label is not None
        assert piece[:, 0].min() <= line.label[0] <= piece[:, 0].max()
    assert [line.sparsity for line in surface.lines] == list(SPARSITIES)


def test_cells_are_on_logarithmic_axes(experiment):
    surface = only(experiment(*(plane(*place) for place in product(RATES, LAMS))))
    assert len(surface.cells) == 12
    x = {cell.lr: cell.x for cell in surface.cells}
    assert x[1e-2] == pytest.approx((x[1e-3] + x[1e-1]) / 2)
    assert 0 < x[1e-3] < x[1e-1] < 1
    assert surface.x_ticks == tuple((x[lr], f"{lr:g}") for lr in RATES)


def test_one_surface_per_combination_of_options(experiment):
    found = experiment(
        *(record(lr=lr, p=p, lam=lam) for lr, lam, p in product(RATES, LAMS, (0.5, 0.8))),
        *(record("elastic", lr=lr, p=0.8, lam=lam, l2=l2)
          for lr, lam, l2 in product(RATES, LAMS, (0.1, 0.2))),
        record("gmp", target=0.9),
    )  # fmt: skip
    titles = [surface.title for surface in surfaces(found, colour_scale(found.means))]
    assert titles == [
        "padam, p = 0.5",
        "padam, p = 0.8",
        "elastic, p = 0.8, l2 = 0.1",
        "elastic, p = 0.8, l2 = 0.2",
    ]


@pytest.mark.parametrize(
    ("places", "counts"),
    [
        ([(1e-2, 1e-2)], "1 and 1"),
        ([(1e-2, 1e-2), (1e-2, 1e-1)], "1 and 2"),
        ([(1e-2, 1e-2), (0.010000000000000002, 1e-1)], "1 and 2"),  # equal logarithms
    ],
)
def test_too_few_cells_give_reason(experiment, places, counts):
    surface = only(experiment(*(plane(*place) for place in places)))
    assert not surface.bands
    expected = "No contours: 2 learning rates and 2 lam or more are needed, there are "
    assert surface.note == expected + counts


def test_cells_on_one_line_give_reason(experiment):
    surface = only(experiment(plane(1e-3, 1e-3), plane(1e-2, 1e-2)))
    assert surface.note == "No contours: the finished settings lie on one line"


def test_diverged_corner_is_not_filled(experiment):
    places = set(product(RATES, LAMS)) - {(1e-1, 1e-1)}
    surface = only(
        experiment(
            *(plane(*place) for place in places),
            record(lr=1e-1, p=0.8, lam=1e-1, diverged=True),
        )
    )
    assert surface.note == "1 diverged"
    (corner,) = [cell for cell in surface.cells if cell.diverged]
    assert corner.point is None
    assert colours_at(surface, corner.x - 0.02, corner.y - 0.02) == []
    # of the square around it the opposite triangle is there
    assert colours_at(surface, corner.x - 0.3, corner.y - 0.2) != []


def test_diverged_column_is_not_interpolated(experiment):
    surface = only(
        experiment(
            *(plane(lr, lam) for lr, lam in product((1e-3, 1e-1), LAMS)),
            *(record(lr=1e-2, p=0.8, lam=lam, diverged=True) for lam in LAMS),
        )
    )
    assert surface.note == "4 diverged"
    assert colours_at(surface, 0.5, 0.5) == []


def test_gap_in_grid_is_marked_and_interpolated(experiment):
    found = experiment(*(plane(*place) for place in set(product(RATES, LAMS)) - {(1e-2, 1e-2)}))
    surface = only(found)
    assert surface.note == "1 not run, interpolated"
    (hole,) = [cell for cell in surface.cells if cell.point is None]
    assert not hole.diverged
    (band,) = colours_at(surface, hole.x + 0.01, hole.y + 0.01)
    accuracy = 90 - 10 * 2 / 3
    assert band == sum(level < accuracy for level in colour_scale(found.means).levels)


def test_scattered_settings_are_interpolated(experiment):
    dice = np.random.default_rng(3)
    places = 10 ** dice.uniform((-3, -4), (-1, -1), (40, 2))
    found = experiment(*(plane(float(lr), float(lam)) for lr, lam in places))
    surface = only(found)
    assert surface.note == "scattered settings, interpolated"
    assert all(cell.point for cell in surface.cells)  # no grid, no holes
    (band,) = colours_at(surface, 0.5, 0.5)
    y = {cell.lam: cell.y for cell in surface.cells}
    slope = np.polyfit([math.log10(lam) for lam in y], list(y.values()), 1)
    accuracy = 90 - 10 * ((0.5 - slope[1]) / slope[0] + 4) / 3
    assert band == sum(level < accuracy for level in colour_scale(found.means).levels)
    labels = [label for _, label in surface.x_ticks + surface.y_ticks]
    assert labels
    assert all(label.lstrip("0.").rstrip("0") in ("1", "2", "5") or "e-" in label
               for label in labels)  # fmt: skip


def test_zero_lam_is_left_out(experiment):
    surface = only(
        experiment(
            record(p=0.8, lam=0.0, sparsity=0.0), *(plane(*at) for at in product(RATES, LAMS))
        )
    )
    assert surface.bands
    assert surface.note == "1 with lr or lam = 0 left out"


def test_tick_labels_do_not_overlap(experiment):
    rates = [1e-3 * 1.07**k for k in range(20)]
    surface = only(experiment(*(plane(round(lr, 6), lam) for lr, lam in product(rates, LAMS))))
    places = [place for place, _ in surface.x_ticks]
    assert all(b - a > 0.1 for a, b in pairwise(places))


@pytest.mark.parametrize("values", [[], [48.0], [48.0, 48.0], [21.0, 47.9, 48.0, 48.1]])
def test_colour_scale_for_any_accuracies(experiment, values):
    runs = [record(accuracy=value, seed=seed) for seed, value in enumerate(values)]
    found = colour_scale(experiment(*runs).singles if runs else [])
    assert len(found.colours) == len(found.levels) + 1
    assert list(found.levels) == sorted(set(found.levels))


def test_colour_scale_ignores_cropped_points(experiment):
    values = [98.4, 98.2, 98.0, 97.8, 97.6, 10.0, 10.0, 12.0]
    runs = [record(accuracy=value, seed=seed) for seed, value in enumerate(values)]
    assert min(colour_scale(experiment(*runs).singles).levels) > 97


def test_constant_surface_is_drawn(experiment):
    surface = only(
        experiment(
            *(record(lr=lr, p=0.8, lam=lam, accuracy=50.0, sparsity=0.5)
              for lr, lam in product(RATES, LAMS))
        )
    )  # fmt: skip
    assert len(colours_at(surface, 0.5, 0.5)) == 1
    assert all(line.label is None for line in surface.lines)


def test_sparsities_of_the_paper():
    assert contours.SPARSITIES == (0.01, 0.2, 0.4, 0.8)


@pytest.mark.parametrize("options", [{}, {"lam": None}, {"lam": "x"}])
def test_diverged_run_without_a_number_for_lam_is_ignored(experiment, options):
    failed = record(lr=1e-1, p=0.8, diverged=True, accuracy=50.0, sparsity=0.5, **options)
    assert only(experiment(*(plane(*place) for place in product(RATES, LAMS)), failed)).bands
