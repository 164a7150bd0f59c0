"""Each test of the store runs on SQLite and on PostgreSQL."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.store.sql_store import SqlStore
from tests.postgres import Postgres, running_postgres

OpenStore = Callable[[], SqlStore]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    return request.getfixturevalue("postgres").new_database()


@pytest.fixture
def opened(url: str) -> Iterator[OpenStore]:
    """Opens the same database for another process, as far as the store can see."""
    made: list[SqlStore] = []

    def opened() -> SqlStore:
        made.append(SqlStore(lambda: url, timeout_s=20.0))
        return made[-1]

    yield opened
    for store in made:
        store.close()


@pytest.fixture
def store(opened: OpenStore) -> SqlStore:
    return opened()
