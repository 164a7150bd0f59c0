"""A cluster's database that goes and comes back."""

import asyncio
import signal
import sqlite3
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.patience import PATIENCE_S
from tests.postgres import Postgres, running_postgres


@dataclass(frozen=True)
class Database:
    """PostgreSQL's, or SQLite's where there is no server."""

    url: str
    server: Postgres | None = None

    @asynccontextmanager
    async def gone(self) -> AsyncGenerator[None]:
        """Nobody reaches it meanwhile: PostgreSQL has crashed and starts again, and SQLite's file is locked."""
        if self.server is not None:
            await asyncio.to_thread(self.server.stop, signal.SIGQUIT)
            try:
                yield
            finally:
                await asyncio.to_thread(self.server.start)
            return
        with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=PATIENCE_S)) as file:
            file.isolation_level = None
            file.execute("BEGIN EXCLUSIVE")
            try:
                yield
            finally:
                file.execute("ROLLBACK")

    @asynccontextmanager
    async def hung(self) -> AsyncGenerator[None]:
        """It answers nobody meanwhile, and says nothing."""
        if self.server is None:
            async with self.gone():
                yield
            return
        self.server.hang()
        try:
            yield
        finally:
            self.server.wake()


@contextmanager
def new_database(folder: Path, *, postgres: bool) -> Iterator[Database]:
    """An empty one: a file in the folder, or of a server of its own."""
    if not postgres:
        yield Database(f"sqlite:///{folder / 'store.db'}")
        return
    with running_postgres() as server:
        yield Database(server.new_database(), server)
