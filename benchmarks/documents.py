"""Tables in Markdown, and their places in README and docs/_data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
TABLES = ROOT / "docs" / "_data"
README = ROOT / "README.md"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def filled(page: str, name: str, text: str) -> str:
    """Return `page` with `text` between its comments ``<name>: begin`` and ``<name>: end``."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    if begin not in page or end not in page:
        raise ValueError(f"README has no lines {begin.strip()} and {end}")
    return re.sub(f"(?<={begin}).*(?={end})", lambda _: text, page, flags=re.DOTALL)


def write(tables: Mapping[str, str], readme: Mapping[str, str]) -> None:
    """Write tables to docs/_data, and fill the sections of README."""
    for name, text in tables.items():
        (TABLES / f"{name}.md").write_text(text, encoding="utf-8")
    page = README.read_text(encoding="utf-8")
    for name, text in readme.items():
        page = filled(page, name, text)
    README.write_text(page, encoding="utf-8")
