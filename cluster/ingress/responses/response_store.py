"""Responses that clients may ask for again or continue from, in this process's memory, within a bound."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from cluster.ingress.store.bounded_store import BoundedStore
from core.errors import RequestError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    tenant: str
    items: tuple[Json, ...]
    """The conversation that it answers, without its own output."""
    num_own: int
    """The number of items, at the end, that came with its own request."""
    body: Json


class ResponseStore:
    """Stored responses. The oldest make room for new ones."""

    def __init__(self, capacity_bytes: int) -> None:
        """With a bound of 0 nothing is kept."""
        self._stored = BoundedStore[StoredResponse](capacity_bytes, self._forgotten)
        self._holders: dict[str, str] = {}
        """By the id of an item of its output, the response."""
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def keeps(self) -> bool:
        return self._stored.capacity_bytes > 0

    def put(self, response: StoredResponse) -> None:
        """Store a response, in place of one with the same id. One that alone exceeds the bound is not kept."""
        response_id = response.body["id"]
        if self._stored.put(response_id, response, len(json.dumps([response.items, response.body]))):
            self._holders |= {item["id"]: response_id for item in response.body["output"]}

    def get(self, response_id: str, tenant: str, field: str | None = None) -> StoredResponse:
        """Return a response. Raises RequestError, where `field` names what holds the id in the client's request."""
        found = self._stored.get(response_id)
        if found is None or found.tenant != tenant:
            raise RequestError(
                f"no response {response_id!r} is stored here: it was not kept, was deleted, has made room for newer ones, or "
                "was another ingress's; send the whole conversation as input",
                field=field,
                status=404,
                code="response_not_found",
            )
        return found

    def item(self, item_id: str, tenant: str) -> Json:
        """Return an item of a stored response's output. Raises RequestError."""
        holder = self._stored.get(self._holders.get(item_id, ""))
        if holder is None or holder.tenant != tenant:
            raise RequestError(
                f"no item {item_id!r} of a response is stored here: send the item itself, or the response's id as "
                "previous_response_id to the ingress that gave it",
                field="input",
                status=404,
                code="item_not_found",
            )
        return next(item for item in holder.body["output"] if item["id"] == item_id)

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a response, and end it where it still runs. Raises RequestError."""
        self.get(response_id, tenant)
        await self.cancel(response_id)
        self._stored.forget(response_id)

    def run(self, response_id: str, task: "asyncio.Task[None]") -> None:
        """Hold a background response's task until it has ended."""
        self._running[response_id] = task
        task.add_done_callback(lambda _: self._running.pop(response_id, None))

    async def cancel(self, response_id: str) -> None:
        """Cancel a background response. Returns when its task has ended."""
        if task := self._running.get(response_id):
            task.cancel()
            await asyncio.wait([task])

    def _forgotten(self, response: StoredResponse) -> None:
        for item in response.body["output"]:
            self._holders.pop(item["id"], None)
