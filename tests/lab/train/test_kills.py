"""A run killed by SIGKILL at any time ends with the same record as an uninterrupted run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pdecay.lab.train import records

DRIVER = Path(__file__).with_name("kill_driver.py")


def drive(plan: list[dict]) -> list[int]:
    """Run a plan, check that all jobs succeed and return their numbers of kills."""
    done = subprocess.run(
        [sys.executable, str(DRIVER), json.dumps(plan)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    results = json.loads(done.stdout)
    assert [one["code"] for one in results] == [0] * len(plan)
    return [one["killed"] for one in results]


def files_of(out: Path) -> tuple[dict, bytes]:
    """Return a run's record and weights; check that its folder has no other files."""
    assert sorted(path.name for path in out.iterdir()) == [".lock", "record.jsonl", "weights.pt"]
    (record,) = records.read(out)
    return record, (out / "weights.pt").read_bytes()


def test_twenty_kills_at_random_times(tmp_path):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    kills = drive(
        [
            {"out": str(alone), "steps": 400},
            {"out": str(killed), "steps": 400, "random": [1, 20]},
        ]
    )
    assert kills == [0, 20]
    expected, weights = files_of(alone)
    record, found = files_of(killed)
    assert records.essence(record) == records.essence(expected)
    assert found == weights
    assert 14 <= record["timing"]["resumed"] <= 20  # otherwise the kills came before a checkpoint


# Three steps write three checkpoints, then the weights and the record: five files, each with two
# flushes (its content, then its folder) and a new name; then the checkpoint is deleted.
POINTS = [
    *(["fsync", call] for call in (1, -1, 2, 3, 7, 8, 9, 10)),
    *(["replace", call] for call in (1, -1, 3, -3, 4, -4, 5, -5)),
    ["unlink", 1],
    ["unlink", -1],
]


def test_kill_at_each_point_of_writing(tmp_path):
    plan = [{"out": str(tmp_path / "alone"), "steps": 3}]
    for function, call in POINTS:
        out = tmp_path / f"{function}{call}"
        plan.append({"out": str(out), "steps": 3, "point": [function, call]})
    assert drive(plan) == [0] + [1] * len(POINTS)
    expected, weights = files_of(tmp_path / "alone")
    for job in plan[1:]:
        record, found = files_of(Path(job["out"]))
        assert records.essence(record) == records.essence(expected), job
        assert found == weights, job
