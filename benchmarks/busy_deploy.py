"""Check `deploy` on a busy machine: equal choices, and a gain like that of a separate measurement.

    python benchmarks/busy_deploy.py --threads 1 --record benchmarks/records/busy_deploy.json
    python benchmarks/busy_deploy.py --threads 2 --record benchmarks/records/busy_deploy.json

Two endless loops keep two processors busy while each network is deployed ten times. The gains are
then compared with two separate measurements without the loops, with the number of threads that
the reports state. Both are ratios of median times: of blocks in which one network is called
repeatedly, as in a server, and of single calls of the two networks in turn. The check passes if at
least nine choices are equal and at least nine gains are within 30 % of the first measurement. The
record has one entry for each number of threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pdecay
from pdecay.lab import machine
from pdecay.lab.models import MLP, ResNet

CALLS = 10
SECONDS = 3.0  # for each call of deploy
LOOP = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default: 1)")
    parser.add_argument("--record", type=Path, help="write the results to this JSON file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [check(name, model, x) for name, (model, x) in networks().items()]
    if args.record is not None:
        records = json.loads(args.record.read_text()) if args.record.exists() else {}
        records[f"threads {args.threads}"] = {
            "command": f"python benchmarks/busy_deploy.py --threads {args.threads}",
            "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
            "machine": machine.describe() | {"threads": torch.get_num_threads()},
            "seconds": SECONDS,
            "networks": rows,
        }
        args.record.write_text(json.dumps(records, indent=1) + "\n")
    if not all(row["passed"] for row in rows):
        sys.exit("the check failed")


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return networks with 95 % random zeros and their inputs, batch size 1.

    The dense weights of the larger MLP do not fit into the cache.
    """
    return {
        "MLP 64-512-512-10": (with_zeros(MLP(64, (512, 512), 10)), torch.randn(1, 64)),
        "MLP 64-2048-2048-10": (with_zeros(MLP(64, (2048, 2048), 10)), torch.randn(1, 64)),
        "ResNet 64-128-256": (with_zeros(ResNet(64, (1, 1, 1))), torch.randn(1, 3, 32, 32)),
    }


@torch.no_grad()
def with_zeros(model: nn.Module, sparsity: float = 0.95) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(torch.rand(parameter.shape) >= sparsity)
    return model.eval()


def check(name: str, model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Deploy a network repeatedly beside busy loops, and compare with a separate measurement."""
    threads = torch.get_num_threads()
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(2)]
    try:
        reports, taken = [], []
        for _ in range(CALLS):
            start = time.perf_counter()
            deployed = pdecay.deploy(model, x, seconds=SECONDS)
            taken.append(time.perf_counter() - start)
            reports.append(deployed.report)
            print(
                f"{name}: {reports[-1].chosen}, {reports[-1].speedup:.2f} times as fast, "
                f"spread {reports[-1].spread:.0%}, {taken[-1]:.1f} s",
                flush=True,
            )
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    used = statistics.mode(report.threads for report in reports)
    torch.set_num_threads(used)  # measure what the reports state
    gain, in_turns = (measured_gain(model, deployed, x, block) for block in (0.25, 0.0))
    torch.set_num_threads(threads)
    gains = [report.speedup for report in reports]
    choices = Counter(report.chosen for report in reports)
    close = sum(abs(one / gain - 1) <= 0.3 for one in gains)
    passed = max(choices.values()) >= CALLS - 1 and close >= CALLS - 1
    print(
        f"{name}: choices {dict(choices)}, median gain {statistics.median(gains):.2f}, "
        f"separately {gain:.2f}, in turns {in_turns:.2f}; {close} gains within 30 %: "
        f"{'passed' if passed else 'FAILED'}",
        flush=True,
    )
    return {
        "name": name,
        "choices": dict(choices),
        "gains": [round(one, 3) for one in gains],
        "threads used": [report.threads for report in reports],
        "within 30 %": close,
        "separate gain": round(gain, 3),
        "separate gain, single calls in turns": round(in_turns, 3),
        "seconds of a call": [round(one, 1) for one in taken],
        "passed": passed,
    }


@torch.inference_mode()
def measured_gain(
    model: nn.Module, deployed: nn.Module, x: Tensor, block: float, seconds: float = 3.0
) -> float:
    """Return the ratio of median times without busy loops; `block` is the seconds of one turn."""
    times: dict[nn.Module, list[float]] = {model: [], deployed: []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for one, measured in times.items():
            one(x)
            stop = time.perf_counter() + block
            while True:
                start = time.perf_counter()
                one(x)
                now = time.perf_counter()
                measured.append(now - start)
                if now >= stop:
                    break
    return statistics.median(times[model]) / statistics.median(times[deployed])


if __name__ == "__main__":
    main()
