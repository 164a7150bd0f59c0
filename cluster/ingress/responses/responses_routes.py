"""OpenAI's Responses: a conversation of items, which the client sends whole or continues by a stored response's id."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.generation import request_params
from cluster.ingress.generation.answer_identity import AnswerIdentity
from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.body_shape import TokenEntries
from cluster.ingress.generation.choices import ChoiceStream
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.http.list_pages import page_of
from cluster.ingress.responses.conversation_routes import ConversationRoutes
from cluster.ingress.responses.conversation_store import ConversationStore
from cluster.ingress.responses.kept_response import SAID, KeptResponse
from cluster.ingress.responses.response_store import ResponseStore, StoredResponse
from cluster.ingress.responses.responses_bodies import Json, ResponsesShape
from cluster.ingress.responses.responses_compaction import CompactRequest, compaction
from cluster.ingress.responses.responses_items import InputItem, ItemReference, PlacedItem, items_of
from cluster.ingress.responses.responses_requests import ResponsesRequest, input_items
from cluster.ingress.responses.responses_turns import conversation_with, prepared_turn
from cluster.ingress.tenants.fair_threads import at_once
from core.errors import RequestError

_ONE = "/v1/responses/{id}"
_Turn = tuple[tuple[Json, ...], tuple[Json, ...], list[PlacedItem]]
"""(items before the request's own, these, all of them)"""


class ResponsesRoutes:
    """What one model answers. `stored_routes` are those of what is stored, whichever model has made it."""

    def __init__(
        self, answering: Answering, responses: ResponseStore, conversations: ConversationStore
    ) -> None:
        self._answering, self._store, self._conversations = answering, responses, conversations

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/v1/responses", self.create, ResponsesRequest),
            HttpRoute("POST", "/v1/responses/input_tokens", self.count_tokens, ResponsesRequest),
            HttpRoute("POST", "/v1/responses/compact", self.compact, CompactRequest),
        ]

    def stored_routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("GET", _ONE, self.retrieve),
            HttpRoute("DELETE", _ONE, self.delete),
            HttpRoute("POST", _ONE + "/cancel", self.cancel),
            HttpRoute("GET", _ONE + "/input_items", self.input_items),
            *ConversationRoutes(self._answering, self._conversations).routes(),
        ]

    async def create(self, http: HttpRequest) -> Response:
        answering = self._answering
        body = await answering.read(http, ResponsesRequest)
        request_params.check_model(body.model, answering.settings)
        self._check(body)
        before, own, items = await self._conversation(http, body)
        request, chat = await prepared_turn(http, answering, body, items)
        fitting = answering.fitting(request, chat.prompt)
        choices = await answering.choices(http, fitting, [chat.prompt], 1, chat)
        response = _skeleton(http.state.identity, body, chat.effort.taken)
        stored = StoredResponse(tenant=http.state.holder.owner, items=(*before, *own), body={})
        kept = KeptResponse(
            self._kept_in(http, response), self._conversations, stored, own, body.conversation_id
        )
        shape = ResponsesShape(
            response,
            new_id=http.state.identity.new_id,
            new_call_id=answering.call_ids(http),
            entries=TokenEntries(answering.tokenizer) if body.wants_logprobs else None,
            namespaces=body.namespaces,
            on_end=kept.end,
        )
        if body.background:
            return await self._begun(http, choices, shape, kept)
        answer = await answering.answer(http, fitting, choices, 1, shape, settle=kept.settled)
        if why_not := "" if fitting.stream else await kept.settled():
            http.state.notes.append(why_not)
        return answer

    def _kept_in(self, http: HttpRequest, response: Json) -> ResponseStore | None:
        """Return where the response will be stored; None where it will not, and the body says so."""
        if response["store"] and not response["background"] and not self._store.is_up:
            http.state.notes.append("store: the server's database does not answer, and this is not stored")
            response["store"] = False
        return self._store if response["store"] else None

    async def _begun(
        self, http: HttpRequest, choices: list[ChoiceStream], shape: ResponsesShape, kept: KeptResponse
    ) -> Response:
        """Begin a background response. Raises StoreUnavailable."""
        begun = JSONResponse(shape.response)
        await kept.begin(shape.response)

        async def run() -> None:
            try:
                await self._answering.answer_aside(http, choices, 1, shape)
            except asyncio.CancelledError:
                shape.cancelled()
                raise
            finally:
                await kept.settled()

        self._store.run(shape.response["id"], asyncio.create_task(run()))
        return begun

    async def count_tokens(self, http: HttpRequest) -> Response:
        """Count the tokens of what a response would be generated from."""
        answering = self._answering
        body = await answering.read(http, ResponsesRequest)
        request_params.check_model(body.model, answering.settings)
        *_, items = await self._conversation(http, body)
        conversation = await conversation_with(http, answering, body, items)
        prompt = await answering.prompt_of(http, conversation)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt)})

    async def _conversation(self, http: HttpRequest, body: ResponsesRequest) -> _Turn:
        """Return the items before the body's own, these, and all of them, validated. Raises RequestError and
        StoreUnavailable."""
        owner: str = http.state.holder.owner
        before, field = await self._before(body, owner)
        given = input_items(body)
        named = [item.id for item in given if isinstance(item, ItemReference)]
        stored = await self._store.items(named, owner) if named else {}
        is_text = isinstance(body.input, str)
        return await self._answering.aside(
            http, at_once(lambda: _turn(before, field, given, stored, is_text=is_text))
        )

    async def _before(self, body: ResponsesRequest, owner: str) -> tuple[tuple[Json, ...], str]:
        """Return the items that the body goes on from, and the field that names them. Raises RequestError and
        StoreUnavailable."""
        if body.conversation_id is not None:
            field = "conversation"
            return (await self._conversations.get(body.conversation_id, owner, field)).items, field
        field = "previous_response_id"
        if body.previous_response_id is None:
            return (), field
        previous = await self._store.get(body.previous_response_id, owner, field)
        if previous.body["status"] not in SAID:
            raise RequestError(
                f"the response {body.previous_response_id!r} is {previous.body['status']}: nothing goes on from it",
                field=field,
            )
        return (*previous.items, *previous.body["output"]), field

    async def compact(self, http: HttpRequest) -> Response:
        """Make a conversation shorter: what the user has said, and the model's summary of it all."""
        body = await self._answering.read(http, CompactRequest)
        request_params.check_model(body.model, self._answering.settings)
        *_, items = await self._conversation(http, body.as_response)
        return JSONResponse(await compaction(http, self._answering, body, items))

    async def retrieve(self, http: HttpRequest) -> Response:
        if http.query_params.get("stream", "false") != "false":
            raise RequestError("a stored response cannot be streamed", field="stream")
        return JSONResponse((await self._stored(http)).body)

    async def delete(self, http: HttpRequest) -> Response:
        response_id = http.path_params["id"]
        await self._store.delete(response_id, http.state.holder.owner)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, http: HttpRequest) -> Response:
        """Cancel a response. One that has ended already is returned as it is."""
        stored = await self._stored(http)
        if not stored.body["background"]:
            raise RequestError("only a background response can be cancelled; close the connection of another")
        ended = await self._store.cancel(stored.body["id"], http.state.holder.owner)
        return JSONResponse(ended.body)

    async def input_items(self, http: HttpRequest) -> Response:
        items = enumerate((await self._stored(http)).items)
        return page_of(http, [_with_id(item, number) for number, item in items][::-1])

    async def _stored(self, http: HttpRequest) -> StoredResponse:
        return await self._store.get(http.path_params["id"], http.state.holder.owner)

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


