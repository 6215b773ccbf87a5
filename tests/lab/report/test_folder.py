from __future__ import annotations

import json

import pytest

from pdecay.lab.report import folder, page
from pdecay.lab.report.experiments import experiments
from pdecay.lab.report.folder import write

from .synthetic import MLP, record

FIGURES = {f"{name}.{kind}" for name in ("accuracy", "tradeoff", "layers", "curves")
           for kind in ("png", "svg")}  # fmt: skip
TABLES = {"above_sparsity.csv", "front.csv", "layers.csv", "runs.csv", "settings.csv"}


@pytest.fixture
def tiny():
    """Return an experiment with one run."""
    return experiments([record(task="digits", layers=MLP, p=0.8, lam=0.01)])


@pytest.fixture
def drawn(monkeypatch):
    """Skip the figures in tests of files."""
    monkeypatch.setattr(folder, "_figures", lambda style: iter(()))


def tree(out):
    return {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_report_of_one_run_has_all_files(tiny, tmp_path):
    out = tmp_path / "a" / "b"
    written = write(tiny, out)
    assert written[0] == out / "index.html"
    key = "digits-cpu-1500"
    assert tree(out) == {
        "index.html",
        "files.json",
        *(f"figures/{key}/{name}" for name in FIGURES),
        *(f"tables/{key}/{name}" for name in TABLES),
    }
    assert {path.relative_to(out).as_posix() for path in written} == tree(out) - {"files.json"}
    assert (out / f"figures/{key}/accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert (out / f"figures/{key}/accuracy.svg").read_text().startswith("<?xml")


@pytest.mark.usefixtures("drawn")
def test_failure_keeps_old_report(tiny, tmp_path, monkeypatch):
    write(tiny, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in tree(tmp_path)}

    def fail(data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page, "page", fail)
    with pytest.raises(OSError, match="No space"):
        write(experiments([record(task="fashion")]), tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in tree(tmp_path)} == before


@pytest.mark.usefixtures("drawn")
def test_only_files_of_older_report_are_deleted(tiny, tmp_path):
    write(tiny, tmp_path)
    for mine in ("notes.md", "figures/mine.png", "tables/digits-cpu-1500/mine.csv"):
        (tmp_path / mine).parent.mkdir(exist_ok=True)
        (tmp_path / mine).write_text("my own")
    write(experiments([record(task="fashion")]), tmp_path)
    assert tree(tmp_path) == {
        "index.html",
        "files.json",
        "notes.md",
        "figures/mine.png",
        "tables/digits-cpu-1500/mine.csv",
        *(f"tables/fashion-cpu-1500/{name}" for name in TABLES),
    }


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    "listed",
    ["not json", '{"a": 1}', "[1]", json.dumps(["../precious.txt", "/etc/hosts", "notes.md",
     "tables/../precious.txt", "figures/../../precious.txt", "tables/x/../../y/precious.txt"])],
)  # fmt: skip
def test_invalid_file_list_deletes_nothing(tiny, tmp_path, listed):
    out = tmp_path / "out"
    out.mkdir()
    precious = [tmp_path / "precious.txt", out / "precious.txt", out / "notes.md"]
    for path in precious:
        path.write_text("keep")
    (out / "files.json").write_text(listed)
    write(tiny, out)
    assert all(path.read_text() == "keep" for path in precious)


@pytest.mark.usefixtures("drawn")
def test_no_file_behind_a_link_is_deleted(tiny, tmp_path):
    """The folder may be of an archive from somewhere else."""
    precious = tmp_path / "home" / ".ssh" / "precious.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("keep")
    out = tmp_path / "out"
    out.mkdir()
    (out / "figures").symlink_to(tmp_path / "home")
    (out / "files.json").write_text(json.dumps(["figures/.ssh/precious.txt"]))
    write(tiny, out)
    assert precious.read_text() == "keep"


@pytest.mark.usefixtures("drawn")
def test_each_experiment_has_its_folder(several, tmp_path):
    write(experiments(several), tmp_path)
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {
        "digits-quick-600",
        "shakespeare-cpu-1500",
    }


def test_diverged_runs_give_page_without_figures(tmp_path):
    write(experiments([record(diverged=True)]), tmp_path)
    assert not list(tmp_path.glob("figures/*/*"))
    assert (tmp_path / "index.html").is_file()


@pytest.mark.slow
def test_contour_figure_only_with_surfaces(tmp_path, several, monkeypatch):
    drawn = []
    monkeypatch.setattr(folder.drawing, "save", lambda figure, path: drawn.append(path.name))
    write(experiments(several)[1:], tmp_path)
    assert "contours.png" in drawn
    drawn.clear()
    write(experiments(several)[:1], tmp_path)
    assert drawn
    assert "contours.png" not in drawn
