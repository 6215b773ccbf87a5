"""What the tests of deployed models share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from pdecay.deployment import store


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile into a folder of this run: the tests neither use nor fill the user's."""
    with pytest.MonkeyPatch.context() as patch:
        if "PDECAY_CACHE" not in os.environ:
            patch.setenv("PDECAY_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture(scope="session", autouse=True)
def warm(tmp_path_factory):
    """What is imported at first use is no memory of the file that a test measures."""
    path = tmp_path_factory.mktemp("warm") / "file"
    store.save({"a": torch.eye(40), "b": torch.zeros(3)}, path)
    store.load(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(store.FileFormatError):
        store.load(path)
