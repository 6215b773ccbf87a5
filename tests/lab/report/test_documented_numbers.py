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
    study_report = importlib.import_module("study_report")
    assert written("study_*") == study_report.tables()
    check_readme(study_report.readme())


def test_tables_of_speed_match_the_record(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    speed_tables = importlib.import_module("speed_tables")
    record = json.loads(speed_tables.RECORD.read_text())
    assert written("speed_*") == speed_tables.tables(record)
    check_readme(speed_tables.readme(record))


def test_tables_of_deploy_and_files_match_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    deploy_tables = importlib.import_module("deploy_tables")
    assert written("deploy_*") | written("files_*") == deploy_tables.tables()
    check_readme(deploy_tables.readme())


def test_tables_of_bridge_regression_match_the_record(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert written("bridge_*") == importlib.import_module("bridge_tables").tables()


def test_tables_of_the_examples_match_the_record(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert written("beyond_*") == importlib.import_module("beyond").tables()


def test_table_of_compacted_architectures_matches_the_record(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    zoo = importlib.import_module("compact_zoo")
    record = json.loads(zoo.RECORD.read_text())
    assert written("compact_zoo") == {"compact_zoo": zoo.table(record["runs"])}


def test_gaps_in_the_summary_of_the_results_match_the_tables():
    page = (ROOT / "docs/results.md").read_text()
    stated = re.search(
        r"loses ([\d.]+) \(`fashion`\),\s+([\d.]+) \(text\) and ([\d.]+) \(`cifar10`", page
    )
    assert stated, "docs/results.md does not state the gaps at 95 % zeros"
    for task, ratio in zip(("fashion", "shakespeare", "cifar10"), stated.groups(), strict=True):
        assert f" {ratio} |" in row_of(f"study_{task}_gaps", "95 %")
    scaled = re.search(r"loses ([\d.]+) and ([\d.]+) of what tuned gradual magnitude pruning", page)
    assert scaled, "docs/results.md does not state the gaps with scaled updates"
    for level, ratio in zip(("90 %", "95 %"), scaled.groups(), strict=True):
        assert row_of("study_shakespeare_gaps", level).endswith(f" {ratio} |")


def test_gpt2_in_the_documentation_matches_the_record():
    record = json.loads((ROOT / "benchmarks/records/gpt2.json").read_text())
    trained, deployed = record["trained"], record["deployed"]
    page = " ".join((ROOT / "docs/transformers.md").read_text().split())
    for text in (
        f"{trained['parameters'] / 1e6:.1f} M weights",
        f"for {trained['steps']} steps to {trained['sparsity']:.1%} zeros".replace("%", " %"),
        f"{trained['file bytes'] / 1e6:.1f} MB instead of {trained['dense bytes'] / 1e6:.1f} MB",
        f"is {deployed['speedup of generate']:.1f} times as fast",
        f"loss of {trained['held-out loss, nats per byte']:.1f} nats",
    ):
        assert text in page
    assert all(deployed["same tokens"].values())


def written(pattern: str) -> dict[str, str]:
    """Return the tables in docs/_data whose names match a pattern."""
    return {path.stem: path.read_text() for path in (ROOT / "docs/_data").glob(f"{pattern}.md")}


def row_of(table: str, first: str) -> str:
    rows = (ROOT / f"docs/_data/{table}.md").read_text().splitlines()
    return next(row for row in rows if row.startswith(f"| {first} |"))


def check_readme(sections: dict[str, str]) -> None:
    """Check that README has these sections, as documents.py writes them."""
    documents = importlib.import_module("documents")
    page = documents.README.read_text(encoding="utf-8")
    for name, text in sections.items():
        assert documents.filled(page, name, text) == page


def test_outputs_of_the_pages_match_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pages = importlib.import_module("pages")
    for name, page in json.loads(pages.RECORD.read_text())["pages"].items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert pages.with_outputs(text, page["outputs"]) == text
