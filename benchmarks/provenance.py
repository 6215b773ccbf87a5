"""The command, commit, machine and versions of a measurement."""

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
        "commit": commit(),
        "machine": describe(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", *packages)},
        },
    }


def command() -> str:
    """Return the command line of this process, with the script relative to the repository."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def commit() -> str:
    """Return the commit of the working tree; a "+" follows if tracked source files differ."""

    def git(*arguments: str) -> str:
        call = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(call, capture_output=True, text=True, check=False).stdout.strip()

    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", ":/src", ":/benchmarks/*.py"
    )
    return git("rev-parse", "HEAD") + ("+" if changed else "")
