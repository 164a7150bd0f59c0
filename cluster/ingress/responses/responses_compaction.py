"""OpenAI's /v1/responses/compact: a conversation becomes what its user said, and a summary that the model writes."""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, ClassVar

from fastapi import Request as HttpRequest
from pydantic import Field

from cluster.ingress.bodies.body_model import NeutralFields, Strict, anything
from cluster.ingress.bodies.cache_hints import CacheHintsBody, Retention
from cluster.ingress.bodies.request_fields import ANY_TEXT, ANY_VALUE, CacheKey, ServiceTier
from cluster.ingress.generation.answering import Answering
from cluster.ingress.responses.conversation_store import with_id
from cluster.ingress.responses.responses_bodies import Json, ResponsesShape
from cluster.ingress.responses.responses_items import (
    MAX_ITEMS,
    InputItem,
    Item,
    MessageItem,
    PlacedItem,
    compacted,
)
from cluster.ingress.responses.responses_requests import RESPONSES_NEUTRAL, ResponsesRequest
from cluster.ingress.responses.responses_turns import prepared_turn
from core.errors import RequestError

_ASK = (
    "Summarise this conversation for somebody who goes on with it and has nothing else: what the user wants, what was found out "
    "and decided, which files, names and numbers matter, what was done, and what is left to do. Write the summary alone."
)
_MOST_TOKENS = 4096


class CompactRequest(Strict):
    neutral: ClassVar[NeutralFields] = {**RESPONSES_NEUTRAL, "image": (anything, "")}

    model: str
    input: (
        str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)] | None
    ) = None
    instructions: str | None = None
    previous_response_id: str | None = None
    service_tier: Annotated[ServiceTier | None, ANY_TEXT] = None
    prompt_cache_retention: Annotated[Retention | None, ANY_VALUE] = None
    prompt_cache_key: Annotated[CacheKey | None, ANY_VALUE] = None
    cache_hints: CacheHintsBody | None = None

    @property
    def as_response(self) -> ResponsesRequest:
        """The request for the summary, without its last message. Raises RequestError."""
        if self.input is None and self.previous_response_id is None:
            raise RequestError("give input, previous_response_id, or both", field="input")
        given: Json = {name: getattr(self, name) for name in type(self).model_fields}
        given |= {"input": self.input or [], "truncation": "auto", "max_output_tokens": _MOST_TOKENS}
        return ResponsesRequest.model_construct(set(given), **given)


async def compaction(
    http: HttpRequest, answering: Answering, body: CompactRequest, items: Sequence[PlacedItem]
) -> Json:
    """Return the compacted conversation. Raises RequestError."""
    asked = [*items, PlacedItem(MessageItem(role="user", content=_ASK), "input")]
    request, chat = await prepared_turn(http, answering, body.as_response, asked)
    fitting = answering.fitting(request, chat.prompt)
    choices = await answering.choices(http, fitting, [chat.prompt], 1, chat)
    shape = ResponsesShape(
        {"output": []},
        new_id=http.state.identity.new_id,
        new_call_id=answering.call_ids(http),
        entries=None,
        namespaces={},
        on_end=lambda _: None,
    )
    answer = await answering.whole_body(http, choices, 1, shape)
    texts = [
        part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]
    ]
    if not (text := "\n".join(texts).strip()):
        raise RequestError(
            "the model wrote no summary: ask again, or shorten the conversation yourself", code="no_summary"
        )
    summary: Json = {"type": "compaction", "encrypted_content": compacted(text)}
    said = [one.item.model_dump(exclude_none=True) for one in items if _is_users(one.item)]
    taken: set[str] = set()
    return {
        "id": f"resp_{http.state.identity.name}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*(with_id(item, taken) for item in said), {"id": f"cmp_{uuid.uuid4().hex}", **summary}],
        "usage": answer["usage"],
    }


def _is_users(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"
