"""Fixtures of the command-line tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pdecay.lab.train import records
from pdecay.lab.train.records import Record


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Sequence[Record]], Path]:
    """Write records to a file and return its path."""

    def to_file(made: Sequence[Record], name: str = "records.jsonl") -> Path:
        path = tmp_path / "runs" / name
        path.parent.mkdir(exist_ok=True)
        records.write(path, made)
        return path

    return to_file
