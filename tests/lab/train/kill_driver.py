"""Run ``pdecay train`` in subprocesses and kill them according to a plan (JSON).

This process imports torch once and forks the subprocesses, which takes milliseconds. Each of them
runs the whole command line and receives a real SIGKILL. Each job of the plan ends with a run that
is not killed. The number of kills of each job is printed.

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
import torch._dynamo  # imported by the first optimizer step

from pdecay import cli
from pdecay.lab.tasks import cached_task
from pdecay.lab.train.training import CHECKPOINT

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
    """Wait for a process and return its exit code, or minus the signal."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def kill_at_random(job: dict[str, Any], seed: int, kills: int) -> int:
    """Kill at random times: every fourth kill is early, the others follow a new checkpoint."""
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
    """Kill before the `call`-th call of a function of os, or after it if negative."""

    def arm() -> None:
        real = getattr(os, function)
        calls = 0

        def killing(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if calls == -call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(os, function, killing)

    return int(ended(start(job, arm)) == -signal.SIGKILL)


def main(plan: list[dict[str, Any]]) -> None:
    _ = cached_task("digits", "quick", "cpu").stream  # read the data before the fork
    results = []
    for job in plan:
        killed = 0
        if "random" in job:
            killed = kill_at_random(job, *job["random"])
        if "point" in job:
            killed = kill_at_point(job, *job["point"])
        results.append({"killed": killed, "code": ended(start(job))})
    print(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
