"""Processes that load a kernel with a cache of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

LOAD = "from pdecay._native.build import load; load('step'); print('loaded')"
TRY = """
from pdecay._native.build import KernelUnavailable, load
for _ in range(2):
    try:
        load('step')
        print('loaded')
    except KernelUnavailable as reason:
        print('unavailable:', reason)
"""


def environment(cache, **changes):
    result = {name: value for name, value in os.environ.items() if name != "CC"}
    return result | {"PDECAY_CACHE": str(cache)} | {k: str(v) for k, v in changes.items()}


def run(code, cache, **changes):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment(cache, **changes),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def libraries(cache):
    return sorted(Path(cache, "kernels").glob("*"))
