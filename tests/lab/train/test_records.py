from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdecay._utils import files
from pdecay._utils.files import remove_unfinished, replacing
from pdecay.lab.train import records
from pdecay.lab.train.records import RecordError, run_id

SETTINGS = {
    "task": "digits",
    "scale": "quick",
    "method": "padam",
    "seed": 0,
    "lr": 0.003,
    "steps": 600,
    "options": {"p": 0.8, "lam": 0.02},
}


def record(**settings) -> dict:
    settings = {**SETTINGS, **settings}
    return {
        "schema": 1,
        "id": run_id(settings),
        "settings": settings,
        "result": {
            "accuracy": 97.5,
            "loss": 0.1,
            "sparsity": 0.75,
            "tradeoff": 98.25,
            "total_sparsity": 0.5,
            "weights": 8,
            "layers": [{"name": "w", "shape": [2, 4], "size": 8, "zeros": 6}],
        },
        "curve": [
            {
                "step": 0,
                "lr": 0.001,
                "train_loss": None,
                "accuracy": 10.0,
                "loss": 2.3,
                "sparsity": 0,
            }
        ],
        "status": "ok",
        "environment": {"torch": "2.13", "threads": 1},
        "timing": {"seconds": 1.5},
    }


def test_read_returns_written_records(tmp_path):
    wanted = [record(seed=seed) for seed in range(3)]
    path = tmp_path / "some.jsonl"
    records.write(path, wanted)
    assert records.read(path) == records.read(str(path)) == records.read([path]) == wanted
    assert len(path.read_text().splitlines()) == 3
    records.write(path, wanted[:1])
    assert records.read(path) == wanted[:1]
    assert os.listdir(tmp_path) == ["some.jsonl"]


def test_read_one_needs_exactly_one_record(tmp_path):
    path = tmp_path / "record.jsonl"
    records.write(path, [record()])
    assert records.read_one(path) == record()
    for wrong in ([], [record(), record(seed=1)]):
        records.write(path, wrong)
        with pytest.raises(records.RecordError, match=rf"has {len(wrong)} records, expected the"):
            records.read_one(path)


def test_read_folder_removes_duplicates(tmp_path):
    one, other = record(), record(seed=1)
    moved = {**one, "timing": {"seconds": 9.0}, "environment": {"torch": "3"}}
    better = copy.deepcopy(one)
    better["result"]["accuracy"] = 98.0
    (tmp_path / "runs" / "a").mkdir(parents=True)
    records.write(tmp_path / "records.jsonl", [one, other])
    records.write(tmp_path / "runs" / "a" / "record.jsonl", [moved])
    assert records.read(tmp_path) == [one, other]
    assert records.read([tmp_path, tmp_path / "records.jsonl"]) == [one, other]
    records.write(tmp_path / "runs" / "a" / "record.jsonl", [better])
    assert records.read(tmp_path) == [one, other, better]  # same settings, another result


def test_id_depends_on_settings_only():
    assert run_id(SETTINGS) == run_id(dict(reversed(SETTINGS.items())))
    assert run_id(SETTINGS) == "daee2b2ac184b35a"  # must never change
    assert len({run_id({**SETTINGS, "seed": seed}) for seed in range(50)}) == 50


def test_tradeoff_is_accuracy_plus_sparsity():
    assert records.tradeoff(94.25, 0.75) == 95.0


plain = st.none() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None)  # for busy machines
@given(seed=st.integers(0, 2**40), lr=st.floats(0, 1), options=st.dictionaries(st.text(), plain))
def test_numbers_round_trip_exactly(tmp_path_factory, seed, lr, options):
    path = tmp_path_factory.mktemp("records") / "one.jsonl"
    wanted = record(seed=seed, lr=lr, options=options)
    records.write(path, [wanted])
    (found,) = records.read(path)
    assert json.dumps(found) == json.dumps(wanted)


def changed(*path, to) -> dict:
    one = record()
    inner = one
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    if path[0] == "settings" and isinstance(one["settings"], dict):
        one["id"] = run_id(one["settings"])
    return one


def without(*path) -> dict:
    one = record()
    inner = one
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return one


def test_test_accuracy_is_optional(tmp_path):
    old, new = record(), record(seed=1)
    new["result"]["test_accuracy"] = 96.5
    records.write(tmp_path / "some.jsonl", [old, new])
    assert records.read(tmp_path) == [old, new]


