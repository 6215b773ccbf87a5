from __future__ import annotations

import pytest
from matplotlib.colors import to_rgb

from pdecay.lab.report.experiments import experiments
from pdecay.lab.report.style import Style, marker_path

from .synthetic import record


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def style(*made):
    (found,) = experiments(made)
    return Style(found)


def test_colours_have_contrast_on_light_and_dark(swept):
    chosen = Style(swept)
    for light, dark in [*chosen.colours.values(), *(one.colour for one in chosen.p_ranges)]:
        assert contrast(light, "#ffffff") > 2
        assert contrast(dark, "#15171b") > 4


def test_marker_by_method_and_colour_by_p(swept):
    chosen = Style(swept)
    assert len(set(chosen.markers.values())) == len(swept.methods)
    colours = {(point.method, point.p): chosen.colour(point) for point in swept.means}
    assert colours["padam", 0.8] == colours["elastic", 0.8] == colours["target", 0.8]
    assert len({colours["padam", p] for p in swept.p_values}) == len(swept.p_values)
    assert colours["adamw", None] == ("#222222", "#e6e6e6")


def test_custom_methods_look_different():
    chosen = style(*(record(f"mine:{name}") for name in "ABC"))
    assert len(set(chosen.markers.values())) == 3
    assert len(set(chosen.colours.values())) == 3


def test_many_p_values_become_intervals():
    values = [round(0.3 + 0.037 * k, 3) for k in range(40)]
    chosen = style(*(record(p=p, lam=0.01) for p in values))
    assert 2 < len(chosen.p_ranges) <= 12
    for point in chosen.experiment.means:
        place = chosen.p_index(point)
        assert place is not None
        assert chosen.p_ranges[place].low <= point.p <= chosen.p_ranges[place].high
    assert chosen.p_ranges[0].label == "0.2 to 0.4"


def test_p_values_with_many_digits_become_intervals():
    chosen = style(*(record(p=p, lam=0.01) for p in (0.512345, 0.798765, 1.023456)))
    assert all(len(one.label) <= len("0.75 to 0.8") for one in chosen.p_ranges)


def test_rounding_errors_of_p_do_not_matter():
    values = [0.2 + k * 0.2 for k in range(7)]  # the last is 1.4000000000000001
    chosen = style(*(record(p=p, lam=0.01) for p in (*values, 0.3, 0.1 + 0.2, 3 * 0.1)))
    expected = ["0.2", "0.3", "0.4", "0.6", "0.8", "1", "1.2", "1.4"]
    assert [one.label for one in chosen.p_ranges] == expected
    assert all(chosen.p_index(point) is not None for point in chosen.experiment.means)


@pytest.mark.parametrize("values", [(1.3 + 3e-16, 1.4 + 2e-16), (1234.5,), (0.5, 1e12 + 0.1)])
def test_every_p_has_a_range(values):
    chosen = style(*(record(p=p, lam=0.01, sparsity=0.5) for p in values))
    assert all(chosen.p_index(point) is not None for point in chosen.experiment.means)


def test_few_p_values_have_own_labels():
    chosen = style(*(record(p=p, lam=0.01) for p in (1.0, 0.5, 2.0)))
    assert [one.label for one in chosen.p_ranges] == ["0.5", "1", "2"]


@pytest.mark.parametrize("marker", list("oPsD^Xv*h<>pd8"))
def test_markers_are_svg_paths_of_similar_size(marker):
    path = marker_path(marker)
    assert path.startswith("M")
    assert path.endswith("Z")
    numbers = [float(n) for n in path.translate(str.maketrans("MLCQZ", "     ")).split()]
    assert 0.7 < max(map(abs, numbers)) < 1.5
