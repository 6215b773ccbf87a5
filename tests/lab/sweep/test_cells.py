"""Files of grids."""

from __future__ import annotations

import pytest

from pdecay.lab.sweep import PlanError
from pdecay.lab.sweep import cells as module
from pdecay.lab.sweep.cells import read_cells


def test_what_stands_above_the_grids_holds_for_all(tmp_path):
    path = tmp_path / "cells.toml"
    path.write_text(
        "seed = [0, 1]\nlr = 1e-3\n"
        '[[grid]]\nmethod = "adamw"\n'
        '[[grid]]\nmethod = ["padam"]\nlr = [3e-3, 1e-2]\np = 0.8\n'
    )
    assert read_cells(path) == [
        {"seed": [0, 1], "lr": [1e-3], "method": ["adamw"]},
        {"seed": [0, 1], "lr": [3e-3, 1e-2], "method": ["padam"], "p": [0.8]},
    ]


def test_the_example_is_one(tmp_path):
    path = tmp_path / "cells.toml"
    path.write_text(module.__doc__.partition("\n\n")[2])
    assert [grid["method"] for grid in read_cells(path)] == [["adamw"], ["padam"]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("method = 3 4", "is not TOML"),
        ("", "has no grids"),
        ('grid = "adamw"', "has no grids"),
        ("grid = [1, 2]", "has no grids"),
        ("[grid]\nlr = 1", "has no grids"),
        ("[[grid]]\nlr = {a = 1}", "lr must be a number, a word or a list of them"),
        ("[[grid]]\nlr = [[1]]", "lr must be a number, a word or a list of them"),
    ],
)
def test_a_bad_file(tmp_path, text, told):
    path = tmp_path / "cells.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=told) as caught:
        read_cells(path)
    assert str(path) in str(caught.value)


def test_a_missing_or_binary_file(tmp_path):
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        read_cells(tmp_path / "none.toml")
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="is not TOML"):
        read_cells(path)
