"""Training in a folder: records, resuming after a stop, and errors."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from pdecay.lab.methods import METHODS, Run
from pdecay.lab.models import MLP
from pdecay.lab.train import checkpoint, records, training
from pdecay.lab.train.loop import lr_factor
from pdecay.lab.train.training import RunError, Settings, StoppedError, train

STEPS = 40
# Options with which every method has zeros after 40 steps.
OPTIONS = {
    "padam": {"lam": 0.3},
    "elastic": {"lam": 0.3, "l2": 0.1},
    "mp": {"threshold": 0.05},
    "dwf": {"depth": 4, "lam": 1e-2, "lr": 0.05},
    "l1": {"lam": 0.3},
    **{name: {"lam": 0.3} for name in ("pschedule", "prox", "freeze")},
    "every": {"lam": 3.0, "n": 2},
    "slow": {"lam": 10.0, "rate": 0.9},
}


def settings_of(method, **more) -> Settings:
    options = {"lr": 0.01, **OPTIONS.get(method, {}), **more}
    return Settings.of("digits", method, scale="quick", steps=STEPS, **options)


def in_pieces(settings, folder, every, **options):
    """Train with a stop every few steps; return the record and the number of stops."""
    pieces = 0
    while True:
        counter = itertools.count(1)
        try:
            record = train(settings, folder, stop=lambda c=counter: next(c) == every, **options)
        except StoppedError:
            pieces += 1
        else:
            return record, pieces


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_resumed_run_is_bit_identical(tmp_path, same, method):
    settings = settings_of(method)
    whole = train(settings, tmp_path / "whole")
    assert (whole["result"]["sparsity"] > 0.1) == (method != "adamw")
    pieces, count = in_pieces(settings, tmp_path / "pieces", every=7)
    assert count == 5
    assert records.essence(pieces) == records.essence(whole)
    assert pieces["timing"]["resumed"] == 5
    weights = [
        torch.load(tmp_path / name / training.WEIGHTS, weights_only=True)
        for name in ("whole", "pieces")
    ]
    assert same(*weights)
    assert sorted(os.listdir(tmp_path / "pieces")) == [".lock", "record.jsonl", "weights.pt"]


def test_resume_with_batch_norm_and_dropout(tmp_path, monkeypatch, digits):
    def build():
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, 10)
        )

    monkeypatch.setattr(training, "cached_task", lambda *_: replace(digits, build=build))
    settings = settings_of("target")
    whole = train(settings, tmp_path / "whole")
    pieces, _ = in_pieces(settings, tmp_path / "pieces", every=9)
    assert records.essence(pieces) == records.essence(whole)


def test_record_content(tmp_path):
    settings = settings_of("padam", seed=3)
    generator = torch.get_rng_state()
    record = train(settings, tmp_path, threads=1)
    assert torch.equal(torch.get_rng_state(), generator)
    assert records.read(tmp_path) == [record]
    assert record["settings"] == settings.to_dict()
    assert record["id"] == settings.id
    assert record["status"] == "ok"
    result, curve = record["result"], record["curve"]
    assert [layer["shape"] for layer in result["layers"]] == [[300, 64], [100, 300], [10, 100]]
    assert result["weights"] == sum(layer["size"] for layer in result["layers"]) == 50_200
    zeros = sum(layer["zeros"] for layer in result["layers"])
    assert result["sparsity"] == zeros / 50_200 == curve[-1]["sparsity"]
    assert result["total_sparsity"] < result["sparsity"]
    assert 10 < result["test_accuracy"] < 100
    assert result["tradeoff"] == result["accuracy"] + result["sparsity"]
    assert [point["step"] for point in curve] == list(range(0, 41, 2))
    assert curve[0]["train_loss"] is None
    assert curve[0]["accuracy"] < 40 < curve[-1]["accuracy"]
    warmup = 2  # 30 of 600, as the task has it
    for point in curve[:-1]:
        assert point["lr"] == pytest.approx(0.01 * lr_factor(point["step"], STEPS, warmup))
    assert record["environment"]["threads"] == 1
    assert record["environment"]["device"] == "cpu"
    assert record["environment"]["kernel"] in ("native", "torch")
    assert "before" not in record["environment"]
    assert record["environment"]["torch"] == torch.__version__
    assert record["timing"]["resumed"] == 0
    assert record["timing"]["started"] <= record["timing"]["finished"]
    saved = torch.load(tmp_path / training.WEIGHTS, weights_only=True)
    model = MLP(64, (300, 100), 10)
    model.load_state_dict(saved)
    assert sum(int((p == 0).sum()) for p in model.parameters() if p.ndim == 2) == zeros


def test_result_depends_on_seed_only(tmp_path):
    torch.manual_seed(1)
    one = train(settings_of("dwf"), tmp_path / "one")
    torch.manual_seed(2)
    again = train(settings_of("dwf"), tmp_path / "again")
    other = train(settings_of("dwf", seed=1), tmp_path / "other")
    assert records.essence(one) == records.essence(again)
    assert one["result"] != other["result"]


def test_finished_run_returns_its_record(tmp_path, monkeypatch):
    record = train(settings_of("adamw"), tmp_path)
    (tmp_path / training.CHECKPOINT).write_bytes(b"left by a process killed before deleting it")
    monkeypatch.setattr(training, "Trainer", lambda *_, **__: pytest.fail("trained again"))
    assert train(settings_of("adamw"), tmp_path) == record
    assert not (tmp_path / training.CHECKPOINT).exists()


def test_progress_callbacks(tmp_path):
    calls = []

    class Listener:
        def begin(self, settings, step):
            calls.append(("begin", step))

        def step(self, step, loss):
            calls.append(("step", step))
            assert 0 < loss < 10

        def point(self, point):
            calls.append(("point", point["step"]))

    def stop():
        return calls[-1] == ("step", 5)

    settings = settings_of("adamw")
    with pytest.raises(StoppedError, match="stopped at step 5 of 40"):
        train(settings, tmp_path, progress=Listener(), stop=stop)
    assert calls[:4] == [("begin", 0), ("point", 0), ("step", 1), ("step", 2)]
    calls.clear()
    train(settings, tmp_path, progress=Listener())
    assert calls[:2] == [("begin", 5), ("step", 6)]
    assert calls[-2:] == [("step", 40), ("point", 40)]


def test_stop_at_last_step_finishes_the_run(tmp_path):
    counter = itertools.count(1)
    record = train(settings_of("adamw"), tmp_path, stop=lambda: next(counter) == STEPS)
    assert record["curve"][-1]["step"] == STEPS


def test_run_of_one_step(tmp_path):
    record = train(replace(settings_of("target"), steps=1), tmp_path)
    assert [point["step"] for point in record["curve"]] == [0, 1]


@pytest.mark.parametrize("in_pieces_of", [None, 3])
def test_diverged_run_has_a_record(tmp_path, monkeypatch, digits, in_pieces_of):
    class Spoiled(type(digits)):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            total = sum(param.abs().sum().item() for param in model.parameters())
            seen.append(total)
            return loss * torch.inf if len(seen) % 12 == 11 else loss

    seen = []
    spoiled = Spoiled(**{name: getattr(digits, name) for name in digits.__dataclass_fields__})
    monkeypatch.setattr(training, "cached_task", lambda *_: spoiled)
    settings = settings_of("padam")
    if in_pieces_of:
        record, _ = in_pieces(settings, tmp_path, in_pieces_of)
    else:
        record = train(settings, tmp_path)
    assert record["status"] == "diverged"
    assert [point["step"] for point in record["curve"]] == [0, 2, 4, 6, 8, 10]
    assert record["curve"][-1]["accuracy"] > 10  # the next step diverged
    result = record["result"]
    for name in ("accuracy", "test_accuracy", "loss", "tradeoff"):
        assert result[name] is None
    assert result["weights"] == 50_200
    assert records.read(tmp_path) == [record]


def test_extreme_learning_rate_diverges(tmp_path):
    record = train(replace(settings_of("adamw"), lr=1e30), tmp_path)
    assert record["status"] == "diverged"
    assert json.loads((tmp_path / training.RECORD).read_text()) == record


def test_non_finite_evaluation_is_divergence(tmp_path, monkeypatch, digits):
    class Blind(type(digits)):
        def evaluate(self, model, split="validation", *, batches=None):
            return {"accuracy": 10.0, "loss": float("nan")}

    blind = Blind(**{name: getattr(digits, name) for name in digits.__dataclass_fields__})
    monkeypatch.setattr(training, "cached_task", lambda *_: blind)
    record = train(settings_of("adamw"), tmp_path)
    assert record["status"] == "diverged"
    assert [point["step"] for point in record["curve"]] == [0]  # training ends there


def stopped_at(settings, folder, step, **options):
    counter = itertools.count(1)
    with pytest.raises(StoppedError):
        train(settings, folder, stop=lambda: next(counter) == step, **options)


@pytest.mark.parametrize("finished", [False, True])
def test_folder_with_other_settings_is_refused(tmp_path, finished):
    settings = settings_of("padam")
    if finished:
        train(settings, tmp_path)
    else:
        stopped_at(settings, tmp_path, 5)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = Settings.of("digits", "padam", scale="quick", steps=STEPS, lr=0.02, lam=0.1)
    with pytest.raises(
        RunError,
        match=r"has a run with other settings \(lr is 0.01 there and 0.02 here; lam is 0.3 there "
        r"and 0.1 here\): choose another folder, or delete",
    ):
        train(other, tmp_path)
    with pytest.raises(RunError, match="method is 'padam' there and 'gmp' here"):
        train(settings_of("gmp"), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_resume_keeps_threads_and_device(tmp_path):
    settings = settings_of("padam")
    stopped_at(settings, tmp_path, 5, threads=2)
    assert torch.get_num_threads() == 1
    with pytest.raises(RunError, match=r"resume with threads=2, not 1, .* or choose"):
        train(settings, tmp_path, threads=1)
    with pytest.raises(RunError, match=r"started with device='cpu'.* not 'meta'"):
        train(settings, tmp_path, device="meta")
    record = train(settings, tmp_path)
    assert record["environment"]["threads"] == 2
    assert torch.get_num_threads() == 1


def test_resume_requires_same_kernel(tmp_path, monkeypatch):
    settings = settings_of("padam")
    stopped_at(settings, tmp_path, 5)
    with monkeypatch.context() as patch:
        patch.setattr(training, "_kernel", lambda optimizer: "abacus")
        with pytest.raises(RunError, match=r"used the kernel .* but only 'abacus' is available"):
            train(settings, tmp_path)
    assert train(settings, tmp_path)["timing"]["resumed"] == 1


def test_resume_on_another_machine_is_recorded(tmp_path, monkeypatch):
    settings = settings_of("padam")
    stopped_at(settings, tmp_path, 5)
    here = training.machine.describe()
    monkeypatch.setattr(training.machine, "describe", lambda: {**here, "processor": "Z80"})
    environment = train(settings, tmp_path)["environment"]
    assert environment["processor"] == "Z80"
    assert [one["processor"] for one in environment["before"]] == [here["processor"]]


def test_all_machines_of_a_run_are_recorded(tmp_path, monkeypatch):
    settings = settings_of("padam")
    home = training.machine.describe()
    for processor in (home["processor"], "Z80"):
        monkeypatch.setattr(
            training.machine, "describe", lambda p=processor: {**home, "processor": p}
        )
        stopped_at(settings, tmp_path, 5)
    monkeypatch.setattr(training.machine, "describe", lambda: home)
    environment = train(settings, tmp_path)["environment"]
    assert environment["processor"] == home["processor"]
    assert [one["processor"] for one in environment["before"]] == [home["processor"], "Z80"]


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({"threads": 0}, "threads must be a whole number >= 1, got 0"),
        ({"threads": 1.5}, "threads must be a whole number >= 1, got 1.5"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        ({"device": "abacus"}, "device 'abacus' cannot be used here"),
    ],
)
def test_invalid_arguments_fail_before_writing(tmp_path, options, calls):
    with pytest.raises((TypeError, ValueError), match=calls):
        train(settings_of("padam"), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


class Malicious:
    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("content", ["cut", "text", "empty", "malicious", "no run", "a list"])
def test_damaged_checkpoint_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / training.CHECKPOINT
    settings = settings_of("padam")
    if content == "cut":
        stopped_at(settings, tmp_path, 5)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif content in ("text", "empty"):
        path.write_text("hello" if content == "text" else "")
    else:
        things = {"malicious": Malicious(), "no run": {"a": 1}, "a list": [1, 2]}
        torch.save(things[content], path)
    with pytest.raises(RunError, match=r"checkpoint.pt is not a checkpoint .* delete it to start"):
        train(settings, tmp_path)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "moment", [torch.zeros(1), torch.zeros(()), torch.zeros(1).expand(300, 64)]
)
def test_moments_of_another_size_are_refused(tmp_path, moment):
    """torch's fused AdamW would use memory outside of them."""
    path = tmp_path / training.CHECKPOINT
    stopped_at(settings_of("adamw"), tmp_path, 5)
    state = checkpoint.load(path)
    state["trainer"]["optimizer"]["state"][0]["exp_avg"] = moment
    checkpoint.save(path, state)
    with pytest.raises(ValueError, match=r"'exp_avg' of a parameter .* was altered"):
        train(settings_of("adamw"), tmp_path)


