"""Check `deploy` on a busy machine: equal choices, and a gain like that of a separate measurement.

    python benchmarks/busy_deploy.py --record benchmarks/records/busy_deploy.json

Two endless loops keep two processors busy while each network is deployed ten times. The gain is
then compared with a separate measurement, without the loops, of the networks alone: the median of
alternating calls. The check passes if at least nine choices are equal and the median of the
reported gains is within 30 % of the separate measurement.
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
        record = {
            "command": f"python benchmarks/busy_deploy.py --threads {args.threads}",
            "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
            "machine": machine.describe() | {"threads": torch.get_num_threads()},
            "seconds": SECONDS,
            "networks": rows,
        }
        args.record.write_text(json.dumps(record, indent=1) + "\n")
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
    gain = measured_gain(model, deployed, x)
    gains = [report.speedup for report in reports]
    choices = Counter(report.chosen for report in reports)
    difference = statistics.median(gains) / gain - 1
    passed = max(choices.values()) >= CALLS - 1 and abs(difference) <= 0.3
    print(
        f"{name}: choices {dict(choices)}, median gain {statistics.median(gains):.2f}, "
        f"separately {gain:.2f} ({difference:+.0%}): {'passed' if passed else 'FAILED'}",
        flush=True,
    )
    return {
        "name": name,
        "choices": dict(choices),
        "gains": [round(one, 3) for one in gains],
        "within 30 %": sum(abs(one / gain - 1) <= 0.3 for one in gains),
        "separate gain": round(gain, 3),
        "seconds of a call": [round(one, 1) for one in taken],
        "passed": passed,
    }


@torch.inference_mode()
def measured_gain(model: nn.Module, deployed: nn.Module, x: Tensor, seconds: float = 3.0) -> float:
    """Return the ratio of the median times of alternating single calls, without busy loops."""
    times: dict[nn.Module, list[float]] = {model: [], deployed: []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for one, measured in times.items():
            one(x)
            start = time.perf_counter()
            one(x)
            measured.append(time.perf_counter() - start)
    return statistics.median(times[model]) / statistics.median(times[deployed])


if __name__ == "__main__":
    main()
