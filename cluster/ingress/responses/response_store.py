"""Responses that clients may ask for again or continue from, of all ingresses that share a store.

Invariant: a background response is in progress while an ingress has claimed its record. One that nobody holds has failed."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.ingress.tenants.api_keys import visible_owners
from cluster.store.lease_keeper import LEASE_S, LeaseKeeper
from cluster.store.store_port import Bound, Store, StoreRecord
from core.errors import RequestError

Json = dict[str, Any]
_KIND, _ITEM_KIND = "response", "response_item"
_RUNNING = "in_progress"
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_LOST = "the ingress that generated this response has ended: create it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    tenant: str
    items: tuple[Json, ...]
    """The conversation that it answers, without its own output."""
    body: Json
    request: Json | None = None
    """What a background response is generated from, until it has ended (`ResponseTurn.record`)."""


class ResponseStore:
    """Stored responses. Each owner's oldest make room for new ones."""

    def __init__(self, store: Store, capacity_bytes: int, age_s: float, *, resumes: bool) -> None:
        """An owner's responses have up to `capacity_bytes`; with 0 nothing is kept. They are deleted after `age_s`. `resumes`: a
        background response whose ingress is gone goes on in another one."""
        self.resumes = resumes
        self._store, self._capacity_bytes, self._age_s = store, capacity_bytes, age_s
        self._leases = LeaseKeeper(store)

    @property
    def keeps(self) -> bool:
        return self._capacity_bytes > 0

    @property
    def is_up(self) -> bool:
        return self._store.is_up

    async def put(self, response: StoredResponse) -> None:
        """Store a response, in place of one with the same id. One that alone exceeds the bound is not kept. Raises
        StoreUnavailable, and LeaseLost for a background response that was cancelled or deleted elsewhere."""
        body = await asyncio.to_thread(_encoded, response)
        if len(body) > self._capacity_bytes:
            return
        response_id = response.body["id"]
        record = StoreRecord(
            id=response_id,
            kind=_KIND,
            owner=response.tenant,
            body=body,
            num_bytes=len(body),
            lives_s=self._age_s,
        )
        bound = Bound(kind=_KIND, num_bytes=self._capacity_bytes, owner=response.tenant, makes_room=True)
        if response.body["status"] == _RUNNING:
            record = replace(record, state=_RUNNING, holder=self._leases.holder, lease_s=LEASE_S)
        items = [
            StoreRecord(
                id=item["id"], kind=_ITEM_KIND, owner=response.tenant, parent=response_id, lives_s=self._age_s
            )
            for item in response.body["output"]
        ]
        is_running = self._leases.running(response_id) is not None
        held = self._leases.held(response_id) if is_running else None
        await self._store.put([record, *items], held=held, bound=bound)

    async def get(self, response_id: str, owner: str, field: str | None = None) -> StoredResponse:
        """Return a response. Raises StoreUnavailable, and RequestError where `field` names what holds the id in the client's
        request."""
        found = await self._get(response_id, owner, field)
        if found.state == _RUNNING and not found.is_held and not self.resumes:
            error = {"code": "server_error", "message": _LOST}
            return await self._end(found, {"status": "failed", "error": error})
        return await asyncio.to_thread(_decoded, found)

    async def has(self, response_id: str, owner: str) -> bool:
        """Return whether a response is stored. Raises StoreUnavailable."""
        return bool(await self._visible(_KIND, [response_id], owner))

    async def claim_left(self, serves: Callable[[str], bool]) -> list[StoredResponse]:
        """Claim the background responses that nobody generates, as far as this server `serves` their models. Raises
        StoreUnavailable."""
        claimed: list[StoredResponse] = []
        for record in await self._store.find(_KIND, state=_RUNNING):
            runs = record.is_held or self._leases.running(record.id) is not None
            if runs or not serves(json.loads(record.body)[1]["model"]):
                continue
            mine = await self._leases.claim(record.id)
            if mine is not None and mine.state == _RUNNING:
                claimed.append(await asyncio.to_thread(_decoded, mine))
        return claimed

    async def leave(self, response_id: str) -> None:
        """Let another ingress go on with a background response. Raises StoreUnavailable."""
        await self._leases.release(response_id)

    async def fail(self, response: StoredResponse, why: str) -> None:
        """End a background response that cannot be generated. Raises StoreUnavailable."""
        record = await self._get(response.body["id"], response.tenant)
        error = {"code": "server_error", "message": why}
        await self._end(record, {"status": "failed", "error": error})

    async def items(self, ids: Sequence[str], owner: str) -> dict[str, Json]:
        """Return items of stored responses' outputs, by id. Raises RequestError and StoreUnavailable."""
        named = await self._visible(_ITEM_KIND, ids, owner)
        holders = await self._visible(_KIND, [record.parent for record in named if record.parent], owner)
        found: dict[str, Json] = {}
        for record in holders:
            output = (await asyncio.to_thread(_decoded, record)).body["output"]
            found |= {item["id"]: item for item in output}
        if missing := [item_id for item_id in ids if item_id not in found]:
            raise RequestError(
                f"no item {missing[0]!r} of a response is stored here: send the item itself, or the response's id as "
                "previous_response_id",
                field="input",
                status=404,
                code="item_not_found",
            )
        return found

    async def delete(self, response_id: str, owner: str) -> None:
        """Delete a response, and end it where it still runs. Raises RequestError and StoreUnavailable."""
        await self.get(response_id, owner)
        await self._store.delete(response_id)
        await self._stop(response_id)

    def run(self, response_id: str, task: "asyncio.Task[None]") -> None:
        """Hold a background response's record until its task has ended."""
        self._leases.keep(response_id, task)

    async def cancel(self, response_id: str, owner: str) -> StoredResponse:
        """Cancel a background response, wherever it runs, and return it. Raises RequestError and StoreUnavailable."""
        await self._stop(response_id)
        found = await self._get(response_id, owner)
        if found.state != _RUNNING:
            return await asyncio.to_thread(_decoded, found)
        return await self._end(found, {"status": "cancelled"})

    async def _get(self, response_id: str, owner: str, field: str | None = None) -> StoreRecord:
        found = next(iter(await self._visible(_KIND, [response_id], owner)), None)
        if found is None:
            raise RequestError(
                f"no response {response_id!r} is stored here: it was not kept, was deleted, has made room for newer ones, or "
                "was another ingress's where they share no database; send the whole conversation as input",
                field=field,
                status=404,
                code="response_not_found",
            )
        return found

    async def _visible(self, kind: str, ids: Sequence[str], owner: str) -> list[StoreRecord]:
        known = sorted({one for one in ids if _ID.fullmatch(one)})
        return await self._store.find(kind, ids=known, owners=visible_owners(owner)) if known else []

    async def _end(self, record: StoreRecord, changes: Json) -> StoredResponse:
        """End a response that is in progress from outside, unless it has ended meanwhile. Returns how it ended."""
        stored = await asyncio.to_thread(_decoded, record)
        ended = replace(stored, body=stored.body | changes, request=None)
        body = await asyncio.to_thread(_encoded, ended)
        # Whoever generates it loses the lease to this holder, and stops.
        written = replace(
            record, body=body, num_bytes=len(body), state="", lives_s=self._age_s, holder="ended", lease_s=0.0
        )
        if await self._store.replace(written):
            return ended
        return await self.get(record.id, record.owner)

    async def _stop(self, response_id: str) -> None:
        """Cancel a response that runs here. Returns when its task has ended."""
        if task := self._leases.running(response_id):
            task.cancel()
            await asyncio.wait([task])


def _encoded(response: StoredResponse) -> bytes:
    said = [response.items, response.body]
    return json.dumps(said if response.request is None else [*said, response.request]).encode()


def _decoded(record: StoreRecord) -> StoredResponse:
    items, body, *request = json.loads(record.body)
    return StoredResponse(
        tenant=record.owner, items=tuple(items), body=body, request=request[0] if request else None
    )