@pytest.mark.slow
def test_every_zeroed_block_of_a_checkpoint_is_detected(tmp_path):
    path = tmp_path / training.CHECKPOINT
    stopped_at(settings_of("padam"), tmp_path, 5)
    whole = path.read_bytes()
    size = 512
    for start in range(0, len(whole), size):
        zeroed = whole[:start] + bytes(size) + whole[start + size :]
        path.write_bytes(zeroed[: len(whole)])
        if path.read_bytes() == whole:  # the block was zero before
            continue
        with pytest.raises(checkpoint.DamagedError):
            checkpoint.load(path)
    path.write_bytes(whole[:-32])  # without its digest
    with pytest.raises(checkpoint.DamagedError):
        checkpoint.load(path)


HOLDER = """
import sys, time
from pathlib import Path
from pdecay._utils.files import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_folder_is_locked_against_other_processes(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(
            RunError, match=r"another process is using .*: wait for it to finish, or"
        ):
            train(settings_of("padam"), tmp_path)
        assert os.listdir(tmp_path) == [".lock"]
        holder.kill()
    train(replace(settings_of("padam"), steps=2), tmp_path)  # the lock ends with its process


@pytest.mark.parametrize("thing", [object(), lambda: 0, nn.Linear(1, 1), {"a": [Malicious()]}])
def test_unloadable_method_state_fails_before_training(tmp_path, thing, monkeypatch):
    class Bad(Run):
        def state_dict(self):
            return {"thing": thing}

    monkeypatch.chdir(tmp_path)
    adamw = METHODS["adamw"]
    monkeypatch.setattr(
        adamw, "start", lambda self, model, *_: Bad(torch.optim.SGD(model.parameters()))
    )
    with pytest.raises(TypeError, match=r"state_dict\(\) of AdamWMethod's run must hold numbers"):
        train(settings_of("adamw"), tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_method_state_that_becomes_unloadable_fails_at_the_first_checkpoint(tmp_path, monkeypatch):
    class Late(Run):
        losses = ()

        def after_step(self):
            self.losses = [*self.losses, np.float64(1)]

        def state_dict(self):
            return {"losses": [*self.losses]}

    monkeypatch.setattr(
        METHODS["adamw"], "start", lambda self, model, *_: Late(torch.optim.SGD(model.parameters()))
    )
    with pytest.raises(TypeError, match="could not be loaded, because it holds numpy"):
        train(settings_of("adamw"), tmp_path, checkpoint_every=0)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_settings_of_numpy_resume(tmp_path):
    settings = Settings.of(
        np.str_("digits"),
        np.str_("padam"),
        scale=np.str_("quick"),
        seed=np.int64(1),
        steps=np.int64(STEPS),
        metric=np.str_("adaptive"),
    )
    assert settings.id == settings_of("padam", seed=1, lr=0.003, lam=0.01, metric="adaptive").id
    record, pieces = in_pieces(settings, tmp_path, every=15)
    assert (record["id"], pieces) == (settings.id, 2)


def test_partial_files_are_removed(tmp_path):
    (tmp_path / ".checkpoint.pt.0123abcd.part").write_bytes(b"half")
    train(replace(settings_of("padam"), steps=2), tmp_path)
    assert not list(tmp_path.glob("*.part"))
    assert not list(tmp_path.glob(".*.part"))
