"""The machine and the source code of an experiment, and its number of threads."""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import pdecay


def describe() -> dict[str, str]:
    """Return the processor, the number of threads, the versions, the commit and the system."""
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
        **({"commit": commit()} if commit() else {}),
        "system": platform.platform(),
    }


@functools.cache
def commit() -> str:
    """Return the commit of pdecay's clone, with a "+" if its source differs; "" without a clone."""
    package = Path(pdecay.__file__).parent
    root = package.parents[1]
    if package.parent.name != "src" or not (root / ".git").exists():
        return ""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return done.stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", "src") else "")


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Compute with this many threads, and restore the number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
