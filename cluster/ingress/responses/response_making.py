"""Makes a response of a turn: for the client that waits for it, or in the background."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import Response

from cluster.ingress.generation.answer_identity import AnswerIdentity
from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.body_shape import TokenEntries
from cluster.ingress.generation.choices import ChoiceStream
from cluster.ingress.requests.generation_request import GenerationRequest
from cluster.ingress.responses.conversation_store import ConversationStore
from cluster.ingress.responses.kept_response import KeptResponse
from cluster.ingress.responses.response_store import ResponseStore, StoredResponse
from cluster.ingress.responses.response_turn import ResponseTurn
from cluster.ingress.responses.responses_bodies import Json, ResponsesShape
from cluster.ingress.responses.responses_requests import ResponsesRequest
from cluster.ingress.responses.responses_turns import prepared_turn
from core.errors import ShuttingDown, StoreUnavailable


@dataclass(frozen=True, slots=True)
class Prepared:
    """A response that is about to be generated."""

    request: GenerationRequest
    choices: list[ChoiceStream]
    shape: ResponsesShape
    kept: KeptResponse


class ResponseMaking:
    def __init__(
        self, answering: Answering, responses: ResponseStore, conversations: ConversationStore
    ) -> None:
        self._answering, self._responses, self._conversations = answering, responses, conversations

    async def prepare(self, http: HttpRequest, turn: ResponseTurn, *, keeps: bool = True) -> Prepared:
        """Prepare the response that `http.state.identity` names. `keeps`: what it says is stored, as far as the client wants
        that. Raises RequestError."""
        answering, identity, body = self._answering, http.state.identity, turn.body
        request, chat = await prepared_turn(http, answering, body, turn.items)
        fitting = answering.fitting(request, chat.prompt)
        choices = await answering.choices(http, fitting, [chat.prompt], 1, chat)
        response = _skeleton(identity, body, chat.effort.taken)
        stored = StoredResponse(
            tenant=http.state.holder.owner, items=(*turn.before, *turn.own), body={}, request=turn.record
        )
        kept = KeptResponse(
            self._kept_in(http, response) if keeps else None,
            self._conversations,
            stored,
            turn.own,
            body.conversation_id if keeps else None,
            is_resumed=identity.kept is not None,
        )
        shape = ResponsesShape(
            response,
            new_id=identity.new_id,
            new_call_id=answering.call_ids(http),
            entries=TokenEntries(answering.tokenizer) if body.wants_logprobs else None,
            namespaces=body.namespaces,
            on_end=kept.end,
        )
        return Prepared(fitting, choices, shape, kept)

    async def answer(self, http: HttpRequest, ready: Prepared) -> Response:
        """Answer the client that waits."""
        request, kept = ready.request, ready.kept
        answer = await self._answering.answer(
            http, request, ready.choices, 1, ready.shape, settle=kept.settled
        )
        if why_not := "" if request.stream else await kept.settled():
            http.state.notes.append(why_not)
        return answer

    def run(self, http: HttpRequest, ready: Prepared) -> None:
        """Generate a background response, whose record this process has claimed."""
        response_id = ready.shape.response["id"]

        async def run() -> None:
            try:
                await self._answering.answer_aside(http, ready.choices, 1, ready.shape)
            except ShuttingDown:
                with suppress(StoreUnavailable):  # then the lease ends by itself
                    await self._responses.leave(response_id)
            except asyncio.CancelledError:
                ready.shape.cancelled()
                raise
            finally:
                await ready.kept.settled()

        self._responses.run(response_id, asyncio.create_task(run()))

    def _kept_in(self, http: HttpRequest, response: Json) -> ResponseStore | None:
        """Return where the response will be stored; None where it will not, and the body says so."""
        if response["store"] and not response["background"] and not self._responses.is_up:
            http.state.notes.append("store: the server's database does not answer, and this is not stored")
            response["store"] = False
        return self._responses if response["store"] else None


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
