"""From a conversation's items to the chat that is generated from, without its oldest turns where they do not fit."""

from collections.abc import Sequence
from itertools import takewhile

from fastapi import Request as HttpRequest

from cluster.ingress.bodies.request_bodies import ChatRequest
from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.chat_format import PreparedChat
from cluster.ingress.responses.responses_items import Item, MessageItem
from cluster.ingress.responses.responses_requests import ResponsesRequest, chat_of

_ROOM_SHARE = 8
"""With truncation, up to 1 / `_ROOM_SHARE` of the context is kept for the answer, as far as the request wants it."""


async def prepared_turn(
    http: HttpRequest, answering: Answering, body: ResponsesRequest, items: Sequence[Item]
) -> tuple[ChatRequest, PreparedChat]:
    """Return the chat request and what is generated from. Raises RequestError."""
    chat_body = chat_of(body, items)
    if body.truncation == "auto":
        chat_body = await _fitting(http, answering, body, items)
    return chat_body, await answering.prepare(http, chat_body)


async def _fitting(
    http: HttpRequest, answering: Answering, body: ResponsesRequest, items: Sequence[Item]
) -> ChatRequest:
    """Return the chat of as many of the last turns as the context has room for, and of the first instructions; of the last turn
    alone where even that is too long."""
    context = answering.settings.max_context_tokens
    share = context // _ROOM_SHARE
    most = context - max(1, min(body.max_output_tokens or share, share))
    head = list(takewhile(_instructs, items))
    starts = [0, *(at for at, item in enumerate(items) if at > len(head) and _begins_turn(item))]
    first, last = 0, len(starts) - 1
    while first < last:
        middle = (first + last) // 2
        chat_body = chat_of(body, _from(items, head, starts[middle]))
        fits = len(await answering.prompt_of(http, chat_body)) <= most
        first, last = (first, middle) if fits else (middle + 1, last)
    if first:
        http.state.notes.append(
            f"truncation: the first {starts[first] - len(head)} items do not fit and were left out"
        )
    return chat_of(body, _from(items, head, starts[first]))


def _from(items: Sequence[Item], head: Sequence[Item], start: int) -> list[Item]:
    return [*head, *items[start:]] if start else list(items)


def _instructs(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")


def _begins_turn(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"
