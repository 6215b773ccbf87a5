from __future__ import annotations

import csv
import io

import pytest

from pdecay.lab.report import best, tables
from pdecay.lab.report.experiments import experiments
from pdecay.lab.report.style import Style

from .synthetic import record


def read(text):
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture(scope="module")
def files(swept):
    return {name: read(text) for name, text in tables.files(Style(swept)).items()}


def test_table_of_accuracy_at_levels(swept, files):
    rows = files["above_sparsity.csv"]
    assert [(row["method"], row["p"]) for row in rows] == [
        ("adamw", ""),
        ("padam", ""),
        *(("padam", p) for p in ("0.5", "0.8", "1", "1.2", "1.5")),
        *((method, "") for method in ("elastic", "target", "gmp", "mp", "oto")),
    ]
    padam = [point for point in swept.means if point.method == "padam"]
    for level in best.LEVELS:
        name = f"{100 * level:g}"
        expected = max(p.accuracy for p in padam if p.sparsity >= level - best.ROUNDING)
        assert float(rows[1][f"accuracy_{name}"]) == expected
        # The best over all p is the best of the rows of each p.
        of_each = [row[f"accuracy_{name}"] for row in rows[2:7] if row[f"accuracy_{name}"]]
        assert max(map(float, of_each)) == expected
    assert rows[0]["accuracy_0"]
    assert rows[0]["accuracy_70"] == rows[0]["deviation_70"] == rows[0]["setting_70"] == ""
    winner = best.at_sparsity(padam, 0.9)
    assert rows[1]["setting_90"] == swept.name(winner)
    assert float(rows[1]["deviation_90"]) == winner.deviation


def test_tables_list_all_runs_and_settings(swept, files):
    assert len(files["runs.csv"]) == len(swept.runs) + len(swept.failed) == 423
    assert [row["status"] for row in files["runs.csv"]].count("diverged") == 6
    assert len(files["settings.csv"]) == len(swept.means)
    assert {row["seeds"] for row in files["settings.csv"]} == {"3"}
    run = swept.runs[-1]
    (row,) = [row for row in files["runs.csv"] if row["id"] == run["id"]]
    assert float(row["accuracy"]) == run["result"]["accuracy"]
    assert float(row["target"]) == run["settings"]["options"]["target"]
    assert row["lam"] == ""


def test_front_table_is_sorted_by_sparsity(swept, files):
    rows = files["front.csv"]
    assert len(rows) == len(best.pareto_front(swept.means))
    sparsities = [float(row["sparsity"]) for row in rows]
    assert sparsities == sorted(sparsities)


def test_layer_table(swept, files):
    run = swept.runs[7]
    rows = [row for row in files["layers.csv"] if row["id"] == run["id"]]
    layers = run["result"]["layers"]
    assert [(row["layer"], int(row["size"]), int(row["zeros"])) for row in rows] == [
        (layer["name"], layer["size"], layer["zeros"]) for layer in layers
    ]
    assert rows[0]["shape"] == "65 x 128"


def test_single_run_has_no_deviation():
    (experiment,) = experiments([record(p=0.8, lam=0.01)])
    (row,) = read(tables.files(Style(experiment))["settings.csv"])
    assert row["deviation"] == ""


def test_csv_quotes_unusual_names():
    (experiment,) = experiments([record('mine:"M",\n=1+1', p=0.8, lam=0.01, note="a,b")])
    (row,) = read(tables.files(Style(experiment))["settings.csv"])
    assert row["method"] == 'mine:"M",\n=1+1'
    assert row["note"] == "a,b"


def test_cells_that_spreadsheets_would_evaluate_are_escaped():
    layers = [("=HYPERLINK(1)", [4, 2]), ("+1", [4, 2]), ("plain", [4, 2])]
    found = experiments([record("@sum", layers=layers, kind="=2+3", offset=-1.5)])
    texts = tables.files(Style(found[0]))
    assert [row["layer"] for row in read(texts["layers.csv"])] == ["'=HYPERLINK(1)", "'+1", "plain"]
    (row,) = read(texts["runs.csv"])
    assert (row["method"], row["kind"], row["offset"]) == ("'@sum", "'=2+3", "-1.5")


def test_carriage_returns_start_no_row():
    found = experiments([record("adamw", layers=[("a\r=1+1", [4, 2]), ("\r=2", [4, 2])])])
    text = tables.files(Style(found[0]))["layers.csv"]
    assert "\r" not in text
    assert [row["layer"] for row in read(text)] == ["a =1+1", "' =2"]
