"""The command, machine, commit and versions of a measurement."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pdecay.lab.machine import describe


def provenance(*packages: str) -> dict[str, Any]:
    """Return where a record comes from, with the versions of Python, torch and `packages`."""
    return {
        "command": command(),
        "machine": describe(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", *packages)},
        },
    }


def command() -> str:
    """Return the command line of this process, with the script relative to the repository."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def folder_hash(folder: str) -> str:
    """Return git's hash of a committed folder; unlike a commit's, a rebase does not change it."""
    root = Path(__file__).parents[1]
    arguments = ["git", "-C", str(root), "rev-parse", f"HEAD:{folder}"]
    return subprocess.check_output(arguments, text=True).strip()
