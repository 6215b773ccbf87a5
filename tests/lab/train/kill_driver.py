"""Runs ``pdecay train`` in processes of its own and kills them, as a plan (JSON) says.

A process that has torch loaded already makes a new one in milliseconds, by fork; what is forked
runs the command line from its beginning, in a real process that gets a real SIGKILL. Each job of
the plan ends with a run that is left alone; printed is how often each was killed.

    [{"out": DIR, "steps": N, "random": [SEED, KILLS]}, {..., "point": [FUNCTION, CALL]}, ...]
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # by the optimizer, at its first step

from pdecay import cli
from pdecay.lab import tasks  # noqa: F401, loaded before the fork
from pdecay.lab.train.training import CHECKPOINT, _job

torch.set_num_threads(1)


def start(job: dict[str, Any], before=None) -> int:
    argv = [
        *("train", "digits", "--scale", "quick", "--method", "target", "--target", "0.8"),
        *("--steps", str(job["steps"]), "--out", job["out"]),
        *("--threads", "1", "--checkpoint-every", "0"),
    ]
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if before is not None:
            before()
        code = cli.main(argv)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 99
    os._exit(code)


def ended(child: int) -> int:
    """The exit code, or minus the signal."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def kill_at_random(job: dict[str, Any], seed: int, kills: int) -> int:
    """Every fourth kill comes early, perhaps before the first step; the others later."""
    moments = random.Random(seed)
    checkpoint = Path(job["out"], CHECKPOINT)
    for killed in range(kills):
        before = _written(checkpoint)
        child = start(job)
        if killed % 4:
            while _written(checkpoint) == before:
                time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        if (code := ended(child)) != -signal.SIGKILL:
            raise RuntimeError(f"the run ended with {code} before it was killed {kills} times")
    return kills


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def kill_at_point(job: dict[str, Any], function: str, call: int) -> int:
    """Kill in the `call`-th call of a function of os: before it or, if negative, after it."""

    def arm() -> None:
        real = getattr(os, function)
        calls = 0

        def deadly(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if calls == -call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(os, function, deadly)

    return int(ended(start(job, arm)) == -signal.SIGKILL)


def main(plan: list[dict[str, Any]]) -> None:
    _job("digits", "quick", "cpu").stream  # noqa: B018, the data are read before the fork
    told = []
    for job in plan:
        killed = 0
        if "random" in job:
            killed = kill_at_random(job, *job["random"])
        if "point" in job:
            killed = kill_at_point(job, *job["point"])
        told.append({"killed": killed, "code": ended(start(job))})
    print(json.dumps(told))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
