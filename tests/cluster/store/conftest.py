"""Each test of the store runs on SQLite and on PostgreSQL."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every store that a test makes, also within an ingress: an open connection fails whichever test collects it later."""
    made: list[SqlStore] = []
    real = SqlStore.__init__

    def make(store: SqlStore, *arguments: Any, **options: Any) -> None:
        real(store, *arguments, **options)
        made.append(store)

    monkeypatch.setattr(SqlStore, "__init__", make)
    yield
    for store in made:
        store.close()


@pytest.fixture
def opened(url: str) -> OpenStore:
    """Opens the same database for another process, as far as the store can see."""
    return lambda: SqlStore(lambda: url, timeout_s=20.0)


@pytest.fixture
def store(opened: OpenStore) -> SqlStore:
    return opened()
