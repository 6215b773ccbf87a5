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


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoTorch())
import keras
import numpy as np
from pdecay import Lp
from pdecay.keras import PAdam, SparsityTarget

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5)])
model.compile(PAdam(1e-2, decay=Lp(0.8, 1e-2)), "mse")
x = np.random.default_rng(0).normal(size=(40, 4))
history = model.fit(x, x @ np.ones((4, 5)), 4, 3, verbose=0, callbacks=[SparsityTarget(0.5)])
print(history.history["sparsity"][-1])
"""


@pytest.mark.slow
def test_trains_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        env=environment("jax"),
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "0.5", done.stderr


def environment(backend: str) -> dict[str, str]:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **quiet, "KERAS_BACKEND": backend, "PDECAY_KERAS_PROCESS": "1"}
