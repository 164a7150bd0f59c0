"""OpenAI's Responses: a conversation of items, which the client sends whole or continues by a stored response's id."""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.generation import request_params
from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.body_shape import TokenEntries
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.http.list_pages import page_of
from cluster.ingress.responses.conversation_routes import ConversationRoutes
from cluster.ingress.responses.conversation_store import ConversationStore
from cluster.ingress.responses.response_store import ResponseStore, StoredResponse
from cluster.ingress.responses.responses_bodies import Json, ResponsesShape
from cluster.ingress.responses.responses_compaction import CompactRequest, compaction
from cluster.ingress.responses.responses_items import ItemReference, PlacedItem, items_of
from cluster.ingress.responses.responses_requests import ResponsesRequest, input_items
from cluster.ingress.responses.responses_turns import conversation_with, prepared_turn
from cluster.ingress.tenants.fair_threads import at_once
from core.errors import RequestError

log = logging.getLogger(__name__)

_ONE = "/v1/responses/{id}"
_SAID = ("completed", "incomplete")
"""How a response stands that has an answer."""


class ResponsesRoutes:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._store = ResponseStore(answering.settings.response_store_bytes)
        self._conversations = ConversationStore(answering.settings.response_store_bytes)

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/v1/responses", self.create, ResponsesRequest),
            HttpRoute("POST", "/v1/responses/input_tokens", self.count_tokens, ResponsesRequest),
            HttpRoute("GET", _ONE, self.retrieve),
            HttpRoute("DELETE", _ONE, self.delete),
            HttpRoute("POST", _ONE + "/cancel", self.cancel),
            HttpRoute("GET", _ONE + "/input_items", self.input_items),
            HttpRoute("POST", "/v1/responses/compact", self.compact, CompactRequest),
            *ConversationRoutes(self._answering, self._conversations).routes(),
        ]

    async def create(self, http: HttpRequest) -> Response:
        answering = self._answering
        body = await answering.read(http, ResponsesRequest)
        request_params.check_model(body.model, answering.settings)
        self._check(body)
        owner: str = http.state.holder.owner
        before, own, items = await answering.aside(http, at_once(lambda: self._conversation(body, owner)))
        request, chat = await prepared_turn(http, answering, body, items)
        fitting = answering.fitting(request, chat.prompt)
        choices = await answering.choices(http, fitting, [chat.prompt], 1, chat)
        response_id = f"resp_{uuid.uuid4().hex}"
        stored = StoredResponse(tenant=owner, items=(*before, *own), num_own=len(own), body={})

        def keep(response: Json) -> None:
            if body.is_kept:
                self._store.put(replace(stored, body=response))
            if body.conversation_id and response["status"] in _SAID:
                self._add_turn(body.conversation_id, owner, [*own, *response["output"]])

        shape = ResponsesShape(
            _skeleton(response_id, body, chat.effort.taken),
            new_call_id=answering.chat_format.new_call_id,
            entries=TokenEntries(answering.tokenizer) if body.wants_logprobs else None,
            namespaces=body.namespaces,
            on_end=keep,
        )
        if not body.background:
            return await answering.answer(http, fitting, choices, 1, shape)
        keep(shape.response)

        async def run() -> None:
            try:
                await answering.answer_aside(http, choices, 1, shape)
            except asyncio.CancelledError:
                shape.cancelled()
                raise

        self._store.run(response_id, asyncio.create_task(run()))
        return JSONResponse(shape.response)

    async def count_tokens(self, http: HttpRequest) -> Response:
        """Count the tokens of what a response would be generated from."""
        answering = self._answering
        body = await answering.read(http, ResponsesRequest)
        request_params.check_model(body.model, answering.settings)
        owner: str = http.state.holder.owner
        *_, items = await answering.aside(http, at_once(lambda: self._conversation(body, owner)))
        conversation = await conversation_with(http, answering, body, items)
        prompt = await answering.prompt_of(http, conversation)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt)})

    def _conversation(
        self, body: ResponsesRequest, owner: str
    ) -> tuple[tuple[Json, ...], tuple[Json, ...], list[PlacedItem]]:
        """Return the items before the body's own, these, and all of them, validated. Raises RequestError."""
        before: tuple[Json, ...] = ()
        field = "previous_response_id"
        if body.conversation_id is not None:
            field = "conversation"
            before = self._conversations.get(body.conversation_id, owner, field).items
        elif body.previous_response_id is not None:
            before = self._before(body.previous_response_id, owner)
        items = [PlacedItem(item, field) for item in items_of(before)]
        own: list[Json] = []
        is_text = isinstance(body.input, str)
        for at, item in enumerate(input_items(body)):
            if isinstance(item, ItemReference):
                own.append(self._store.item(item.id, owner))
                (item,) = items_of(own[-1:])
            else:
                own.append(item.model_dump(exclude_none=True))
            items.append(PlacedItem(item, "input" if is_text else f"input[{at}]"))
        return before, tuple(own), items

    def _before(self, response_id: str, owner: str) -> tuple[Json, ...]:
        """Return the conversation up to a response. Raises RequestError."""
        previous = self._store.get(response_id, owner, "previous_response_id")
        if previous.body["status"] not in _SAID:
            raise RequestError(
                f"the response {response_id!r} is {previous.body['status']}: nothing goes on from it",
                field="previous_response_id",
            )
        return (*previous.items, *previous.body["output"])

    async def compact(self, http: HttpRequest) -> Response:
        """Make a conversation shorter: what the user has said, and the model's summary of it all."""
        body = await self._answering.read(http, CompactRequest)
        request_params.check_model(body.model, self._answering.settings)
        owner: str = http.state.holder.owner
        *_, items = await self._answering.aside(
            http, at_once(lambda: self._conversation(body.as_response, owner))
        )
        return JSONResponse(await compaction(http, self._answering, body, items))

    def _add_turn(self, conversation_id: str, owner: str, items: Sequence[Json]) -> None:
        """Add a turn to a conversation. One that was deleted meanwhile, or has become too long, stays as it is."""
        try:
            self._conversations.add(conversation_id, owner, items)
        except RequestError as error:
            log.warning("a turn is not kept in its conversation: %s", error)

    async def retrieve(self, http: HttpRequest) -> Response:
        if http.query_params.get("stream", "false") != "false":
            raise RequestError("a stored response cannot be streamed", field="stream")
        return JSONResponse(self._stored(http).body)

    async def delete(self, http: HttpRequest) -> Response:
        response_id = http.path_params["id"]
        await self._store.delete(response_id, http.state.holder.owner)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, http: HttpRequest) -> Response:
        """Cancel a response. One that has ended already is returned as it is."""
        stored = self._stored(http)
        if not stored.body["background"]:
            raise RequestError("only a background response can be cancelled; close the connection of another")
        await self._store.cancel(stored.body["id"])
        return JSONResponse(self._stored(http).body)

    async def input_items(self, http: HttpRequest) -> Response:
        items = enumerate(self._stored(http).items)
        return page_of(http, [_with_id(item, number) for number, item in items][::-1])

    def _stored(self, http: HttpRequest) -> StoredResponse:
        return self._store.get(http.path_params["id"], http.state.holder.owner)

    def _check(self, body: ResponsesRequest) -> None:
        """Check the body. Raises RequestError."""
        if body.conversation is not None and body.previous_response_id is not None:
            raise RequestError(
                "conversation does not go with previous_response_id: each names what this goes on from",
                field="conversation",
            )
        if body.background and body.stream:
            raise RequestError("a background response is not streamed: ask for it by its id", field="stream")
        if body.background and not (body.is_kept and self._store.keeps):
            raise RequestError("a background response must be stored", field="background")


def _with_id(item: Json, number: int) -> Json:
    """Return an item with an id. Items that clients wrote have none."""
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {**item, "content": [{"type": kind, "text": content}]}
    return {"id": f"item_{number}", **item}


def _skeleton(response_id: str, body: ResponsesRequest, effort: str) -> Json:
    """Return the response before its first token. `effort` is the one that the model's template was given."""
    said: dict[str, Any] = body.model_dump(mode="json", by_alias=True)
    if said["reasoning"] and effort:
        said["reasoning"]["effort"] = effort
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": said["reasoning"] or {"effort": None, "summary": None},
        "store": body.is_kept,
        "text": said["text"] or {"format": {"type": "text"}},
        "tool_choice": said["tool_choice"] or "auto",
        "tools": said["tools"] or [],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        **({"conversation": {"id": body.conversation_id}} if body.conversation_id else {}),
        **{
            name: said[name]
            for name in (
                "instructions",
                "max_output_tokens",
                "model",
                "previous_response_id",
                "service_tier",
                "temperature",
                "top_p",
            )
        },
    }
