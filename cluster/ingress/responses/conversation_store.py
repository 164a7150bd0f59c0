"""Conversations that clients keep here by an id, of all ingresses that share a store."""

import asyncio
import json
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.ingress.tenants.api_keys import may_see
from cluster.store.store_port import Bound, Store, StoreRecord
from core.errors import RequestError

Json = dict[str, Any]
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_KIND = "conversation"
_ID = re.compile(r"conv_[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One tenant's. Its items are in the order of the conversation, and each has an id."""

    tenant: str
    metadata: dict[str, str]
    id: str = field(default_factory=lambda: f"conv_{uuid.uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    items: tuple[Json, ...] = ()
    version: int = 0
    """The stored record's."""

    def public(self) -> Json:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }


class ConversationStore:
    """Conversations. Each owner's least recently used make room for new ones."""

    def __init__(self, store: Store, capacity_bytes: int, age_s: float) -> None:
        """An owner's conversations have up to `capacity_bytes`. They are deleted when nothing has changed for `age_s`."""
        self._store, self._capacity_bytes, self._age_s = store, capacity_bytes, age_s

    async def create(self, conversation: Conversation) -> None:
        """Store a new conversation. Raises RequestError where it alone exceeds the bound, and StoreUnavailable."""
        await self._store.put([await self._record(conversation)], bound=self._bound(conversation))

    async def get(self, conversation_id: str, owner: str, field: str | None = None) -> Conversation:
        """Return a conversation. Raises StoreUnavailable, and RequestError where `field` names what holds the id in the client's
        request."""
        is_id = _ID.fullmatch(conversation_id)
        found = await self._store.get(conversation_id, touch=True) if is_id else None
        if found is None or not may_see(owner, found.owner):
            raise RequestError(
                f"no conversation {conversation_id!r} is stored here: it was deleted, has made room for others, or is another "
                "ingress's where they share no database",
                field=field,
                status=404,
                code="conversation_not_found",
            )
        return await asyncio.to_thread(_decoded, found)

    async def delete(self, conversation_id: str) -> None:
        """Forget a conversation. One that is not there is no error."""
        await self._store.delete(conversation_id)

    async def change(
        self, conversation_id: str, owner: str, changed: Callable[[Conversation], Conversation]
    ) -> Conversation:
        """Store what `changed` makes of a conversation, once more where somebody else has changed it meanwhile. Returns it.
        Raises RequestError and StoreUnavailable."""
        while True:
            new = changed(await self.get(conversation_id, owner))
            if await self._store.replace(await self._record(new), bound=self._bound(new)):
                return new

    async def add(self, conversation_id: str, owner: str, items: Sequence[Json]) -> tuple[Json, ...]:
        """Add items to the end of a conversation, and return them as they are stored. Raises RequestError and
        StoreUnavailable."""
        whole = await self.change(conversation_id, owner, lambda found: with_items(found, items))
        return whole.items[len(whole.items) - len(items) :]

    def _bound(self, conversation: Conversation) -> Bound:
        return Bound(kind=_KIND, num_bytes=self._capacity_bytes, owner=conversation.tenant, makes_room=True)

    async def _record(self, conversation: Conversation) -> StoreRecord:
        body = await asyncio.to_thread(_encoded, conversation)
        if len(body) > self._capacity_bytes:
            raise RequestError(
                f"the conversation has {len(body)} bytes, and this server keeps {self._capacity_bytes} "
                "(serve.response_store_bytes): send its turns as input",
                field="items",
            )
        return StoreRecord(
            id=conversation.id,
            kind=_KIND,
            owner=conversation.tenant,
            body=body,
            num_bytes=len(body),
            lives_s=self._age_s,
            version=conversation.version,
        )


def with_items(conversation: Conversation, items: Sequence[Json]) -> Conversation:
    """Return the conversation with items at its end."""
    taken = {item["id"] for item in conversation.items}
    return replace(conversation, items=(*conversation.items, *(with_id(item, taken) for item in items)))


def with_id(item: Json, taken: set[str]) -> Json:
    """Return an item as a conversation has it: with an id and a status, and a message's text in a part."""
    kind = item.get("type", "message")
    own = item.get("id")
    if own is None or own in taken:
        own = f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"
    taken.add(own)
    out = {"type": kind, "status": "completed", **item, "id": own}
    if isinstance(text := item.get("content"), str):
        is_output = item.get("role") == "assistant"
        part: Json = {"type": "output_text" if is_output else "input_text", "text": text}
        out["content"] = [part | ({"annotations": []} if is_output else {})]
    return out


def _encoded(conversation: Conversation) -> bytes:
    said = {
        "created_at": conversation.created_at,
        "metadata": conversation.metadata,
        "items": conversation.items,
    }
    return json.dumps(said).encode()


def _decoded(record: StoreRecord) -> Conversation:
    said = json.loads(record.body)
    return Conversation(
        tenant=record.owner,
        metadata=said["metadata"],
        id=record.id,
        created_at=said["created_at"],
        items=tuple(said["items"]),
        version=record.version,
    )
