"""Fixtures of the tests of the kernel build."""

import pytest

from tests.native.processes import LOAD, run


@pytest.fixture(scope="session")
def filled(tmp_path_factory):
    """Return a cache that contains the kernel."""
    cache = tmp_path_factory.mktemp("cache")
    assert run(LOAD, cache) == "loaded"
    return cache
