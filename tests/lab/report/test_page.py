from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from pdecay.lab.report import best, page
from pdecay.lab.report.experiments import experiments
from pdecay.lab.report.page_data import initial_run, notes, page_data
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
    return page.page(page_data([Style(experiment) for experiment in experiments(records)]))


def test_page_loads_nothing():
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


def test_policy_allows_only_own_script():
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
def test_text_of_records_is_escaped(place):
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


def test_script_never_parses_html():
    folder = files("pdecay.lab.report") / "assets"
    scripts = [file for file in folder.iterdir() if file.name.endswith(".js")]
    assert {file.name.removesuffix(".js") for file in scripts} == set(page._SCRIPTS)
    for file in scripts:
        text = file.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(",
                     "fetch(", "XMLHttp", "import("):  # fmt: skip
            assert word not in text, f"{file.name}: {word}"


def test_page_is_reproducible():
    runs = [record(p=0.8, lam=lam, seed=seed) for lam in (0.01, 0.03) for seed in (0, 1)]
    assert made(*runs) == made(*reversed(runs))


def test_page_data_match_records(swept):
    data = json.loads(json.dumps(page_data([Style(swept)])))
    (experiment,) = data["experiments"]
    assert [run["accuracy"] for run in experiment["runs"]] == [
        run["result"]["accuracy"] for run in swept.runs
    ]
    assert [point["accuracy"] for point in experiment["points"]["means"]] == [
        point.accuracy for point in swept.means
    ]
    run, shown = swept.runs[11], experiment["runs"][11]
    assert shown["id"] == run["id"]
    table = experiment["layerTables"][shown["layers"]["table"]]
    assert [layer[0] for layer in table] == [layer["name"] for layer in run["result"]["layers"]]
    assert shown["layers"]["zeros"] == [layer["zeros"] for layer in run["result"]["layers"]]
    assert shown["curve"]["accuracy"] == pytest.approx(
        [p["accuracy"] for p in run["curve"]], rel=1e-5
    )
    assert len(experiment["layerTables"]) == 1  # the names of layers are kept once
    dense = experiment["points"]["means"][experiment["dense"]["means"]]
    assert dense["accuracy"] == best.dense_reference(swept.means).accuracy
    alone = experiment["points"]["runs"][experiment["dense"]["runs"]]
    assert alone["accuracy"] == best.dense_reference(swept.singles).accuracy
    assert (
        experiment["runs"][experiment["initialRun"]]["id"]
        == best.best_tradeoff(swept.means).runs[0]["id"]
    )


def test_facts(swept):
    (experiment,) = page_data([Style(swept)])["experiments"]
    facts = {fact["title"]: fact for fact in experiment["facts"]}
    dense = best.dense_reference(swept.means)
    assert facts["Best AdamW"]["value"] == f"{dense.accuracy:.2f} %"
    close = swept.means[facts["Sparsest less than 2 points below AdamW"]["point"]]
    assert close.accuracy > dense.accuracy - 2
    assert not any(
        round(p.sparsity, 3) > round(close.sparsity, 3) and p.accuracy > dense.accuracy - 2
        for p in swept.means
    )


@pytest.mark.parametrize(
    ("runs", "starts"),
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
def test_notes(experiment, runs, starts):
    found = [note for note in notes(experiment(*runs)) if "split" not in note]
    assert len(found) == len(starts)
    assert all(note.startswith(start) for note, start in zip(found, starts, strict=True))


def test_initial_run_without_reliable_setting(experiment):
    found = experiment(record(p=0.8, seed=0), record(p=0.8, seed=1, diverged=True))
    assert initial_run(found) is found.runs[0]
    assert initial_run(experiment(record(diverged=True))) is None


def test_notes_name_the_split(experiment):
    runs = [record("adamw"), record(p=0.8)]
    assert any("measured on the validation split" in note for note in notes(experiment(*runs)))
    for run in runs:
        run["result"]["test_accuracy"] = run["result"]["accuracy"] - 1
    assert any("on the test split" in note for note in notes(experiment(*runs)))
