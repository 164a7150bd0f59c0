"""One response's way into the store: begun when it ends, and waited for before its client learns that it has."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from cluster.ingress.responses.conversation_store import ConversationStore
from cluster.ingress.responses.response_store import Json, ResponseStore, StoredResponse
from cluster.store.store_port import LeaseLost
from core.errors import RequestError, StoreUnavailable

log = logging.getLogger(__name__)

SAID = ("completed", "incomplete")
"""How a response stands that has an answer."""


class KeptResponse:
    def __init__(
        self,
        responses: ResponseStore | None,
        conversations: ConversationStore,
        stored: StoredResponse,
        own: Sequence[Json],
        conversation_id: str | None,
        *,
        is_resumed: bool,
    ) -> None:
        """`responses` is None where the response is not stored. `own` are the items of its request, which go with its output into
        the conversation. `is_resumed`: another ingress may have stored its end already."""
        self._is_resumed = is_resumed
        self._responses, self._conversations, self._stored = responses, conversations, stored
        self._own, self._conversation_id = own, conversation_id
        self._writing: asyncio.Task[str] | None = None

    async def begin(self, body: Json) -> None:
        """Store a background response before it is generated. Raises StoreUnavailable."""
        assert self._responses is not None
        await self._responses.put(replace(self._stored, body=body))

    def end(self, body: Json) -> None:
        """Begin to store the response as it ends."""
        self._writing = asyncio.create_task(self._write(body))

    async def settled(self) -> str:
        """Wait until it is stored. Returns why it is not; empty where it is. A cancelled caller leaves the writing alone."""
        return "" if self._writing is None else await asyncio.shield(self._writing)

    async def _write(self, body: Json) -> str:
        try:
            if self._responses is not None:
                await self._responses.put(replace(self._stored, body=body, request=None))
            if self._conversation_id and body["status"] in SAID:
                await self._add(self._conversation_id, body["output"])
        except LeaseLost:
            return "it was cancelled or deleted meanwhile"
        except (RequestError, StoreUnavailable, OSError) as error:
            log.warning("response %s is not kept: %s", body["id"], error)
            return f"not stored: {error}"
        return ""

    async def _add(self, conversation_id: str, output: Sequence[Json]) -> None:
        """Add both sides' items to the conversation, unless they are there."""
        owner = self._stored.tenant
        if self._is_resumed:
            whole = await self._conversations.get(conversation_id, owner)
            if {item["id"] for item in whole.items} & {item["id"] for item in output}:
                return
        await self._conversations.add(conversation_id, owner, [*self._own, *output])
