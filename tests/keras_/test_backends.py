"""Run all tests of pdecay.keras, on each backend in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
BACKENDS = ("jax", "tensorflow", "torch")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend(backend):
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--noconftest"),
            *("--durations=8", "-W", "default"),
            *map(str, sorted(FOLDER.glob("backend_*.py"))),
        ],
        cwd=ROOT,
        env=environment(backend),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 40


def test_import_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pdecay import Lp; from pdecay.keras import PAdam\n"
        "print(PAdam(1e-3, decay=Lp(0.8, 1e-2)).get_config()['decay'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment("jax"), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[[0.8, 0.01]]", done.stderr


def environment(backend: str) -> dict[str, str]:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **quiet, "KERAS_BACKEND": backend, "PDECAY_KERAS_PROCESS": "1"}
