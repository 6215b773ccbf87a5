from __future__ import annotations

import pytest
from matplotlib.colors import to_rgb

from pdecay.lab.report.study import studies
from pdecay.lab.report.style import INK, Style, marker_path

from .synthetic import record


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def style(*made):
    (found,) = studies(made)
    return Style(found)


def test_every_colour_can_be_seen_on_paper_and_on_a_dark_screen(swept):
    chosen = Style(swept)
    for light, dark in [*chosen.colours.values(), *(norm.colour for norm in chosen.norms)]:
        assert contrast(light, "#ffffff") > 2
        assert contrast(dark, "#15171b") > 4


def test_a_method_has_its_marker_and_a_p_its_colour(swept):
    chosen = Style(swept)
    assert len(set(chosen.markers.values())) == len(swept.methods)
    colours = {(point.method, point.p): chosen.colour(point) for point in swept.means}
    assert colours["padam", 0.8] == colours["elastic", 0.8] == colours["target", 0.8]
    assert len({colours["padam", p] for p in swept.norms}) == len(swept.norms)
    assert colours["adamw", None] == INK


def test_methods_of_the_users_own_look_unlike():
    chosen = style(*(record(f"mine:{name}") for name in "ABC"))
    assert len(set(chosen.markers.values())) == 3
    assert len(set(chosen.colours.values())) == 3


def test_very_many_p_are_intervals():
    values = [round(0.3 + 0.037 * k, 3) for k in range(40)]
    chosen = style(*(record(p=p, lam=0.01) for p in values))
    assert 2 < len(chosen.norms) <= 12
    for point in chosen.study.means:
        place = chosen.norm(point)
        assert place is not None
        assert chosen.norms[place].low <= point.p <= chosen.norms[place].high
    assert chosen.norms[0].label == "0.2 to 0.4"


def test_few_p_are_named_one_by_one():
    chosen = style(*(record(p=p, lam=0.01) for p in (1.0, 0.5, 2.0)))
    assert [norm.label for norm in chosen.norms] == ["0.5", "1", "2"]


@pytest.mark.parametrize("marker", list("oPsD^Xv*h<>pd8"))
def test_markers_are_svg_paths_of_about_one_size(marker):
    path = marker_path(marker)
    assert path.startswith("M")
    assert path.endswith("Z")
    numbers = [float(n) for n in path.translate(str.maketrans("MLCQZ", "     ")).split()]
    assert 0.7 < max(map(abs, numbers)) < 1.5
