"""OpenAI's /v1/conversations: items that turns of /v1/responses add to, and that clients read and edit."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from cluster.ingress.bodies.body_model import Strict
from cluster.ingress.generation.answering import Answering
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.http.list_pages import page_of
from cluster.ingress.responses.conversation_store import Conversation, ConversationStore, Json, with_items
from cluster.ingress.responses.responses_items import MAX_ITEMS, Item
from core.errors import RequestError

_ONE = "/v1/conversations/{id}"
_ITEMS = _ONE + "/items"
_ITEM = _ITEMS + "/{item_id}"
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Items = Annotated[list[Item], Field(max_length=MAX_ITEMS, fail_fast=True)]


class ConversationRequest(Strict):
    items: Items | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Strict):
    metadata: Metadata


class ConversationItems(Strict):
    items: Items


class ConversationRoutes:
    def __init__(self, answering: Answering, store: ConversationStore) -> None:
        self._answering, self._store = answering, store

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/v1/conversations", self.create, ConversationRequest),
            HttpRoute("GET", _ONE, self.retrieve),
            HttpRoute("POST", _ONE, self.update, ConversationUpdate),
            HttpRoute("DELETE", _ONE, self.delete),
            HttpRoute("POST", _ITEMS, self.add, ConversationItems),
            HttpRoute("GET", _ITEMS, self.items),
            HttpRoute("GET", _ITEM, self.item),
            HttpRoute("DELETE", _ITEM, self.delete_item),
        ]

    async def create(self, http: HttpRequest) -> Response:
        body = await self._answering.read(http, ConversationRequest)
        made = Conversation(tenant=http.state.holder.owner, metadata=body.metadata or {})
        await self._store.create(with_items(made, _dumped(body.items or ())))
        return JSONResponse(made.public())

    async def retrieve(self, http: HttpRequest) -> Response:
        return JSONResponse((await self._found(http)).public())

    async def update(self, http: HttpRequest) -> Response:
        """Replace a conversation's metadata."""
        body = await self._answering.read(http, ConversationUpdate)
        changed = await self._changed(http, lambda found: replace(found, metadata=body.metadata))
        return JSONResponse(changed.public())

    async def delete(self, http: HttpRequest) -> Response:
        found = await self._found(http)
        await self._store.delete(found.id)
        return JSONResponse({"id": found.id, "object": "conversation.deleted", "deleted": True})

    async def add(self, http: HttpRequest) -> Response:
        """Add items to the end of a conversation."""
        body = await self._answering.read(http, ConversationItems)
        added = await self._store.add(http.path_params["id"], http.state.holder.owner, _dumped(body.items))
        ends = {"first_id": added[0]["id"] if added else "", "last_id": added[-1]["id"] if added else ""}
        return JSONResponse({"object": "list", "data": list(added), **ends, "has_more": False})

    async def items(self, http: HttpRequest) -> Response:
        return page_of(http, list((await self._found(http)).items[::-1]))

    async def item(self, http: HttpRequest) -> Response:
        return JSONResponse(_item_of(await self._found(http), http.path_params["item_id"]))

    async def delete_item(self, http: HttpRequest) -> Response:
        def without(found: Conversation) -> Conversation:
            gone = _item_of(found, http.path_params["item_id"])
            return replace(found, items=tuple(item for item in found.items if item is not gone))

        return JSONResponse((await self._changed(http, without)).public())

    async def _changed(
        self, http: HttpRequest, change: Callable[[Conversation], Conversation]
    ) -> Conversation:
        return await self._store.change(http.path_params["id"], http.state.holder.owner, change)

    async def _found(self, http: HttpRequest) -> Conversation:
        return await self._store.get(http.path_params["id"], http.state.holder.owner)


def _dumped(items: Sequence[Item]) -> list[Json]:
    return [item.model_dump(exclude_none=True) for item in items]


def _item_of(conversation: Conversation, item_id: str) -> Json:
    for item in conversation.items:
        if item["id"] == item_id:
            return item
    raise RequestError(
        f"the conversation {conversation.id!r} has no item {item_id!r}", status=404, code="item_not_found"
    )
