"""``demo --quick`` from end to end: the files, the numbers and their dependence on the seed."""

from __future__ import annotations

import io

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

import pdecay
from pdecay.lab.demo import demo
from pdecay.lab.tasks import get_task
from pdecay.lab.train import records

pytestmark = pytest.mark.slow

FILES = {"accuracy_vs_sparsity.png", "toy.png", "records.jsonl", "model.safetensors"}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("first"))


def _run(out):
    output = io.StringIO()
    results = demo.run(out, quick=True, console=Console(file=output, width=80))
    return results, out, output.getvalue()


def test_files_are_written_and_listed(first):
    _, out, output = first
    assert {path.name for path in out.iterdir()} == FILES
    assert all(str(out / name) in output for name in FILES)
    assert "times as fast as the dense" in " ".join(output.split())


@pytest.mark.parametrize("name", ["accuracy_vs_sparsity.png", "toy.png"])
def test_figures_have_size_for_readme(first, name):
    path = first[1] / name
    image = imread(path)
    height, width, _ = image.shape
    assert 1000 <= width <= 1400
    assert 400 <= height <= 900
    assert path.stat().st_size < 150_000
    assert 0.02 < np.mean(image[..., :3].min(axis=2) < 0.9) < 0.3  # drawn on, and mostly white


def test_records_and_table_have_numbers_of_runs(first):
    results, out, output = first
    assert results.headline() in " ".join(output.split())
    found = {record["id"]: record for record in records.read(out / "records.jsonl")}
    assert len(found) == len(results.summaries) == len(demo.QUICK.cells)
    for summary in results.summaries:
        (run,) = summary.runs
        assert found[run["id"]]["result"] == run["result"]
        assert run["result"]["accuracy"] == summary.accuracy
        (row,) = [
            line
            for line in output.splitlines()
            if line.strip(" ").startswith((summary.decay + "  ", "AdamW, L2"))
            and f"{summary.accuracy:.2f}" in line
            and f"{summary.test_accuracy:.2f}" in line
            and f"{100 * summary.sparsity:.2f}" in line
        ]
        assert "\u2026" not in row  # nothing was cut off


def test_layers_are_those_of_recommended_setting(first):
    results, _, output = first
    for layer in results.recommended.runs[0]["result"]["layers"]:
        (row,) = [line for line in output.splitlines() if line.strip().startswith(layer["name"])]
        assert f"{layer['size'] - layer['zeros']:,}" in row


def test_columns_of_full_table_fit_in_80_characters(first):
    """Three seeds add a deviation to each row."""
    results, _, _ = first
    output = io.StringIO()
    tripled = demo.Results(
        tuple(demo.Summary(one.runs * 3) for one in results.summaries), results.toy
    )
    demo.print_tables(Console(file=output, width=80), tripled, pdecay.sparsity(_model()))
    assert "\u2026" not in output.getvalue()
    assert " +- " in output.getvalue()


def _model():
    return get_task("digits", "quick").model(0)


def test_sparse_training_works(first):
    results = first[0]
    assert results.dense.sparsity == 0
    assert results.dense.accuracy > 95
    assert results.recommended.sparsity > 0.5
    assert results.lost(results.recommended) < 2


def test_equal_seeds_give_equal_files(first, tmp_path):
    _, again, _ = _run(tmp_path)
    for name in FILES - {"records.jsonl"}:
        assert (again / name).read_bytes() == (first[1] / name).read_bytes()
    one, other = (records.read(out / "records.jsonl") for out in (again, first[1]))
    assert [records.essence(record) for record in one] == [
        records.essence(record) for record in other
    ]


def test_later_seeds_follow_the_first(tmp_path):
    grid = demo.Grid(demo.QUICK.cells[:2], seeds=2, steps=20)
    quiet = Console(quiet=True)
    results = demo.train_grid(grid, tmp_path, seed=5, console=quiet)
    other = demo.train_grid(grid, tmp_path, seed=7, console=quiet)
    assert [record["settings"]["seed"] for record in results.dense.runs] == [5, 6]
    assert results.dense.runs[0]["result"] != other.dense.runs[0]["result"]


def test_output_without_terminal_is_plain(first):
    output = first[2]
    assert "\x1b" not in output
    assert "1/5  AdamW, L2 0.3" in output
    assert max(map(len, output.splitlines())) <= 80 + len(str(first[1]))


def test_output_is_ascii_where_the_encoding_needs_it(first):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    demo.print_tables(Console(file=narrow, width=80), first[0], pdecay.sparsity(_model()))
    narrow.flush()
    assert b"recommended" in narrow.buffer.getvalue()
