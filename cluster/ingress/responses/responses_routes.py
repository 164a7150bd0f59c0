"""OpenAI's Responses: a conversation of items, which the client sends whole or continues by a stored response's id."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.generation import request_params
from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.event_numbers import parsed_event_id
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.http.list_pages import page_of
from cluster.ingress.responses.background_responses import BackgroundResponses
from cluster.ingress.responses.conversation_routes import ConversationRoutes
from cluster.ingress.responses.conversation_store import ConversationStore
from cluster.ingress.responses.kept_response import SAID
from cluster.ingress.responses.response_making import ResponseMaking
from cluster.ingress.responses.response_store import ResponseStore, StoredResponse
from cluster.ingress.responses.response_turn import ResponseTurn, new_turn, turn_of
from cluster.ingress.responses.responses_bodies import Json
from cluster.ingress.responses.responses_compaction import CompactRequest, compaction
from cluster.ingress.responses.responses_items import ItemReference
from cluster.ingress.responses.responses_requests import ResponsesRequest, input_items
from cluster.ingress.responses.responses_turns import conversation_with
from cluster.ingress.tenants.access import Access
from cluster.ingress.tenants.fair_threads import at_once
from core.errors import ReplicaLost, RequestError

_ONE = "/v1/responses/{id}"


class ResponsesRoutes:
    """What one model answers. `stored_routes` are those of what is stored, whichever model has made it."""

    def __init__(
        self,
        answering: Answering,
        responses: ResponseStore,
        conversations: ConversationStore,
        access: Access,
    ) -> None:
        self._answering, self._store, self._conversations = answering, responses, conversations
        self._making = ResponseMaking(answering, responses, conversations)
        self.background = BackgroundResponses(answering, responses, self._making, access)

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/v1/responses", self.create, ResponsesRequest),
            HttpRoute("POST", "/v1/responses/input_tokens", self.count_tokens, ResponsesRequest),
            HttpRoute("POST", "/v1/responses/compact", self.compact, CompactRequest),
        ]

    def stored_routes(self, rows: "Sequence[ResponsesRoutes]") -> list[HttpRoute]:
        """`rows` are those of all models."""
        return [
            HttpRoute("GET", _ONE, partial(self.retrieve, rows)),
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
        goes_on = bool(body.stream or body.background)
        identity = http.state.identity = await answering.resuming.identity(http, streams=goes_on)
        record = identity.kept.record if identity.kept is not None else b""
        turn = turn_of(json.loads(record)) if record else await self._turn(http, body)
        identity.keep_record(turn.encoded)
        if body.background:
            return await self._begun(http, turn)
        return await self._making.answer(http, await self._making.prepare(http, turn))

    async def _begun(self, http: HttpRequest, turn: ResponseTurn) -> Response:
        """Begin a background response, or return the one that was begun by the same request. Raises StoreUnavailable."""
        identity, owner = http.state.identity, http.state.holder.owner
        response_id = f"resp_{identity.name}"
        is_known = identity.is_repeated and (
            identity.kept is not None or await self._store.has(response_id, owner)
        )
        if not is_known:
            ready = await self._making.prepare(http, turn)
            await ready.kept.begin(ready.shape.response)
            begun = JSONResponse(ready.shape.response)
            self._making.run(http, ready)
            if not turn.body.stream:
                return begun
        if turn.body.stream:
            return await self._stream(http, identity.name, identity.after)
        return JSONResponse((await self._store.get(response_id, owner)).body)

    async def _stream(self, http: HttpRequest, name: str, after: tuple[int, ...]) -> Response:
        """Stream a begun response's events, but those that the client has. Raises RequestError."""
        resuming, owner = self._answering.resuming, http.state.holder.owner
        kept = await resuming.find(name, owner)
        stored = None if kept is not None and kept.record else await self._store.get(f"resp_{name}", owner)
        record = kept.record if kept is not None and kept.record else b""
        if stored is not None and stored.request is not None:
            record = json.dumps(stored.request).encode()
        if not record:
            raise RequestError(
                f"the events of the response 'resp_{name}' are not kept any more: ask for it without stream",
                field="stream",
                status=404,
                code="stream_not_found",
            )
        turn = turn_of(json.loads(record))
        begun_at = kept.begun_at if kept is not None else stored.body["created_at"] if stored else 0
        identity = await resuming.begun(http, name, begun_at, after=after, record=record, kept=kept)
        identity.pays = not turn.body.background
        http.state.identity, http.state.num_bytes = identity, len(record)
        # Who generates a background response stores it.
        turn = replace(turn, body=turn.body.model_copy(update={"stream": True}))
        ready = await self._making.prepare(http, turn, keeps=not turn.body.background)
        return await self._making.answer(http, ready)

    async def count_tokens(self, http: HttpRequest) -> Response:
        """Count the tokens of what a response would be generated from."""
        answering = self._answering
        body = await answering.read(http, ResponsesRequest)
        request_params.check_model(body.model, answering.settings)
        turn = await self._turn(http, body)
        conversation = await conversation_with(http, answering, body, turn.items)
        prompt = await answering.prompt_of(http, conversation)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt)})

    async def _turn(self, http: HttpRequest, body: ResponsesRequest) -> ResponseTurn:
        """Return the turn of a new request. Raises RequestError and StoreUnavailable."""
        owner: str = http.state.holder.owner
        before, field = await self._before(body, owner)
        given = input_items(body)
        named = [item.id for item in given if isinstance(item, ItemReference)]
        stored = await self._store.items(named, owner) if named else {}
        slo_class = http.headers.get("x-slo-class")
        return await self._answering.aside(
            http, at_once(lambda: new_turn(body, before, field, given, stored, slo_class))
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
        turn = await self._turn(http, body.as_response)
        return JSONResponse(await compaction(http, self._answering, body, turn.items))

    async def retrieve(self, rows: "Sequence[ResponsesRoutes]", http: HttpRequest) -> Response:
        if http.query_params.get("stream", "false") != "false":
            name = http.path_params["id"].removeprefix("resp_")
            row = await self._maker_of(rows, name, http.state.holder.owner)
            return await row._stream(http, name, _events_before(http))
        return JSONResponse((await self._stored(http)).body)

    async def _maker_of(self, rows: "Sequence[ResponsesRoutes]", name: str, owner: str) -> "ResponsesRoutes":
        """Return the model that has made a response, or makes it; any where that is not known."""
        if len(rows) == 1:
            return self
        if await self._store.has(response_id := f"resp_{name}", owner):
            model = (await self._store.get(response_id, owner)).body["model"]
            return next((row for row in rows if row._answering.settings.serves(model)), self)
        for row in rows:
            with suppress(ReplicaLost):
                if await row._answering.resuming.find(name, owner) is not None:
                    return row
        return self

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
        if body.background and body.stream and not self._store.resumes:
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


def _events_before(http: HttpRequest) -> tuple[int, ...]:
    """Return how many events the client has, by what it says of the last one. Raises RequestError."""
    if last := http.headers.get("last-event-id"):
        return parsed_event_id(last)[1]
    after = http.query_params.get("starting_after")
    if after is None:
        return ()
    if not (after.isascii() and after.isdigit()):
        raise RequestError(
            f"starting_after must be an event's sequence_number, not {after[:80]!r}", field="starting_after"
        )
    return (int(after[:20]) + 1,)
