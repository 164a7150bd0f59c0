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
    ) -> None:
        """`responses` is None where the response is not stored. `own` are the items of its request, which go with its output into
        the conversation."""
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
                await self._responses.put(replace(self._stored, body=body))
            if self._conversation_id and body["status"] in SAID:
                items = [*self._own, *body["output"]]
                await self._conversations.add(self._conversation_id, self._stored.tenant, items)
        except LeaseLost:
            return "it was cancelled or deleted meanwhile"
        except (RequestError, StoreUnavailable, OSError) as error:
            log.warning("response %s is not kept: %s", body["id"], error)
            return f"not stored: {error}"
        return ""
