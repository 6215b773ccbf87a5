"""``pdecay train``: output, Ctrl-C, one-line errors and the documented custom method."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pdecay import cli
from pdecay.cli.train import METHODS as METHOD_NAMES
from pdecay.cli.train import OPTIONS
from pdecay.lab.methods import METHODS, options_of
from pdecay.lab.tasks import Task, cached_task
from pdecay.lab.train import command, records, training
from pdecay.lab.train.training import Settings

DOCS = Path(__file__).parents[2] / "docs" / "experiments.md"
QUICK = ("digits", "--scale", "quick", "--steps", "40")


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_options_match_the_methods():
    methods = {name: options_of(method) for name, method in METHODS.items()}
    assert set(OPTIONS) == {option for options in methods.values() for option in options}
    assert set(re.findall(r"[\w-]+(?=,| or)", METHOD_NAMES)) == set(methods)


def test_output_and_files(run_cli, project):
    shown = run_cli("train", *QUICK, "--lam", "0.3", "--lr", "1e-2", "--seed", "2")
    settings = Settings.of("digits", "padam", scale="quick", steps=40, lam=0.3, lr=0.01, seed=2)
    folder = project / "runs" / f"digits-padam-{settings.id}"
    (record,) = records.read(folder)
    assert record["settings"] == settings.to_dict()
    lines = shown.splitlines()
    assert lines[0] == ("digits (quick) with padam(p=0.8, lam=0.3): lr 0.01, 40 steps, seed 2")
    assert sum(line.startswith("step ") for line in lines) == 21
    assert "layers.3.weight" in shown
    assert "50,200" in shown
    result = record["result"]
    assert f"validation accuracy {result['accuracy']:.2f} %" in shown
    assert f"sparsity) {result['tradeoff']:.2f}" in shown
    assert f"record     runs/{folder.name}/record.jsonl" in shown
    assert (folder / "weights.pt").exists()
    again = run_cli("train", *QUICK, "--lam", "0.3", "--lr", "1e-2", "--seed", "2")
    assert "already finished" in again
    assert not any(line.startswith("step ") for line in again.splitlines())


def test_terminal_shows_a_progress_bar(project):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    settings = Settings.of("digits", "gmp", scale="quick", steps=40)
    assert command.train_and_show(settings, project / "out", console) == 0
    shown = out.getvalue()
    assert "40/40" in shown
    assert "accuracy" in shown
    assert "zeros 90.00%" in shown
    assert "\nstep " not in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_writes_checkpoint_and_same_command_resumes(
    run_cli, project, monkeypatch, number
):
    command = [*QUICK, "--method", "mp", "--out", "out"]
    whole = run_cli("train", *command[:-1], "whole")
    reseed = Task.reseed

    def interrupt(task, seed, step):
        if step == 7:
            os.kill(os.getpid(), number)
        reseed(task, seed, step)

    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(Task, "reseed", interrupt)
        shown = run_cli("train", *command, code=130)
    assert signal.getsignal(number) is handler
    assert "stopping after this step" in shown
    assert "stopped at step 8 of 40; to continue, run the same command again." in shown
    assert "checkpoint out/checkpoint.pt" in shown
    shown = run_cli("train", *command)
    assert "resuming at step 8" in shown
    assert "resumed 1 time" in shown
    one, other = (records.essence(records.read(name)[0]) for name in ("out", "whole"))
    assert one == other
    assert whole.count("\n") > 20


def test_second_ctrl_c_stops_at_once(capsys, monkeypatch):
    def stuck(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Task, "reseed", stuck)
    assert cli.main(["train", *QUICK, "--out", "out"]) == 130
    assert capsys.readouterr().err == "pdecay train: error: interrupted\n"
    assert not Path("out/checkpoint.pt").exists()


def test_divergence_is_reported(run_cli):
    shown = run_cli("train", *QUICK, "--method", "adamw", "--lr", "1e30")
    assert "Diverged: the loss is not finite after" in shown


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["mnist"], "there is no task 'mnist'; choose from digits, fashion, cifar10, shakespeare"),
        (["digits", "--scale", "paper"], "digits has no scale 'paper'; choose from quick, cpu"),
        (["digits", "--method", "sgd"], "there is no method 'sgd'; choose from adamw, padam,"),
        (["digits", "--method", "gmp", "--p", "1"], "gmp has no option 'p'; it has target, weight"),
        (["digits", "--p", "x"], "argument --p: invalid float value: 'x'"),
        (["digits", "--p", "-1"], "padam: p must be finite and >= 0, got -1.0"),
        (["digits", "--lam", "nan"], "option lam must be finite, got nan"),
        (["digits", "--seed", "-1"], "must be a whole number >= 0, got '-1'"),
        (["digits", "--steps", "0"], "steps must be a whole number >= 1, got 0"),
        (["digits", "--lr", "0"], "lr must be above 0, got 0"),
        (["digits", "--threads", str(10**11)], "must be a whole number < 2147483648, got '1000"),
        (["digits", "--threads", "0"], "argument --threads: must be a whole number >= 1, got '0'"),
        (
            ["digits", "--checkpoint-every", "-1"],
            "--checkpoint-every: must be a number of seconds >= 0, got '-1'",
        ),
        (
            ["digits", "--checkpoint-every", "nan"],
            "--checkpoint-every: must be a number of seconds >= 0, got 'nan'",
        ),
        (["digits", "--device", "abacus"], "device 'abacus' cannot be used here"),
        (["digits", "--option", "p"], "--option must be NAME=VALUE, got 'p'"),
        (["digits", "--option", "q=1"], "padam has no option 'q'; it has p, lam"),
        (["digits", "--option", "seed=1"], "use --seed 1"),
        (["digits", "--method", "missing:It"], "cannot import 'missing': ModuleNotFoundError"),
        (["digits", "--method", "broken:It"], "cannot import 'broken': SyntaxError"),
        (["digits", "--out", "file"], "cannot write to 'file'"),
        ([], "the following arguments are required: TASK"),
    ],
)
def test_invalid_arguments_are_reported(run_cli, project, argv, message):
    (project / "broken.py").write_text("def (")
    (project / "file").write_text("")
    assert message in run_cli("train", *argv, code=2)
    assert not (project / "runs").exists() or not any((project / "runs").rglob("*.*"))


def test_folder_of_another_run_is_refused(run_cli):
    run_cli("train", *QUICK, "--out", "out")
    message = run_cli("train", *QUICK, "--lam", "0.7", "--out", "out", code=2)
    assert "out has a run with other settings (lam is 0.01 there and 0.7 here): choose" in message


def test_missing_data_is_reported(run_cli, project, monkeypatch):
    from pdecay.lab.data import sources

    monkeypatch.setenv("PDECAY_DATA", str(project / "nowhere"))
    assert "which is not a folder" in run_cli("train", "shakespeare", "--scale", "quick", code=2)
    monkeypatch.setattr(sources, "folders", lambda: [project / "empty"])

    def refuse(remote, folder):
        raise sources.DataError("no network")

    monkeypatch.setattr(sources, "fetch", refuse)
    monkeypatch.setenv("PDECAY_DATA", str(project))
    cached_task.cache_clear()
    assert "Put tinyshakespeare.txt" in run_cli("train", "shakespeare", "--scale", "quick", code=2)


@pytest.mark.slow
def test_documented_method_trains_prunes_and_resumes(run_cli, project):
    text = DOCS.read_text()
    (code,) = re.findall(r"```python\n(from dataclasses.*?)```", text, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    (project / "taylor.py").write_text(code)
    (command,) = re.findall(r"^pdecay train (.*taylor.*)$", text, re.MULTILINE)
    try:
        shown = run_cli("train", *command.split(), "--steps", "150", "--lr", "0.01")
        (record,) = records.read("runs")
        assert record["settings"]["options"] == {"target": 0.8}
        assert record["result"]["accuracy"] > 85
        assert record["result"]["sparsity"] == pytest.approx(0.8, abs=0.001)
        assert "with taylor:TaylorPruning(target=0.8)" in shown
        settings = Settings(**record["settings"])
        with pytest.raises(training.StoppedError):
            training.train(settings, Path("again"), stop=lambda: True)
        again = training.train(settings, Path("again"))
        assert records.essence(again) == records.essence(record)
    finally:
        sys.modules.pop("taylor", None)


def test_documented_commands_and_methods_exist():
    text = DOCS.read_text()
    for line in re.findall(r"^pdecay (train .*)$", text, re.MULTILINE):
        cli._parser().parse_args(line.split())
    rows = dict(
        re.findall(
            r"^\| `([a-z][\w-]*)` \|.*\| ([^|]*) \|$", text.split("## Methods")[1], re.MULTILINE
        )
    )
    assert {name: re.findall(r"`(\w+)`", options) for name, options in rows.items()} == {
        name: options_of(method) for name, method in METHODS.items()
    }
