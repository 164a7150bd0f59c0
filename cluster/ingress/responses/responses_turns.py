"""From a conversation's items to the chat that is generated from, without its oldest turns where they do not fit."""

from collections.abc import Sequence
from itertools import takewhile

from fastapi import Request as HttpRequest

from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.chat_format import PreparedChat
from cluster.ingress.requests.conversation import ChatConversation
from cluster.ingress.requests.generation_request import GenerationRequest
from cluster.ingress.responses.responses_items import Item, MessageItem, PlacedItem
from cluster.ingress.responses.responses_requests import ResponsesRequest, conversation_of, generation_of
from cluster.ingress.tenants.fair_threads import at_once

_ROOM_SHARE = 8
"""With truncation, up to 1 / `_ROOM_SHARE` of the context is kept for the answer, as far as the request wants it."""


async def prepared_turn(
    http: HttpRequest, answering: Answering, body: ResponsesRequest, items: Sequence[PlacedItem]
) -> tuple[GenerationRequest, PreparedChat]:
    """Return the request and what is generated from. Raises RequestError."""
    request = await answering.aside(http, at_once(lambda: generation_of(body)))
    if body.truncation == "auto":
        items = await _fitting(http, answering, body, items)
    conversation = await conversation_with(http, answering, body, items)
    return request, await answering.prepare(http, conversation, request)


async def conversation_with(
    http: HttpRequest, answering: Answering, body: ResponsesRequest, items: Sequence[PlacedItem]
) -> ChatConversation:
    """Return the conversation of these items. Raises RequestError."""
    return await answering.aside(http, at_once(lambda: conversation_of(body, items)))


async def _fitting(
    http: HttpRequest, answering: Answering, body: ResponsesRequest, items: Sequence[PlacedItem]
) -> list[PlacedItem]:
    """Return as many of the last turns as the context has room for, and the first instructions; the last turn alone where even
    that is too long."""
    context = answering.settings.max_context_tokens
    share = context // _ROOM_SHARE
    most = context - max(1, min(body.max_output_tokens or share, share))
    head = list(takewhile(lambda placed: _instructs(placed.item), items))
    starts = [0, *(at for at, one in enumerate(items) if at > len(head) and _begins_turn(one.item))]
    first, last = 0, len(starts) - 1
    while first < last:
        middle = (first + last) // 2
        conversation = await conversation_with(http, answering, body, _from(items, head, starts[middle]))
        fits = len(await answering.prompt_of(http, conversation)) <= most
        first, last = (first, middle) if fits else (middle + 1, last)
    if first:
        http.state.notes.append(
            f"truncation: the first {starts[first] - len(head)} items do not fit and were left out"
        )
    return _from(items, head, starts[first])


def _from(items: Sequence[PlacedItem], head: Sequence[PlacedItem], start: int) -> list[PlacedItem]:
    return [*head, *items[start:]] if start else list(items)


def _instructs(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")


def _begins_turn(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"
