"""Run the Python blocks of README and quickstart, and put what they print into the pages.

    python benchmarks/pages.py

Each page runs in a new process and an empty folder, as pasted. The printed outputs replace the text
blocks after the Python blocks. They are also written to ``benchmarks/records/pages.json``, with the
seconds of each page; a test compares the pages with this record.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from pdecay.lab import machine

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "pages.json"
PAGES = ("README.md", "docs/quickstart.md")
# A Python block, or a text block with a printed output.
BLOCK = re.compile(r"(?<=^```)(python|text)\n(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        json.dump(outputs(args.run.read_text(encoding="utf-8")), sys.stdout)
        return
    pages = {name: run(ROOT / name) for name in PAGES}
    record = {
        "command": "python benchmarks/pages.py",
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "machine": machine.describe() | {"threads": torch.get_num_threads()},
        "pages": pages,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name in PAGES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        path.write_text(with_outputs(text, pages[name]["outputs"]), encoding="utf-8")


def run(path: Path) -> dict[str, object]:
    """Run a page in a new process; return its outputs and seconds."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--run", str(path)]
        shown = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    seconds = round(time.perf_counter() - start, 1)
    print(f"{path.name}: {seconds} s")
    return {"seconds": seconds, "outputs": json.loads(shown.stdout)}


def outputs(page: str) -> list[str]:
    """Run the Python blocks of a page; return what those before a text block print."""
    sys.path.insert(0, os.getcwd())
    namespace: dict[str, object] = {"__name__": "page"}
    found, printed = [], ""
    for kind, text in BLOCK.findall(page):
        if kind == "text":
            found.append(printed)
            continue
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            exec(compile(text, "page", "exec"), namespace)
        printed = shown.getvalue()
    return found


def with_outputs(page: str, found: list[str]) -> str:
    """Return a page with its text blocks replaced."""
    rest = iter(found)
    return BLOCK.sub(lambda block: f"text\n{next(rest)}" if block[1] == "text" else block[0], page)


if __name__ == "__main__":
    main()
