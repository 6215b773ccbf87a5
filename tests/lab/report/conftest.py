"""Fixtures of the report's tests: experiments, pages and a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdecay.lab.report import page
from pdecay.lab.report.experiments import Experiment, experiments
from pdecay.lab.report.page_data import page_data
from pdecay.lab.report.style import Style
from pdecay.lab.train.records import Record

from .browser import Browser, find
from .synthetic import MLP, record, sweep


@pytest.fixture
def experiment() -> Callable[..., Experiment]:
    """Return a function that groups records into exactly one experiment."""

    def make(*made: Record) -> Experiment:
        (found,) = experiments(made)
        return found

    return make


@pytest.fixture(scope="session")
def swept() -> Experiment:
    """A sweep over three seeds."""
    (found,) = experiments(sweep((0, 1, 2)))
    return found


@pytest.fixture(scope="session")
def several() -> list[Record]:
    """Two tasks: a sweep of one seed, and four runs of a small network, one of which diverged."""
    small: dict[str, Any] = {"task": "digits", "scale": "quick", "steps": 600, "layers": MLP}
    return [
        *sweep(),
        *(record("padam", p=0.8, lam=lam, **small) for lam in (0.01, 0.03)),
        record("padam", p=0.5, lam=0.01, **small),
        record("padam", p=0.5, lam=10.0, diverged=True, **small),
    ]


@pytest.fixture
def html(tmp_path: Path) -> Callable[[Sequence[Record]], Path]:
    """Return a function that writes only the page and returns its path."""

    def make(made: Sequence[Record]) -> Path:
        path = tmp_path / "page.html"
        path.write_text(
            page.page(page_data([Style(experiment) for experiment in experiments(made)]))
        )
        return path

    return make


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip("no Chromium: install one, or name it in the environment variable CHROMIUM")
    with Browser(program) as started:
        yield started
