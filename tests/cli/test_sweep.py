"""``pdecay sweep``: its plans, and one-line errors before any run starts."""

from __future__ import annotations

import pytest

from pdecay import cli
from pdecay.cli import sweep as command
from pdecay.lab.sweep import Range


def plan_of(*argv):
    return command._plan(cli._parser().parse_args(["sweep", *argv]))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["digit"], "there is no task 'digit'"),
        (["digits", "--scale", "big"], "digits has no scale 'big'"),
        (["digits", "--method", "pdam"], "there is no method 'pdam'"),
        (["digits", "--method", "adamw", "--p", "1"], "no chosen method has an option 'p'"),
        (["digits", "--lam", "x"], "must be a number or LOW:HIGH, got 'x'"),
        (["digits", "--lam", "1:2:3"], "must be a number or LOW:HIGH, got '1:2:3'"),
        (["digits", "--seed", "0.5"], "must be a whole number or LOW:HIGH, got '0.5'"),
        (["digits", "--lam", "1:2"], "--lam has a range, which needs --sampler"),
        (["digits", "--lam", "2:1", "--sampler", "tpe"], "LOW < HIGH, got 2:1"),
        (["digits", "--sampler", "tpe"], "--sampler needs --trials"),
        (["digits", "--trials", "3"], "--trials needs --sampler"),
        (["digits", "--sampler", "grid", "--trials", "3"], "there is no sampler 'grid'"),
        (["digits", "--trials", "0"], "must be a whole number >= 1, got '0'"),
        (["digits", "--objective", "best"], "there is no objective 'best'"),
        (["digits", "--workers", "0"], "must be a whole number >= 1, got '0'"),
        (["digits", "--grace", "-1"], "must be a number of seconds >= 0, got '-1'"),
        (["digits", "--option", "p"], "--option must be NAME=VALUE, got 'p'"),
        (["digits", "--cells", "none.toml"], "none.toml cannot be read"),
        (["digits", "--cells", "none.toml", "--lr", "1"], "--cells cannot be combined with --lr"),
        (
            ["digits", "--cells", "x", "--sampler", "tpe"],
            "--cells cannot be combined with --sampler",
        ),
        (["digits", "--retry-failed"], "--retry-failed needs --resume"),
        (["digits", "--storage", "here.db"], "must be a database URL"),
    ],
)
def test_invalid_arguments_are_reported(run_cli, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    assert message in run_cli("sweep", *argv, code=2)
    assert not list(tmp_path.glob("runs/*/*"))


def test_unwritable_folder_is_reported(run_cli, tmp_path):
    (tmp_path / "file").write_text("")
    message = run_cli("sweep", "digits", "--out", str(tmp_path / "file" / "below"), code=2)
    assert "cannot write to" in message


def test_arguments_make_a_plan():
    plan = plan_of("digits", "--method", "padam", "l1", "--lam", "0.1", "1", "--seed", "0", "1")
    assert len(plan.cells) == 8
    plan = plan_of("digits", "--option", "p=0.5", "--option", "p=0.8")
    assert [cell.options["p"] for cell in plan.cells.values()] == [0.5, 0.8]
    search = ("--sampler", "nsga2", "--trials", "5", "--sampler-seed", "3")
    plan = plan_of(
        "digits",
        "--lam",
        "1e-4:1e-1",
        "--weight-decay",
        "0.1",
        "--method",
        "adamw",
        "padam",
        *search,
    )
    assert plan.axes["lam"] == [Range(1e-4, 1e-1)]
    assert plan.axes["weight_decay"] == [0.1]
    assert (plan.sampler, plan.trials, plan.sampler_seed) == ("nsga2", 5, 3)
