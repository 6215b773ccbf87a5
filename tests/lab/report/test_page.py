from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from pdecay.lab.report import best, page
from pdecay.lab.report.payload import chosen, notes, payload
from pdecay.lab.report.study import studies
from pdecay.lab.report.style import Style

from .synthetic import record

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> & \u2028"


class _Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.text, self.open = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.open = len(self.found)
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, data):
        self.text[self.open] = self.text.get(self.open, "") + data

    def all(self, tag):
        return [
            (attributes, self.text.get(place, ""))
            for place, (name, attributes) in enumerate(self.found)
            if name == tag
        ]


def made(*records):
    return page.page(payload([Style(study) for study in studies(records)]))


def test_the_page_loads_nothing():
    text = made(record(p=0.8, lam=0.01))
    elements = _Elements(text)
    for tag, attributes in elements.found:
        assert "src" not in attributes
        if "href" in attributes:
            assert (tag, attributes["href"]) == ("link", "data:,")
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text.replace("url(#${clip})", ""))
    # one address is named, and it is the name of SVG's elements
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}


def test_only_its_own_script_may_run():
    elements = _Elements(made(record(p=0.8, lam=0.01)))
    data, script = elements.all("script")
    (style,) = elements.all("style")
    assert data[0] == {"type": "application/json", "id": "data"}
    (policy,) = [
        attributes["content"]
        for attributes, _ in elements.all("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    for text in (script[1], style[1]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("place", ["method", "task", "option", "layer"])
def test_what_a_record_says_stays_data(place):
    given = {
        "method": lambda: record(HOSTILE, p=0.8, lam=0.01),
        "task": lambda: record(task=HOSTILE),
        "option": lambda: record("mine:M", **{HOSTILE: HOSTILE}),
        "layer": lambda: record(layers=[(HOSTILE, [2, 2])]),
    }[place]()
    text = made(given)
    plain = made(record(p=0.8, lam=0.01))
    assert [tag for tag, _ in _Elements(text).found] == [tag for tag, _ in _Elements(plain).found]
    (data, _) = _Elements(text).all("script")
    assert HOSTILE in _strings(json.loads(data[1]))


def _strings(value):
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in _strings(item))]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def test_the_script_writes_text_and_never_html():
    folder = files("pdecay.lab.report") / "assets"
    scripts = [file for file in folder.iterdir() if file.name.endswith(".js")]
    assert {file.name.removesuffix(".js") for file in scripts} == set(page._SCRIPTS)
    for file in scripts:
        text = file.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(",
                     "fetch(", "XMLHttp", "import("):  # fmt: skip
            assert word not in text, f"{file.name}: {word}"


def test_equal_records_make_equal_pages():
    runs = [record(p=0.8, lam=lam, seed=seed) for lam in (0.01, 0.03) for seed in (0, 1)]
    assert made(*runs) == made(*reversed(runs))


def test_the_numbers_are_those_of_the_records(swept):
    data = json.loads(json.dumps(payload([Style(swept)])))
    (study,) = data["studies"]
    assert [run["accuracy"] for run in study["runs"]] == [
        run["result"]["accuracy"] for run in swept.runs
    ]
    assert [point["accuracy"] for point in study["points"]["means"]] == [
        point.accuracy for point in swept.means
    ]
    run, shown = swept.runs[11], study["runs"][11]
    assert shown["id"] == run["id"]
    table = study["layerTables"][shown["layers"]["table"]]
    assert [layer[0] for layer in table] == [layer["name"] for layer in run["result"]["layers"]]
    assert shown["layers"]["zeros"] == [layer["zeros"] for layer in run["result"]["layers"]]
    assert shown["curve"]["accuracy"] == pytest.approx(
        [p["accuracy"] for p in run["curve"]], rel=1e-5
    )
    assert len(study["layerTables"]) == 1  # the names of layers are kept once
    dense = study["points"]["means"][study["adamw"]["means"]]
    assert dense["accuracy"] == best.adamw(swept.means).accuracy
    alone = study["points"]["runs"][study["adamw"]["runs"]]
    assert alone["accuracy"] == best.adamw(swept.singles).accuracy
    assert study["runs"][study["chosen"]]["id"] == best.balanced(swept.means).runs[0]["id"]


def test_the_facts(swept):
    (study,) = payload([Style(swept)])["studies"]
    facts = {fact["what"]: fact for fact in study["facts"]}
    dense = best.adamw(swept.means)
    assert facts["Best AdamW"]["value"] == f"{dense.accuracy:.2f} %"
    close = swept.means[facts["Sparsest less than 2 points below AdamW"]["point"]]
    assert close.accuracy > dense.accuracy - 2
    assert not any(
        round(p.sparsity, 3) > round(close.sparsity, 3) and p.accuracy > dense.accuracy - 2
        for p in swept.means
    )


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        ([record("adamw")], []),
        ([record(p=0.8)], ["there is no AdamW run"]),
        ([record("adamw"), record(p=0.8, diverged=True)], ["1 run diverged"]),
        ([record("adamw", diverged=True)], ["every run diverged", "1 run diverged"]),
        (
            [record("adamw"), record("adamw", seed=1, diverged=True)],
            ["there is no AdamW run", "1 run diverged", "hollow points"],
        ),
        (
            [record("adamw", accuracy=40.0), record("adamw", accuracy=41.0)],
            ["1 older results of the same settings"],
        ),
    ],
)  # fmt: skip
def test_notes_say_what_is_thin(study, runs, told):
    found = notes(study(*runs))
    assert len(found) == len(told)
    assert all(note.startswith(start) for note, start in zip(found, told, strict=True))


def test_a_run_is_chosen_even_where_none_is_reliable(study):
    found = study(record(p=0.8, seed=0), record(p=0.8, seed=1, diverged=True))
    assert chosen(found) is found.runs[0]
    assert chosen(study(record(diverged=True))) is None
