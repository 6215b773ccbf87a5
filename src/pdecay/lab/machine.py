"""The machine that runs an experiment: its description and the number of threads."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import pdecay


def describe() -> dict[str, str]:
    """Return the processor, the number of threads, the versions and the system."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        processor = names[0].split(":", 1)[1].strip() if names else processor
    return {
        "processor": processor,
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),  # a subclass of str, which a checkpoint cannot hold
        "pdecay": pdecay.__version__,
        "system": platform.platform(),
    }


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Compute with this many threads, and restore the number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
