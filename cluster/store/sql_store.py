"""The store over SQL, for coroutines: each call runs on one of a few threads and is given up after a deadline.

Invariant: no caller waits longer than the deadline, and no work that needs no record waits at all."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cluster.store.store_port import Bound, Held, StoreRecord
from cluster.store.usage_port import UsageBatch, UsageQuery, UsageResult
from core.errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    import sqlalchemy as sa

    from cluster.store.sql_database import SqlDatabase

log = logging.getLogger(__name__)

T = TypeVar("T")
DOWN_S = 1.0
"""How long after a failure the next call fails at once."""
_NUM_THREADS = 4


class SqlStore:
    """A Store, and a UsageStore. The database is opened at its first use, so that a process starts without it."""

    def __init__(self, read_url: Callable[[], str] | None = None, timeout_s: float = 5.0) -> None:
        """`read_url` is called for each connection. None: the records are in memory, and end with this object."""
        self._read_url = read_url
        self._timeout_s, num_threads = (None, 1) if read_url is None else (timeout_s, _NUM_THREADS)
        self._threads = ThreadPoolExecutor(num_threads, "store")
        self._opening = threading.Lock()
        self._database: SqlDatabase | None = None
        self._down_until, self._why = 0.0, ""

    @property
    def is_up(self) -> bool:
        return time.monotonic() >= self._down_until

    @property
    def outlives_process(self) -> bool:
        """Whether the records are in a database."""
        return self._read_url is not None

    async def put(
        self, records: Sequence[StoreRecord], *, held: Held | None = None, bound: Bound | None = None
    ) -> None:
        await self._run(lambda connection: _statements().put(connection, records, held, bound), grows=True)

    async def replace(
        self, record: StoreRecord, *, held: Held | None = None, bound: Bound | None = None
    ) -> bool:
        return await self._run(lambda connection: _statements().replace(connection, record, held, bound))

    async def get(self, record_id: str, *, touch: bool = False) -> StoreRecord | None:
        def work(connection: "sa.Connection") -> StoreRecord | None:
            if touch:
                _statements().touch(connection, record_id)
            return _statements().get(connection, record_id)

        return await self._run(work, reads=not touch)

    async def find(
        self,
        kind: str,
        *,
        ids: Sequence[str] | None = None,
        owners: Sequence[str] | None = None,
        state: str | None = None,
    ) -> list[StoreRecord]:
        wanted = {"id": ids, "owner": owners, "state": None if state is None else (state,)}
        return await self._run(lambda connection: _statements().find(connection, kind, wanted), reads=True)

    async def children(self, parent: str, position: int, num_positions: int) -> list[StoreRecord]:
        return await self._run(
            lambda connection: _statements().children(connection, parent, position, num_positions), reads=True
        )

    async def delete(self, record_id: str) -> None:
        await self._run(lambda connection: _statements().delete(connection, record_id))

    async def claim(self, record_id: str, holder: str, lease_s: float) -> StoreRecord | None:
        return await self._run(lambda connection: _statements().claim(connection, record_id, holder, lease_s))

    async def renew(self, record_ids: Sequence[str], holder: str, lease_s: float) -> frozenset[str]:
        return await self._run(
            lambda connection: _statements().renew(connection, record_ids, holder, lease_s)
        )

    async def release(self, record_id: str, holder: str) -> None:
        await self._run(lambda connection: _statements().release(connection, record_id, holder))

    async def add_usage(self, batch: UsageBatch) -> int:
        return await self._run(lambda connection: _usage().add(connection, batch), grows=True)

    async def usage_upto(self, writer: str) -> int:
        return await self._run(lambda connection: _usage().upto(connection, writer), reads=True)

    async def usage(self, query: UsageQuery) -> list[UsageResult]:
        return await self._run(lambda connection: _usage().results(connection, query), reads=True)

    def close(self) -> None:
        """Close the connections once the calls that run have ended. Blocks."""
        self._threads.shutdown(cancel_futures=True)
        if self._database is not None:
            self._database.close()

    async def _run(
        self, work: "Callable[[sa.Connection], T]", *, reads: bool = False, grows: bool = False
    ) -> T:
        if time.monotonic() < self._down_until:
            raise StoreUnavailable(self._why)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                done = partial(self._transact, work, reads=reads, grows=grows)
                result = await loop.run_in_executor(self._threads, done)
        except TimeoutError:
            raise self._failed(f"it has not answered within {self._timeout_s} s") from None
        except (StoreUnavailable, ConfigError) as error:
            raise self._failed(str(error)) from None
        self._why = ""
        return result

    def _transact(self, work: "Callable[[sa.Connection], T]", *, reads: bool, grows: bool) -> T:
        with self._opening:
            if self._database is None:
                from cluster.store.sql_database import SqlDatabase  # noqa: PLC0415  # a second that not all need

                self._database = SqlDatabase(self._read_url, self._timeout_s or 0.0)
        return self._database.transact(work, reads=reads, grows=grows)

    def _failed(self, why: str) -> StoreUnavailable:
        if not self._why:
            log.error("the store does not answer: %s", why)
        self._down_until = time.monotonic() + DOWN_S
        self._why = f"the server's database does not answer: {why}"
        return StoreUnavailable(self._why)


def _statements():
    from cluster.store import record_statements  # noqa: PLC0415  # it brings SQLAlchemy

    return record_statements


def _usage():
    from cluster.store import usage_statements  # noqa: PLC0415

    return usage_statements