def _turn(
    before: tuple[Json, ...],
    field: str,
    given: Sequence[InputItem],
    stored: Mapping[str, Json],
    *,
    is_text: bool,
) -> _Turn:
    """Return the turn of a body that has these items, of which `stored` has those that are named. Raises RequestError."""
    items = [PlacedItem(item, field) for item in items_of(before)]
    own: list[Json] = []
    for at, item in enumerate(given):
        if isinstance(item, ItemReference):
            own.append(stored[item.id])
            (item,) = items_of(own[-1:])
        else:
            own.append(item.model_dump(exclude_none=True))
        items.append(PlacedItem(item, "input" if is_text else f"input[{at}]"))
    return before, tuple(own), items


def _with_id(item: Json, number: int) -> Json:
    """Return an item with an id. Items that clients wrote have none."""
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {**item, "content": [{"type": kind, "text": content}]}
    return {"id": f"item_{number}", **item}


def _skeleton(identity: AnswerIdentity, body: ResponsesRequest, effort: str) -> Json:
    """Return the response before its first token. `effort` is the one that the model's template was given."""
    said: dict[str, Any] = body.model_dump(mode="json", by_alias=True)
    if said["reasoning"] and effort:
        said["reasoning"]["effort"] = effort
    return {
        "id": f"resp_{identity.name}",
        "object": "response",
        "created_at": identity.created_at,
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
