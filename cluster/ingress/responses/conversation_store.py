"""Conversations that clients keep here by an id, in this process's memory, within a bound."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.ingress.store.bounded_store import BoundedStore
from core.errors import RequestError

Json = dict[str, Any]
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One tenant's. Its items are in the order of the conversation, and each has an id."""

    tenant: str
    metadata: dict[str, str]
    id: str = field(default_factory=lambda: f"conv_{uuid.uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    items: tuple[Json, ...] = ()

    def public(self) -> Json:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }

    @property
    def num_bytes(self) -> int:
        return len(json.dumps([self.metadata, self.items]))


class ConversationStore:
    """Conversations within a bound. The least recently used make room for new ones."""

    def __init__(self, capacity_bytes: int) -> None:
        self._stored = BoundedStore[Conversation](capacity_bytes)

    def put(self, conversation: Conversation) -> None:
        """Store a conversation, and remove an older one of its id. Raises RequestError where it alone exceeds the bound."""
        size = conversation.num_bytes
        if size > self._stored.capacity_bytes:
            raise RequestError(
                f"the conversation has {size} bytes, and this server keeps {self._stored.capacity_bytes} "
                "(serve.response_store_bytes): send its turns as input",
                field="items",
            )
        self._stored.put(conversation.id, conversation, size)

    def get(self, conversation_id: str, tenant: str, field: str | None = None) -> Conversation:
        """Return a conversation. Raises RequestError, where `field` names what holds the id in the client's request."""
        found = self._stored.get(conversation_id)
        if found is None or found.tenant != tenant:
            raise RequestError(
                f"no conversation {conversation_id!r} is stored here: it was deleted, has made room for others, or is another "
                "ingress's",
                field=field,
                status=404,
                code="conversation_not_found",
            )
        self._stored.move_to_end(conversation_id)
        return found

    def delete(self, conversation_id: str) -> None:
        """Forget a conversation. One that is not there is no error."""
        self._stored.forget(conversation_id)

    def add(self, conversation_id: str, tenant: str, items: Sequence[Json]) -> tuple[Json, ...]:
        """Add items to the end of a conversation, and return them as they are stored. Raises RequestError."""
        found = self.get(conversation_id, tenant)
        taken = {item["id"] for item in found.items}
        added = tuple(with_id(item, taken) for item in items)
        self.put(replace(found, items=(*found.items, *added)))
        return added


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
