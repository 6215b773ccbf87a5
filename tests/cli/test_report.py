from __future__ import annotations

import json

import pytest

from pdecay.lab.report import folder
from pdecay.lab.train import records

from ..lab.report.synthetic import MLP, record


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    monkeypatch.setattr(folder, "_figures", lambda style: iter(()))


@pytest.fixture
def one_run(write):
    return write([record(task="digits", layers=MLP, p=0.8, lam=0.01)])


@pytest.fixture
def error_of(run_cli, tmp_path):
    """Run the command, check that it writes nothing, and return its error."""

    def run(*argv):
        error = run_cli("report", *argv, "--out", tmp_path / "out", code=2)
        assert error.startswith("pdecay report: error: ")
        assert not (tmp_path / "out").exists()
        return error

    return run


def test_output_names_the_experiments_and_files(run_cli, tmp_path, one_run):
    out = tmp_path / "out"
    assert run_cli("report", one_run, "--out", out) == (
        "digits, scale cpu, 1,500 steps: 1 run\n"
        f"wrote {out / 'index.html'} and 5 figures and tables\n"
    )


def test_duplicate_runs_are_reported_once(run_cli, tmp_path, write):
    one, other = record(p=0.8, lam=0.01), record(p=0.8, lam=0.03)
    all_of_them = write([one, other])
    single = write([one], "one.jsonl")
    for given in ([tmp_path / "runs"], [all_of_them, single], [tmp_path / "runs", single]):
        assert "2 runs\n" in run_cli("report", *given, "--out", tmp_path / "out")


def test_missing_path_is_reported(error_of, tmp_path):
    assert "no-such does not exist" in error_of(tmp_path / "no-such")


def test_folder_without_records_is_reported(error_of, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no records" in error_of(tmp_path / "empty")


def test_empty_file_is_reported(error_of, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    message = error_of(tmp_path / "empty.jsonl")
    assert "no records in " in message
    assert "run pdecay train or pdecay sweep first" in message


def test_newer_schema_is_reported(error_of, tmp_path, one_run):
    newer = json.loads(one_run.read_text()) | {"schema": records.SCHEMA + 1}
    one_run.write_text(json.dumps(newer))
    assert "written by a newer pdecay" in error_of(one_run)


def test_incomplete_line_is_reported(error_of, tmp_path, one_run):
    one_run.write_text(one_run.read_text() + one_run.read_text()[:300])
    assert f"{one_run}, line 2 is not JSON" in error_of(one_run)


def test_missing_argument_is_reported(run_cli):
    assert "RUNS" in run_cli("report", code=2)


def test_output_that_is_a_file_is_reported(run_cli, tmp_path, one_run):
    (tmp_path / "file").touch()
    error = run_cli("report", one_run, "--out", tmp_path / "file", code=2)
    assert "cannot write to" in error
