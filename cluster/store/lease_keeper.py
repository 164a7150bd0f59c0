"""Leases of records that work of this process holds. They are renewed while the work runs, and end soon after the process does.

A lease that is lost, because the record was deleted or somebody else has claimed it, cancels the work."""

import asyncio
import logging
import uuid

from cluster.store.store_port import Held, Store, StoreRecord
from core.errors import StoreUnavailable

log = logging.getLogger(__name__)

LEASE_S = 15.0
"""How long after a process's end others may claim what it held."""
RENEW_S = 2.0


class LeaseKeeper:
    """Belongs to one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.holder = uuid.uuid4().hex
        self._running: dict[str, asyncio.Task[None]] = {}
        self._renewing: asyncio.Task[None] | None = None

    def held(self, record_id: str) -> Held:
        """Return what a write to the record needs."""
        return Held(record_id, self.holder)

    def running(self, record_id: str) -> "asyncio.Task[None] | None":
        return self._running.get(record_id)

    async def claim(self, record_id: str) -> StoreRecord | None:
        return await self._store.claim(record_id, self.holder, LEASE_S)

    async def release(self, record_id: str) -> None:
        await self._store.release(record_id, self.holder)

    def keep(self, record_id: str, work: "asyncio.Task[None]") -> None:
        """Renew a lease until the work ends."""
        self._running[record_id] = work
        work.add_done_callback(lambda _: self._running.pop(record_id, None))
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while self._running:
            await asyncio.sleep(RENEW_S)
            asked = dict(self._running)
            try:
                kept = await self._store.renew(tuple(asked), self.holder, LEASE_S)
            except (StoreUnavailable, OSError) as error:
                log.warning("leases are not renewed: %s", error)
                continue
            for record_id in asked.keys() - kept:
                asked[record_id].cancel()
