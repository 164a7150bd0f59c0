"""Batches, as records of the store. The process that has claimed a batch runs it, until its lease ends.

Invariant: only who has claimed a batch writes its progress. Others ask it to stop, in the same record."""

import json
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from cluster.ingress.tenants.api_keys import may_see, visible_owners
from cluster.store.store_port import Held, LeaseLost, Store, StoreRecord
from core.errors import RequestError

Record = dict[str, Any]
"""OpenAI's batch object, with its owner under `tenant`."""
FINAL = ("completed", "failed", "expired", "cancelled")
_KIND, _OPEN, _ENDED = "batch", "open", ""
_ID = re.compile(r"batch_[0-9a-f]{32}")


class BatchStore:
    def __init__(self, store: Store) -> None:
        self._store = store

    def new_id(self) -> str:
        return f"batch_{uuid.uuid4().hex}"

    async def create(self, record: Record) -> None:
        await self._store.put([stored_batch(record)])

    async def save(self, record: Record, held: Held) -> None:
        """Store the progress of a batch, and note in `record` whether somebody has asked to cancel it. Raises LeaseLost."""
        while True:
            if (stored := await self._store.get(record["id"])) is None:
                raise LeaseLost(f"{record['id']} was deleted")
            if record["status"] not in FINAL and (asked_at := batch_in(stored)["cancelling_at"]) is not None:
                record |= {"status": "cancelling", "cancelling_at": asked_at}
            if await self._store.replace(stored_batch(record, stored.version), held=held):
                return

    async def get(self, batch_id: str, owner: str) -> Record:
        """Return a batch. Raises RequestError for what is not there, or another tenant's."""
        found = await self._store.get(batch_id) if _ID.fullmatch(batch_id) else None
        if found is None or not may_see(owner, found.owner):
            raise RequestError(f"there is no batch {batch_id!r}", status=404)
        return batch_in(found)

    async def of(self, owner: str) -> list[Record]:
        """Return an owner's batches, the newest first."""
        return [batch_in(found) for found in await self._store.find(_KIND, owners=visible_owners(owner))]

    async def unfinished(self, owner: str | None = None) -> list[Record]:
        """Return the unfinished batches, of all owners or of one, the oldest first."""
        owners = None if owner is None else visible_owners(owner)
        found = await self._store.find(_KIND, owners=owners, state=_OPEN)
        return [batch_in(record) for record in reversed(found)]

    async def ask_to_cancel(self, batch_id: str) -> None:
        """Ask whoever runs a batch to stop. One that has ended stays as it is."""
        while (stored := await self._store.get(batch_id)) is not None:
            record = batch_in(stored)
            if record["status"] in FINAL or record["cancelling_at"] is not None:
                return
            record |= {"status": "cancelling", "cancelling_at": int(time.time())}
            if await self._store.replace(stored_batch(record, stored.version)):
                return


def stored_batch(record: Mapping[str, Any], version: int = 0) -> StoreRecord:
    return StoreRecord(
        id=record["id"],
        kind=_KIND,
        owner=record["tenant"],
        state=_ENDED if record["status"] in FINAL else _OPEN,
        body=json.dumps(record).encode(),
        version=version,
    )


def batch_in(stored: StoreRecord) -> Record:
    return json.loads(stored.body)
