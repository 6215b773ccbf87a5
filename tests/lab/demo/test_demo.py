"""``demo --quick`` from end to end: the files, the numbers in them, and that a seed fixes both."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from pdecay.lab.demo import console as say
from pdecay.lab.demo import demo
from pdecay.lab.demo.story import Plan

FILES = {"accuracy_vs_sparsity.png", "toy.png", "demo.json"}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("first"))


def _run(out):
    shown = io.StringIO()
    told = demo.run(out, quick=True, console=Console(file=shown, width=80))
    return told, out, shown.getvalue()


def test_the_files_are_there_and_named(first):
    _, out, shown = first
    assert {path.name for path in out.iterdir()} == FILES
    assert all(str(out / name) in shown for name in FILES)


@pytest.mark.parametrize("name", ["accuracy_vs_sparsity.png", "toy.png"])
def test_the_figures_are_images_of_a_readmes_size(first, name):
    path = first[1] / name
    image = imread(path)
    height, width, _ = image.shape
    assert 1000 <= width <= 1400
    assert 400 <= height <= 900
    assert path.stat().st_size < 150_000
    assert 0.02 < np.mean(image[..., :3].min(axis=2) < 0.9) < 0.3  # drawn on, and mostly white


def test_the_numbers_are_those_of_the_runs_and_of_the_table(first):
    told, out, shown = first
    data = json.loads((out / "demo.json").read_text())
    assert data["headline"] == told.headline()
    assert told.headline() in " ".join(shown.split())
    assert len(data["settings"]) == len(demo.QUICK.settings)
    for written, summary in zip(data["settings"], told.summaries, strict=True):
        assert written["accuracy"] == summary.accuracy
        assert written["sparsity"] == summary.sparsity
        (row,) = [
            line
            for line in shown.splitlines()
            if line.strip(" ").startswith((summary.setting.decay_name + "  ", "AdamW, weight"))
            and f"{100 * summary.accuracy:.2f}" in line
            and f"{100 * summary.sparsity:.2f}" in line
        ]
        assert "\u2026" not in row  # nothing was cut off
    recommended = data["recommended"]
    layers = [a for a in recommended["report_of_first_seed"]["layers"] if a["decayed"]]
    zeros = sum(layer["zeros"] for layer in layers) / sum(layer["size"] for layer in layers)
    assert recommended["runs"][0]["sparsity"] == pytest.approx(zeros)
    assert recommended["accuracy_lost"] == pytest.approx(
        data["dense"]["accuracy"] - recommended["accuracy"]
    )


def test_sparse_training_works(first):
    """Far from the numbers of the full demo, and far from nothing."""
    told = first[0]
    assert told.dense.sparsity == 0
    assert told.dense.accuracy > 0.95
    assert told.pick.sparsity > 0.5
    assert told.lost(told.pick) < 0.02


def test_equal_seeds_give_equal_files(first, tmp_path):
    _, again, _ = _run(tmp_path)
    for name in FILES:
        assert (again / name).read_bytes() == (first[1] / name).read_bytes()


def test_seeds_follow_the_first_and_give_other_numbers():
    plan = Plan(demo.QUICK.settings[:2], seeds=2, epochs=1)
    told, other = demo.tell(plan, seed=5), demo.tell(plan, seed=7)
    assert told.to_dict()["task"]["seeds"] == [5, 6]
    assert told.dense.to_dict() != other.dense.to_dict()


def test_plain_output_where_there_is_no_terminal(first):
    shown = first[2]
    assert "\x1b" not in shown
    assert "1/5  AdamW, weight_decay=0.3" in shown  # progress, a line at a time
    assert max(map(len, shown.splitlines())) <= 80 + len(str(first[1]))


def test_a_bar_on_a_terminal():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with say.progress(console, demo.QUICK) as announce:
        for setting in demo.QUICK.settings:
            announce(setting)
    shown = console.file.getvalue()
    assert "\x1b" in shown
    assert "5/5" in shown
    assert demo.QUICK.settings[-1].name in shown


def test_no_encoding_can_fail(first):
    """Boxes are rich's, which knows what a terminal can show; our own words are ASCII."""
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    say.story(Console(file=narrow, width=80), first[0])
    narrow.flush()
    assert b"recommended" in narrow.buffer.getvalue()
