"""The page in a browser: drawing, layout, and reactions to mouse, touch and keyboard."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pdecay.lab.report import best
from pdecay.lab.report.experiments import experiments
from pdecay.lab.report.style import Style

from .synthetic import record, sweep

pytestmark = pytest.mark.slow

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844, "phone": True}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><b>bold</b>"

FRONT = "[...document.querySelectorAll('#accuracy .mark.front')].map(m => +m.dataset.point)"
MARKS = "document.querySelectorAll('#accuracy .mark').length"
TIP = "document.getElementById('tip').hidden ? null : document.getElementById('tip').innerText"
CHOSEN = "document.getElementById('run-name').innerText"


@pytest.fixture
def opened(browser, html):
    """Open the page of some records; check at the end that it reported no problem."""

    def open_page(records, **size):
        path = html(records)
        browser.open(path.as_uri(), **(size or DESKTOP))
        return browser

    yield open_page
    assert browser.problems() == []
    assert all(url.startswith("file://") for url in browser.requests)
    assert len(browser.requests) == 1


def plain(text):
    return text.replace("\u00a0", " ")


def boxes(browser, selector):
    """Return left, top, right and bottom of elements."""
    return browser.run(
        f"[...document.querySelectorAll({selector!r})].map(node => {{"
        "const b = node.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; })"
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_all_runs_are_drawn_without_overflow(opened, several, size, dark):
    page = opened(several, **size, dark=dark)
    small, large = experiments(several)
    assert page.run(MARKS) == len(small.runs)
    assert page.run("document.documentElement.scrollWidth") <= size["width"]
    page.run("document.querySelector('details').open = true")
    picker = "document.getElementById('experiment')"
    page.run(f"{picker}.value = 1; {picker}.dispatchEvent(new Event('change'))")
    assert page.run(MARKS) == len(large.runs)
    assert page.count("#tradeoff .mark") == len(large.runs)
    assert page.run("document.documentElement.scrollWidth") <= size["width"]
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(21, 23, 27)" if dark else "rgb(255, 255, 255)")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_labels_are_not_cut_off_and_do_not_overlap(opened, swept, size):
    page = opened([*swept.runs, *swept.failed], **size)
    faults = page.run("""
        [...document.querySelectorAll('svg[role=group]')].flatMap((svg) => {
          const box = (node) => node.getBoundingClientRect();
          const outer = box(svg);
          const labels = [...svg.querySelectorAll('text')];
          const isCut = (b) => b.left < outer.left - 1 || b.right > outer.right + 1 ||
            b.top < outer.top - 1 || b.bottom > outer.bottom + 1;
          // a line's height has room above and below the letters
          const touch = (a, b) => a.left < b.right && b.left < a.right &&
            a.top < b.bottom - 2 && b.top < a.bottom - 2;
          return [
            ...labels.filter((label) => isCut(box(label))).map((label) => [label, svg]),
            ...labels.flatMap((one, k) => labels.slice(k + 1)
              .filter((other) => touch(box(one), box(other))).map((other) => [one, other])),
          ].map((pair) => [svg.getAttribute('aria-label'), ...pair.map((n) => n.textContent)]);
        })
    """)
    assert faults == []


def test_hover_shows_settings(opened):
    runs = [record("adamw", weight_decay=0.1), record(p=0.8, lam=0.03, accuracy=47.5, sparsity=0.9)]
    page = opened(runs)
    assert page.run(TIP) is None
    page.hover("#accuracy .mark[data-point='1']")
    shown = plain(page.run(TIP))
    for text in ("padam, p = 0.8, lam = 0.03, lr = 0.01", "47.50 %", "90.00 %", "48.40"):
        assert text in shown
    page.hover("h1")
    assert page.run(TIP) is None


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_tooltip_stays_in_window(opened, several, size):
    page = opened(several, **size)
    for place in range(3):
        page.hover("#accuracy .mark", place)
        ((left, top, right, bottom),) = boxes(page, "#tip")
        assert 0 <= left < right <= size["width"]
        assert 0 <= top < bottom <= size["height"]


def test_click_chooses_run(opened, swept):
    page = opened(swept.runs)
    target = next(k for k, p in enumerate(swept.means) if p.method == "gmp" and p.sparsity > 0.97)
    point = swept.means[target]
    assert plain(page.run(CHOSEN)) == swept.name(best.best_tradeoff(swept.means))
    page.click(f"#accuracy .mark[data-point='{target}']")
    assert plain(page.run(CHOSEN)) == swept.name(point)
    run = point.runs[0]
    layers = page.texts(".layer-name")
    assert layers == [layer["name"] for layer in run["result"]["layers"]]
    shares = page.texts(".layer b")
    assert shares == [
        f"{100 * (1 - layer['zeros'] / layer['size']):.2f} %" for layer in run["result"]["layers"]
    ]
    assert run["id"] in page.run("document.getElementById('run-facts').innerText")
    # this run, the best AdamW, and the two other seeds
    assert page.count("#curves .panel:first-child .line") == 4
    # a ring in both scatter plots; a method without lam has no contours
    assert page.count(".pair .chosen") == 2
    page.click("#seeds .chip", 1)
    assert point.runs[1]["id"] in page.run("document.getElementById('run-facts').innerText")


def test_tap_chooses_run(opened):
    runs = [record("adamw"), record(p=0.8, lam=0.03, accuracy=47.5, sparsity=0.9)]
    page = opened(runs, **PHONE)
    page.tap("#accuracy .mark[data-point='1']")
    assert plain(page.run(CHOSEN)).startswith("padam, p = 0.8, lam = 0.03")
    assert "47.50 %" in page.run(TIP)


def test_arrow_keys_move_between_points(opened):
    runs = [record(p=0.8, lam=lam, sparsity=s) for lam, s in ((0.1, 0.9), (0.01, 0.2), (0.03, 0.6))]
    page = opened(runs)
    assert page.count("#accuracy [tabindex='0']") == 1
    page.run("document.querySelector('#views .chip:last-child').focus()")
    page.key("Tab")
    for lam in (0.01, 0.03, 0.1):
        assert f"lam = {lam}," in plain(page.run(TIP))
        label = page.run("document.activeElement.getAttribute('aria-label')")
        assert f"lam = {lam}," in plain(label)
        page.key("ArrowRight")
    page.key("ArrowLeft")
    page.key("Enter")
    assert "lam = 0.03," in plain(page.run(CHOSEN))
    page.key("Escape")
    assert page.run(TIP) is None


@pytest.mark.parametrize("mode", ["means", "singles"])
def test_filters_update_front_as_in_python(opened, swept, mode):
    page = opened([*swept.runs, *swept.failed])
    style = Style(swept)
    points = getattr(swept, mode)
    if mode == "singles":
        page.click("#views .chip", 0)
    off: dict[str, set[int]] = {"methods": set(), "pRanges": set()}

    def compare():
        shown = [
            (k, point)
            for k, point in enumerate(points)
            if swept.methods.index(point.method) not in off["methods"]
            and (style.p_index(point) is None or style.p_index(point) not in off["pRanges"])
        ]
        assert page.run(MARKS) == len(shown)
        front = best.pareto_front([point for _, point in shown])
        places = {k for k, point in shown if point in front}
        assert set(page.run(FRONT)) == places
        return places

    seen = [compare()]
    for kind, place in (("methods", 3), ("pRanges", 1), ("methods", 4), ("pRanges", 0)):
        page.click(f"#{kind} .chip", place)
        off[kind].add(place)
        seen.append(compare())
    assert all(one != other for one, other in pairwise(seen))
    page.click("#methods .chip", 3)
    off["methods"].remove(3)
    compare()


def test_level_table_matches_python(opened, swept):
    page = opened([*swept.runs, *swept.failed])
    read = (
        "[...document.querySelectorAll('#levels tbody tr')].map(row => [row.cells[0].innerText,"
        "...[...row.cells].slice(2).map(cell => cell.innerText.replace(/\\s/g, ''))])"
    )

    def row(name, points):
        cells = [best.at_sparsity(points, level) for level in best.LEVELS]
        return [name, *(f"{c.accuracy:.2f}±{c.deviation:.2f}" if c else "\u2013" for c in cells)]

    def of(method, *norms):
        return [p for p in swept.means if p.method == method and (not norms or p.p in norms)]

    rows = page.run(read)
    assert rows[0] == row("adamw", of("adamw"))
    assert rows[1] == row("padam", of("padam"))
    assert rows[3] == row("p = 0.8", of("padam", 0.8))
    page.click("#pRanges .chip", 0)  # p = 0.5
    page.click("#methods .chip", 0)  # adamw
    rows = page.run(read)
    assert rows[0] == row("padam", of("padam", 0.8, 1.0, 1.2, 1.5))
    assert rows[1] == row("p = 0.8", of("padam", 0.8))
    page.click("#levels tbody tr:first-child td button", 3)
    assert plain(page.run(CHOSEN)) == swept.name(
        best.at_sparsity(of("padam", 0.8, 1.0, 1.2, 1.5), 0.9)
    )


def test_collapsed_network_is_not_bold(opened):
    page = opened(
        [record("adamw", accuracy=90.0), record(p=0.8, lam=0.1, accuracy=10.0, sparsity=0.999)]
    )
    assert page.texts("#levels td.collapsed") == ["10.00"] * 6
    assert page.texts("#levels td.best") == ["90.00"]


def test_level_table_shows_test_accuracy(opened):
    run = record("adamw", accuracy=90.0)
    run["result"]["test_accuracy"] = 88.0
    page = opened([run])
    assert page.texts("#levels td.best") == ["88.00"]
    assert "on the test split" in page.texts("#levels-note")[0]


def test_linear_axis(opened, several):
    page = opened(several[:-4])
    last = "[...document.querySelectorAll('#accuracy .mark')].at(-1).getBoundingClientRect().x"
    before = page.run(last)
    page.click("#views .chip", 0)
    assert page.run(last) != before
    assert "logarithmic" not in page.texts("#accuracy svg text")[-1]


def test_cropped_points_are_interactive_at_edge(opened):
    good = [(97.8 + k / 10, 0.9 - k / 10) for k in range(7)]
    # The median is 97.9, so the floor 94.4: two on either side of it, and one far below.
    values = [*good, (95.0, 0.93), (94.0, 0.94), (12.0, 1.0)]
    runs = [record(p=0.8, lam=a / s, accuracy=a, sparsity=s) for a, s in values]
    (experiment,) = experiments(runs)
    lost = {k for k, p in enumerate(experiment.means) if p in best.cropped(experiment.means)}
    assert len(lost) == 2
    page = opened(runs)
    outside = "[...document.querySelectorAll('#accuracy .mark.outside')].map(m => +m.dataset.point)"
    assert set(page.run(outside)) == lost
    assert page.run(MARKS) == 10
    assert "2 far below the plot" in page.texts("#accuracy-note")[0]
    page.hover("#accuracy .mark.outside")
    assert any(f"{accuracy:.2f} %" in page.run(TIP) for accuracy in (94.0, 12.0))
    page.click("#views .chip", 1)
    assert page.count("#accuracy .outside") == 0
    assert page.run(MARKS) == 10


def test_contours_show_cells_lines_and_reasons(opened, several):
    page = opened([*several[:-4], record("l1", lam=0.01)])
    titles = page.texts("#contours h4")
    assert [plain(title) for title in titles] == [
        *(f"padam, p = {p}" for p in ("0.5", "0.8", "1", "1.2", "1.5")),
        "elastic, p = 0.8",
    ]
    panel = "#contours .panel:nth-child({}) "
    assert page.count(panel.format(2) + "circle.cell") == 19
    assert page.count(panel.format(2) + ".cell.diverged") == 1
    labels = page.texts(panel.format(3) + ".sparsity-label")
    assert set(labels) <= {"0.01", "0.2", "0.4", "0.8"}
    assert len(labels) >= 3
    assert "l1 No contours: 2 learning rates" in page.texts("#contours")[0]
    page.hover("#contours circle.cell", 6)
    assert "padam, p = 0.5" in plain(page.run(TIP))
    page.click("#pRanges .chip", 0)
    assert page.count("#contours h4") == 5


def test_contour_colours_match_accuracy(opened):
    """The colour under a cell matches its accuracy, so the y axis is not flipped."""
    rates, lams = (1e-3, 1e-2, 1e-1), (1e-3, 1e-2, 1e-1)
    runs = [
        record(lr=lr, p=0.8, lam=lam, accuracy=90 - 10 * k - j)
        for k, lam in enumerate(lams)
        for j, lr in enumerate(rates)
    ]
    page = opened(runs)
    fills = page.run("""
        [...document.querySelectorAll('#contours circle.cell')].map((cell) => {
          cell.scrollIntoView({block: 'center', behavior: 'instant'});
          const b = cell.getBoundingClientRect();
          const svg = cell.ownerSVGElement.getBoundingClientRect();
          // a little towards the middle of the plot, off the edge
          const dx = b.x < svg.x + svg.width / 2 ? 4 : -4;
          const dy = b.y < svg.y + svg.height / 2 ? 4 : -4;
          const under = document.elementsFromPoint(b.x + b.width / 2 + dx, b.y + b.height / 2 + dy);
          return under.find((node) => node.getAttribute('fill-rule'))?.getAttribute('fill');
        })
    """)
    (experiment,) = experiments(runs)
    colours = page.run(
        "[...document.querySelectorAll('.band i')].map(n => n.style.getPropertyValue('--c'))"
    )
    by_accuracy = [
        colours.index(fill)
        for _, fill in sorted(zip([p.accuracy for p in experiment.means], fills, strict=True))
    ]
    assert by_accuracy == sorted(by_accuracy)
    assert by_accuracy[0] < by_accuracy[-1]


def test_single_run_page_explains_missing_parts(opened):
    page = opened([record(p=0.8, lam=0.01)])
    text = page.run("document.body.innerText")
    assert "there is no AdamW run to compare with" in text
    assert "No contours: 2 learning rates and 2 lam or more are needed" in text
    assert page.count(".reference") == 0
    assert page.run("document.getElementById('experiment').hidden")


def test_diverged_runs_are_listed_but_not_plotted(opened):
    page = opened([record("adamw"), record(p=0.8, lam=3.0, diverged=True)])
    assert page.run(MARKS) == 1
    listed = plain(page.run("document.getElementById('diverged').innerText"))
    assert "padam, p = 0.8, lam = 3, lr = 0.01" in listed
    assert "450" in listed


def test_page_reports_that_every_run_diverged(opened):
    page = opened([record(p=0.8, lam=3.0, diverged=True)])
    assert "every run diverged" in page.run("document.body.innerText")
    assert page.count("svg[role=group]") == 0


def test_setting_with_diverged_seed_is_hollow_and_off_front(opened):
    page = opened(
        [
            record(p=0.8, lam=0.01, seed=0, accuracy=49.0, sparsity=0.9),
            record(p=0.8, lam=0.01, seed=1, diverged=True),
            record(p=0.8, lam=0.03, seed=0, accuracy=45.0, sparsity=0.5),
        ]
    )
    assert page.count("#accuracy .mark.unreliable") == 1
    assert page.run(FRONT) == [1]


def test_settings_table_sorts_and_chooses(opened, several):
    page = opened(several[:-4])
    page.run("document.querySelector('details').open = true")
    column = "[...document.querySelectorAll('#settings tbody tr')].map(r => +r.cells[2].innerText)"
    page.click("#settings th button", 2)
    down = page.run(column)
    assert down == sorted(down, reverse=True)
    page.click("#settings th button", 2)
    assert page.run(column) == down[::-1]
    page.click("#settings tbody button", 0)
    name = page.run("document.querySelector('#settings tbody button').innerText")
    assert page.run(CHOSEN) == name


def test_curves_respond_to_mouse_and_keys(opened):
    run = record(p=0.8, lam=0.01)
    page = opened([run])
    page.hover("#curves svg")
    assert page.run(TIP).startswith("step 675")
    page.run("document.querySelector('#curves svg').focus()")
    page.key("ArrowLeft")  # focus is visible only after a key press
    page.key("ArrowRight")
    assert page.run(TIP).startswith("step ")
    assert "this run" in page.run(TIP)


def test_text_of_records_is_not_executed(opened):
    page = opened([record(HOSTILE, task=HOSTILE, layers=[(HOSTILE, [2, 2])], **{HOSTILE: HOSTILE})])
    assert page.run("document.images.length") == 0
    assert page.run("document.scripts.length") == 2
    assert not page.run("[...document.querySelectorAll('b')].some(n => n.innerText === 'bold')")
    assert HOSTILE in page.run("document.body.innerText")
    assert page.dialogs == 0


def test_content_security_policy_blocks_injected_script(opened):
    """The policy protects the page even if text of a record were inserted as HTML."""
    page = opened([record()])
    page.run(
        "(() => { const script = document.createElement('script');"
        "script.textContent = 'window.ran = 1'; document.body.append(script); })()"
    )
    assert page.run("window.ran === undefined")
    blocked = page.problems()
    assert any("Content Security Policy" in problem for problem in blocked)
    page.messages.clear()


def test_dark_mode_button_and_print(opened):
    page = opened([record()], **DESKTOP, dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    page.click("#theme")
    assert page.run(background) == "rgb(255, 255, 255)"
    page.click("#theme")
    assert page.run(background) == "rgb(21, 23, 27)"
    page.page.emulate_media(media="print")
    assert page.run(background) == "rgb(255, 255, 255)"
    shown = "getComputedStyle(document.getElementById('{}')).display"
    assert page.run(shown.format("views")) == "none"
    assert page.run(shown.format("methods")) == "flex"  # the legend


def test_resize_redraws_plots(opened, several):
    page = opened(several[:-4])
    for width in (420, 1500):
        page.page.set_viewport_size({"width": width, "height": 900})
        page.run("new Promise(requestAnimationFrame)")
        assert page.run("document.documentElement.scrollWidth") <= width
        ((left, _, right, _),) = boxes(page, "#accuracy svg")
        drawn = page.run("document.querySelector('#accuracy svg').viewBox.baseVal.width")
        assert drawn == pytest.approx(right - left, abs=2)


def test_two_thousand_runs_draw_within_seconds(opened):
    runs = [one for lot in range(14) for one in sweep((lot,))]
    page = opened(runs)
    page.click("#views .chip", 0)
    page.click("#methods .chip", 0)
    assert page.run(MARKS) > 1800
    seconds = page.run(
        "(() => { const start = performance.now();"
        "document.querySelectorAll('#methods .chip')[1].click();"
        "return (performance.now() - start) / 1000; })()"
    )
    assert seconds < 5
