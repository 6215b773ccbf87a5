from __future__ import annotations

import json

import pytest

from pdecay import cli
from pdecay.lab.report import folder
from pdecay.lab.train import records

from ..lab.report.synthetic import MLP, record


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    monkeypatch.setattr(folder, "_figures", lambda style: iter(()))


@pytest.fixture
def run(write):
    return write([record(task="digits", layers=MLP, p=0.8, lam=0.01)])


def mistake(capsys, tmp_path, *argv):
    """What a bad command line says: one line, and nothing is written."""
    out = tmp_path / "out"
    assert cli.main(["report", *map(str, argv), "--out", str(out)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("pdecay report: error: ")
    assert not out.exists()
    return shown.err


def test_it_says_what_it_made(capsys, tmp_path, run):
    out = tmp_path / "out"
    assert cli.main(["report", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out == (
        "digits, scale cpu, 1,500 steps: 1 run\n"
        f"wrote {out / 'index.html'} and 5 figures and tables\n"
    )


def test_files_and_folders_together_give_each_run_once(capsys, tmp_path, write):
    one, other = record(p=0.8, lam=0.01), record(p=0.8, lam=0.03)
    all_of_them = write([one, other])
    single = write([one], "one.jsonl")
    for given in ([tmp_path / "runs"], [all_of_them, single], [tmp_path / "runs", single]):
        assert cli.main(["report", *map(str, given), "--out", str(tmp_path / "out")]) == 0
        assert "2 runs\n" in capsys.readouterr().out


def test_no_such_path(capsys, tmp_path):
    assert "no-such does not exist" in mistake(capsys, tmp_path, tmp_path / "no-such")


def test_a_folder_without_records(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no records" in mistake(capsys, tmp_path, tmp_path / "empty")


def test_an_empty_file(capsys, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    told = mistake(capsys, tmp_path, tmp_path / "empty.jsonl")
    assert "no records in " in told
    assert "run pdecay train or pdecay sweep first" in told


def test_a_newer_schema(capsys, tmp_path, run):
    newer = json.loads(run.read_text()) | {"schema": records.SCHEMA + 1}
    run.write_text(json.dumps(newer))
    assert "written by a newer pdecay" in mistake(capsys, tmp_path, run)


def test_a_broken_line(capsys, tmp_path, run):
    run.write_text(run.read_text() + run.read_text()[:300])
    assert f"{run}, line 2 is not JSON" in mistake(capsys, tmp_path, run)


def test_no_argument(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["report"])
    assert "RUNS" in capsys.readouterr().err


def test_an_output_that_is_a_file(capsys, tmp_path, run):
    (tmp_path / "file").touch()
    assert cli.main(["report", str(run), "--out", str(tmp_path / "file")]) == 2
    assert "cannot write to" in capsys.readouterr().err
