"""TOML files of grids."""

from __future__ import annotations

import os
import re
from pathlib import Path
from textwrap import dedent

import pytest

from pdecay.lab.sweep import Grid, SweepError, read_grids


def test_top_level_values_apply_to_all_grids(tmp_path):
    path = tmp_path / "cells.toml"
    path.write_text(
        "seed = [0, 1]\nlr = 1e-3\n"
        '[[grid]]\nmethod = "adamw"\n'
        '[[grid]]\nmethod = ["padam"]\nlr = [3e-3, 1e-2]\np = 0.8\n'
    )
    assert read_grids(path) == [
        {"seed": [0, 1], "lr": [1e-3], "method": ["adamw"]},
        {"seed": [0, 1], "lr": [3e-3, 1e-2], "method": ["padam"], "p": [0.8]},
    ]


def test_docstring_example_is_valid(tmp_path):
    path = tmp_path / "cells.toml"
    (example,) = re.findall(r"code-block:: toml\n(.*)Raises:", read_grids.__doc__, re.DOTALL)
    path.write_text(dedent(example))
    assert [grid["method"] for grid in read_grids(path)] == [["adamw"], ["padam"]]


@pytest.mark.parametrize(
    ("name", "task"), [("resnet18_cifar10", "cifar10"), ("nanogpt_shakespeare", "shakespeare")]
)
def test_sweeps_of_the_paper_are_valid(name, task):
    path = Path(__file__).parents[3] / "benchmarks" / "paper" / f"{name}.toml"
    plan = Grid(task=task, scale="paper", grids=read_grids(path))
    methods = {plan.settings(key, None).method for key in plan.keys}
    assert {"adamw", "padam", "mp", "target", "gmp"} <= methods


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method = 3 4", "is not TOML"),
        ("lr = " + 9999 * "[", "is not TOML"),
        ("", "has no grids"),
        ('grid = "adamw"', "has no grids"),
        ("grid = [1, 2]", "has no grids"),
        ("[grid]\nlr = 1", "has no grids"),
        ("[[grid]]\nlr = {a = 1}", "lr must be a number, a string or a list of them"),
        ("[[grid]]\nlr = [[1]]", "lr must be a number, a string or a list of them"),
    ],
)
def test_invalid_file_is_reported_with_its_path(tmp_path, text, message):
    path = tmp_path / "cells.toml"
    path.write_text(text)
    with pytest.raises(SweepError, match=message) as caught:
        read_grids(path)
    assert str(path) in str(caught.value)


def test_missing_or_binary_file_is_reported(tmp_path):
    with pytest.raises(SweepError, match="cannot be read: No such file"):
        read_grids(tmp_path / "none.toml")
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SweepError, match="is not TOML"):
        read_grids(path)


def test_named_pipe_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SweepError, match="is not a regular file"):
        read_grids(tmp_path / "pipe")
