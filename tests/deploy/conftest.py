"""What the tests of deployed models share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile into a folder of this run: the tests neither use nor fill the user's."""
    with pytest.MonkeyPatch.context() as patch:
        if "PDECAY_CACHE" not in os.environ:
            patch.setenv("PDECAY_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield
