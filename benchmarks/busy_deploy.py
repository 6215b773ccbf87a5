"""Check `deploy` on a busy machine: equal choices, and a gain like that of a separate measurement.

    python benchmarks/busy_deploy.py --threads 1 2 --record benchmarks/records/busy_deploy.json

Two endless loops keep two processors busy while each network is deployed ten times. After each
call the loops are suspended, and the gain is compared with a separate measurement on the idle
machine, with the number of threads that the report states. Both networks are called in turns. The
gain is the ratio of a low quantile of their times, as in the report: other users of the processor
share its outer cache, so that the median of a network with large weights varies on the idle
machine. The record has the ratios of medians too. The check passes if at least nine choices are
equal and at least nine gains are within 30 % of their separate measurement. The record has one
entry for each network and number of threads.

A call counts only if no processes other than the loops used the processors during the call and the
measurement. An interrupted run continues with the calls of its record. Needs Linux, for the CPU
time of processes in /proc.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import pdecay
from pdecay.lab import machine
from pdecay.lab.models import MLP, ResNet
from provenance import folder_hash, provenance

CALLS = 10
SECONDS = 4.0  # for each call of deploy
SEPARATE_SECONDS = 2.4  # for each separate measurement
BLOCK = 0.1  # the seconds of one turn in it
QUANTILE = 0.05
MAX_OTHERS = 0.1  # processors that other processes may use on average
LOOP = "while True: pass"
SOURCE = "src/pdecay/deployment"

Call = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="torch's threads")
    parser.add_argument("--networks", nargs="+", default=[*networks()], help="names; default: all")
    parser.add_argument("--record", type=Path, help="write the results to this JSON file")
    args = parser.parse_args()
    has_passed = True
    for threads, name in itertools.product(args.threads, args.networks):
        key = f"{name}, threads {threads}"
        record = Record(args.record, key)
        with machine.use_threads(threads):
            add_calls(name, *networks()[name], record)
        row = summary(record.calls)
        print(key, row, flush=True)
        has_passed &= row["passed"]
    if not has_passed:
        sys.exit("the check failed")


class Record:
    """The calls of one entry of the record, written after each call.

    The calls of an earlier run are kept if they are of the same source.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self.path = path
        self.key = key
        found = self._read().get(key, {})
        self.calls: list[Call] = []
        if found.get(SOURCE) == folder_hash(SOURCE):
            self.calls = found["calls"]

    def add(self, call: Call) -> None:
        self.calls.append(call)
        if self.path is not None:
            row = {**summary(self.calls), "calls": self.calls, **provenance()}
            records = {**self._read(), self.key: {**row, SOURCE: folder_hash(SOURCE)}}
            self.path.write_text(json.dumps(records, indent=1) + "\n")

    def _read(self) -> dict[str, Any]:
        if self.path is None or not self.path.exists():
            return {}
        return cast("dict[str, Any]", json.loads(self.path.read_text()))


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


def add_calls(name: str, model: nn.Module, x: Tensor, record: Record) -> None:
    """Deploy a network beside busy loops until its record has ten calls that were not disturbed."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(2)]
    try:
        while len(record.calls) < CALLS:
            start, others = time.perf_counter(), cpu_seconds_of_others(loops)
            deployed = pdecay.deploy(model, x, seconds=SECONDS)
            taken = time.perf_counter() - start
            report = deployed.report
            with suspended(loops), machine.use_threads(report.threads):
                separate, separate_median = measured_gains(model, deployed, x)
            others = (cpu_seconds_of_others(loops) - others) / (time.perf_counter() - start)
            call: Call = {
                "chosen": report.chosen,
                "gain": round(report.speedup, 3),
                "separate gain": round(separate, 3),
                "median gain": round(report.median_speedup, 3),
                "separate median gain": round(separate_median, 3),
                "spread": round(report.spread, 3),
                "threads": report.threads,
                "seconds": round(taken, 1),
            }
            print(f"{name}: {call}, {others:.2f} processors used by others", flush=True)
            if others <= MAX_OTHERS:
                record.add(call)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def summary(calls: list[Call]) -> dict[str, Any]:
    """Count the equal choices and the gains that are like the separate ones."""
    choices = Counter(call["chosen"] for call in calls)
    equal = max(choices.values())
    close, close_to_median = (
        sum(abs(call["gain"] / call[other] - 1) <= 0.3 for call in calls)
        for other in ("separate gain", "separate median gain")
    )
    return {
        "choices": dict(choices),
        "gains": [call["gain"] for call in calls],
        "separate gains": [call["separate gain"] for call in calls],
        "within 30 %": close,
        "within 30 % of the separate median gain": close_to_median,
        "passed": equal >= CALLS - 1 and close >= CALLS - 1,
    }


def cpu_seconds_of_others(loops: Iterable[subprocess.Popen[bytes]]) -> float:
    """Return the CPU seconds of all processes except this one and the loops."""
    user, nice, system, _idle, _iowait, irq, soft_irq, *_ = (
        Path("/proc/stat").read_text().split()[1:]
    )
    ticks = sum(map(int, (user, nice, system, irq, soft_irq)))
    for loop in loops:
        fields = Path(f"/proc/{loop.pid}/stat").read_text().rpartition(")")[2].split()
        ticks -= int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


@contextmanager
def suspended(processes: Iterable[subprocess.Popen[bytes]]) -> Iterator[None]:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


@torch.inference_mode()
def measured_gains(model: nn.Module, deployed: nn.Module, x: Tensor) -> tuple[float, float]:
    """Return the ratios of low quantiles and of medians of the times of both networks."""
    times: dict[nn.Module, list[float]] = {model: [], deployed: []}
    end = time.perf_counter() + SEPARATE_SECONDS
    while time.perf_counter() < end:
        for one, measured in times.items():
            one(x)
            stop = time.perf_counter() + BLOCK
            while (start := time.perf_counter()) < stop:
                one(x)
                measured.append(time.perf_counter() - start)
    dense, fast = (sorted(measured) for measured in times.values())
    low = dense[int(QUANTILE * len(dense))] / fast[int(QUANTILE * len(fast))]
    return low, statistics.median(dense) / statistics.median(fast)


if __name__ == "__main__":
    main()
