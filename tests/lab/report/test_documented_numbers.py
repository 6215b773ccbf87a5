"""Numbers in the documentation that come from committed records."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from pdecay.lab.report import best
from pdecay.lab.report.experiments import load

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "benchmarks" / "records" / "shakespeare_sweep.jsonl"


def test_example_table_matches_records():
    (experiment,) = load([RECORDS])
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (.+) \|$", page, flags=re.MULTILINE)
    assert [method for method, _, _ in rows] == list(experiment.methods)
    for method, settings, cells in rows:
        points = [point for point in experiment.means if point.method == method]
        expected = [best.at_sparsity(points, level) for level in best.LEVELS]
        assert int(settings) == len(points)
        assert cells.split(" | ") == [f"{p.accuracy:.2f}" if p else "\u2013" for p in expected]


def test_committed_report_is_of_committed_records():
    (experiment,) = load([RECORDS])
    page = (ROOT / "benchmarks" / "reports" / "shakespeare" / "index.html").read_text()
    assert all(run["id"] in page for run in experiment.runs)


@pytest.mark.slow
def test_tables_of_the_study_match_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = importlib.import_module("study_report").tables()
    committed = {path.stem: path.read_text() for path in (ROOT / "docs/_data").glob("study_*.md")}
    assert committed == tables


def test_tables_of_speed_match_the_record(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    speed_tables = importlib.import_module("speed_tables")
    record = json.loads(speed_tables.RECORD.read_text())
    committed = {path.stem: path.read_text() for path in (ROOT / "docs/_data").glob("speed_*.md")}
    assert committed == speed_tables.tables(record)
    readme = speed_tables.README.read_text(encoding="utf-8")
    assert speed_tables.with_table(readme, record) == readme


def test_tables_of_the_readme_are_tables_of_the_study():
    """Every row in README that has a mean and a spread is a row of a committed table."""
    tables = "".join(path.read_text() for path in (ROOT / "docs/_data").glob("study_*.md"))
    rows = [row for row in (ROOT / "README.md").read_text().splitlines() if "±" in row]
    assert [row for row in rows if row not in tables] == []


def test_outputs_of_the_pages_match_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pages = importlib.import_module("pages")
    for name, page in json.loads(pages.RECORD.read_text())["pages"].items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert pages.with_outputs(text, page["outputs"]) == text
