from collections.abc import Iterator

import pytest

from tests.parallel.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four processes, shared by all tests of this folder."""
    started = World(4)
    yield started
    started.close()
