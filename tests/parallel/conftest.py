from collections.abc import Iterator

import pytest

from tests.parallel.forked_ranks import start_forked
from tests.parallel.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four processes, shared by all tests of this folder."""
    started = World(4)
    yield started
    started.close()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked, and not started from nothing."""
    monkeypatch.setattr("engine.ranks.child_ranks.start_children", start_forked)
