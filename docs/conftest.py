"""Run the examples of the pages as tests, each page in its own temporary folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
collect_ignore = ["conf.py"]  # imports Sphinx, which the tests do not need


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the warnings that other frameworks raise themselves."""
    for item in items:
        if item.path.name in ("lightning.md", "other-frameworks.md"):
            for ignored in ("UserWarning:lightning", "DeprecationWarning", "FutureWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{ignored}"))