BAD = [
    (changed("timing", "seconds", to="long"), "'seconds' must be int or float or null"),
    (changed("result", "test_accuracy", to="high"), "'test_accuracy' must be int or float or null"),
    ([1, 2], "not a pdecay record"),
    ({"step": 1}, "not a pdecay record"),
    (changed("schema", to=2), "written by a newer pdecay.*upgrade"),
    (changed("schema", to="1"), "schema must be a whole number >= 1, got '1'"),
    (changed("schema", to=0), "schema must be"),
    (without("result"), "record lacks 'result'"),
    (without("settings", "lr"), "settings lacks 'lr'"),
    (changed("settings", to=3), "'settings' must be dict, got 3"),
    (changed("settings", "seed", to=1.5), "'seed' must be int, got 1.5"),
    (changed("settings", "steps", to=True), "'steps' must be int, got True"),
    (changed("result", "accuracy", to="high"), "'accuracy' must be int or float or null"),
    (changed("result", "accuracy", to=1e308), r"'accuracy' must be between 0 and 100, got 1e\+308"),
    (changed("result", "sparsity", to=-0.1), "'sparsity' must be between 0 and 1, got -0.1"),
    (changed("result", "layers", 0, "zeros", to=None), r"result.layers\[0\]'s 'zeros' must be int"),
    (changed("result", "layers", 0, "zeros", to=9), r"result.layers\[0\] has 9 zeros in 8 weights"),
    (changed("result", "layers", 0, "size", to=-1), "'size' must be between 0 and"),
    (changed("curve", 0, "loss", to=1e308), r"curve\[0\]'s 'loss' must be between -1e\+100 and"),
    (changed("curve", 0, "accuracy", to=101), "'accuracy' must be between 0 and 100, got 101"),
    (changed("settings", "steps", to=10**200), "'steps' must be between 0 and"),
    (changed("curve", 0, to=7), r"curve\[0\] must be an object, got 7"),
    (changed("status", to="fine"), "status must be one of ok, diverged, got 'fine'"),
    (changed("id", to="0" * 16), "id '0000000000000000' does not match its settings"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_invalid_record_is_reported_with_file_and_line(tmp_path, bad, message):
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps(record()) + "\n\n" + json.dumps(bad) + "\n")
    with pytest.raises(RecordError, match=rf"some.jsonl, line 3: .*{message}"):
        records.read(tmp_path)
    with pytest.raises(RecordError, match=message):
        records.write(tmp_path / "new.jsonl", [bad])
    assert not (tmp_path / "new.jsonl").exists()


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": 1, "id": "ab',
        '{"schema": NaN}',
        '{"schema": 1e999}',
        '{"schema": 1' + 400 * "0" + "}",
        "<html>",
        "[" * 100_000,
        '{"a":' * 500 + "1" + "}" * 500,
        '{"name": "\\ud800"}',
    ],
    ids=["cut", "NaN", "infinite", "too large", "HTML", "deep", "deep but valid", "surrogate"],
)
def test_truncated_line_is_reported(tmp_path, text):
    (tmp_path / "some.jsonl").write_text(text)
    with pytest.raises(RecordError, match=r"some.jsonl, line 1 is not JSON .*repeat the run"):
        records.read(tmp_path)


def test_non_finite_number_is_not_written(tmp_path):
    path = tmp_path / "some.jsonl"
    records.write(path, [record()])
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.write(path, [changed("result", "loss", to=float("nan"))])
    assert records.read(path) == [record()]


def test_unreadable_paths_are_reported(tmp_path):
    with pytest.raises(RecordError, match="does not exist: give a file of records"):
        records.read(tmp_path / "nothing")
    with pytest.raises(RecordError, match=r"has no records \(\*.jsonl\) in it"):
        records.read(tmp_path)
    (tmp_path / "some.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="is not text"):
        records.read(tmp_path)
    (tmp_path / "some.jsonl").unlink()
    (tmp_path / "some.jsonl").mkdir()
    with pytest.raises(RecordError, match="cannot be read"):
        records.read(tmp_path)


WRITER = """
import runpy, sys
from pathlib import Path
replacing = runpy.run_path(sys.argv[2])["replacing"]  # without torch, which takes a while
path = Path(sys.argv[1])
for size in range(10**9):
    with replacing(path) as file:
        for _ in range(50):
            file.write(bytes([size % 251]) * 20_000)
    print(flush=True)
"""


@pytest.mark.slow
def test_file_is_complete_when_its_writer_is_killed(tmp_path):
    path = tmp_path / "file"
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), files.__file__],
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        with writer:
            for _ in range(3):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
        content = path.read_bytes()
        assert len(content) == 1_000_000
        assert len(set(content)) == 1


def test_error_while_writing_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write():
        with replacing(path) as file:
            file.write(b"new")
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    (tmp_path / ".file.0123abcd.part").write_text("left by a killed process")
    (tmp_path / ".film.part").write_text("left by another program")
    remove_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".film.part", "file"]


def test_special_files_are_refused_without_reading(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to("/dev/zero")
    for path in ("pipe.jsonl", "link.jsonl", ""):
        with pytest.raises(RecordError, match="cannot be read: it is not a regular file"):
            records.read(tmp_path / path)
