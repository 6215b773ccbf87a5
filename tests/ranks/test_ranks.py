"""Training on two and four processes gives the weights of one process.

Starting processes is slow, so one set of four runs all checks of ``checks.py``; pairs of them are
the sets of two.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORLD = 4


@pytest.mark.slow
def test_ranks_match_one_process(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Rendezvous by file: a free port may be taken by another test before it is used.
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.checks", str(rank), str(WORLD), str(tmp_path)],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD, "\n".join(outputs)
